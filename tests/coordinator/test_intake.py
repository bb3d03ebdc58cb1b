"""Bulk from those who may send it, and files for version 0."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from coordinator.engine import Engine
from protocol.errors import (
    ConflictError,
    InvalidFileError,
    NotFoundError,
    RefusedError,
)
from protocol.messages import Prepare
from protocol.views import JobRequest
from tests.coordinator.engines import running
from tests.coordinator.stubsite import (
    StubSite,
    joined,
    read_params,
    spec_of,
    submitted,
)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


async def test_a_site_that_takes_no_part_uploads_nothing(engine: Engine) -> None:
    await joined(engine, "a")
    job = await submitted(engine, spec_of())
    what = {"job": job, "site": "a", "epoch": 1, "clock": 0, "attempt": 1}
    with pytest.raises(RefusedError, match="no part"):
        await engine.begin_upload(**what, offset=0, length=10)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        await engine.begin_upload(**{**what, "job": "../x"}, offset=0, length=10)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        engine.version_file("../../etc", 0)


async def test_a_file_for_version_0_that_is_not_there_leaves_no_job(
    engine: Engine, tmp_path: Path
) -> None:
    for name in ("0" * 16, "../../../etc/passwd", ""):
        if name:
            with pytest.raises(NotFoundError, match="no uploaded file"):
                await engine.submit(JobRequest(spec=spec_of(), init=name), "me")
    assert (await engine.jobs()).jobs == ()
    assert list((tmp_path / "jobs").iterdir()) == []


async def test_a_file_for_version_0_that_breaks_off_leaves_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    file = await engine.begin_init_file(100)
    await file.write(b"x" * 50)
    await file.broken()
    file = await engine.begin_init_file(100)
    await file.write(b"x" * 50)
    with pytest.raises(ConflictError, match="50 of 100"):
        await file.finish()
    assert list((tmp_path / "inits").iterdir()) == []


async def test_a_job_starts_from_a_persons_file(tmp_path: Path) -> None:
    async with running(tmp_path, real=True) as engine:
        import numpy as np

        source = tmp_path / "start.safetensors"
        save_file({"w": np.full(4, 100.0, dtype=np.float32)}, source)
        body = source.read_bytes()
        file = await engine.begin_init_file(len(body))
        await file.write(body)
        stored = await file.finish()
        await joined(engine, "a")
        spec = spec_of(versions=1)
        job = await engine.submit(JobRequest(spec=spec, init=stored.init), "me")
        site = StubSite(engine, "a")
        await site.run()
        assert read_params(engine.version_file(job, 1)) == [101.0] * 4
        assert isinstance(site.log[0], Prepare)
        with pytest.raises(NotFoundError, match="no uploaded file"):  # it is used up
            await engine.submit(JobRequest(spec=spec, init=stored.init), "me")

        file = await engine.begin_init_file(9)
        await file.write(b"no tensor")
        bad = await file.finish()
        with pytest.raises(InvalidFileError, match="version 0"):
            await engine.submit(JobRequest(spec=spec, init=bad.init), "me")
        assert len((await engine.jobs()).jobs) == 1
