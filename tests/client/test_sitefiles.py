from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from client.sessionapi import Identity, RememberJob
from client.sitefiles import (
    SentLog,
    SiteFolder,
    SiteIdentity,
    base_body,
    job_folder,
    path_of,
    text_of,
    write_atomic,
)
from client.sitestate import UpdateRecord
from protocol.errors import ConflictError, LimitError, NotFoundError, RefusedError, UsageError
from tests.client.fake_coordinator import stub_spec

IDENTITY = SiteIdentity(
    name="病院-3", role="site", url="https://c.test:8470", coordinator="c", protocol=1
)


def joined(path: Path) -> SiteFolder:
    folder = SiteFolder(path)
    folder.save_identity(IDENTITY, secret="s", key_pem=b"k", ca_pem=b"ca")
    return folder


def update(folder: SiteFolder, job: str, clock: int, *, record: bool = True) -> Path:
    path = job_folder(folder.jobs, job) / f"update-1-{clock}-1"
    path.mkdir(parents=True)
    (path / "body").write_bytes(b"x" * 10)
    if record:
        meta = UpdateRecord(
            job=job, site="s", epoch=1, clock=clock, attempt=1, base_version=0, bytes=10,
            examples=1, steps=1, norm=1.0, seconds=0.0,
        )  # fmt: skip
        (path / "meta.json").write_bytes(msgspec.json.encode(meta))
    return path


def test_an_identity_comes_back_as_it_was_stored(tmp_path: Path):
    folder = joined(tmp_path / "site")
    assert folder.joined
    assert folder.identity() == IDENTITY
    assert folder.secret() == "s"
    assert folder.ca == folder.path / "ca.pem"
    for name in ("secret", "key.pem"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600


def test_a_folder_without_a_site_says_how_to_join(tmp_path: Path):
    with pytest.raises(NotFoundError, match="has not joined"):
        SiteFolder(tmp_path).identity()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path):
    folder = joined(tmp_path / "site")
    (folder.path / "secret").chmod(0o640)
    with pytest.raises(RefusedError, match="0640"):
        folder.secret()


def test_a_damaged_identity_is_named(tmp_path: Path):
    folder = joined(tmp_path / "site")
    (folder.path / "site.json").write_text("{", encoding="utf-8")
    with pytest.raises(RefusedError, match=r"site\.json is damaged"):
        folder.identity()


def test_a_folder_has_one_agent(tmp_path: Path):
    folder = SiteFolder(tmp_path / "site")
    code = (
        "import sys; from pathlib import Path; from client.sitefiles import SiteFolder\n"
        "with SiteFolder(Path(sys.argv[1])).locked(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ConflictError, match=f"process {holder.pid}"), folder.locked():
        pass
    holder.kill()
    holder.communicate()
    with folder.locked():  # a dead holder holds nothing
        assert (folder.path / "lock").read_text("ascii") == str(os.getpid())


def test_jobs_are_remembered_and_a_damaged_one_spoils_no_other(tmp_path: Path):
    folder = SiteFolder(tmp_path)
    job = RememberJob(job="../../etc", spec=stub_spec(), evaluator=False)
    folder.remember(job)
    bad = folder.jobs / "bad"
    bad.mkdir()
    (bad / "job.json").write_bytes(b"\x80")
    assert folder.known_jobs() == {"../../etc": job}
    assert all(path.parent == folder.jobs for path in folder.jobs.iterdir())
    folder.forget("../../etc")
    assert folder.known_jobs() == {}


def test_stored_updates_are_found_whole_and_in_order(tmp_path: Path):
    folder = SiteFolder(tmp_path)
    for clock in (10, 9):
        update(folder, "j", clock)
    update(folder, "j", 11, record=False)
    update(folder, "j", 12).rename(job_folder(folder.jobs, "j") / ".tmp-update-1-12-1")
    found = folder.stored_updates()
    assert [(each.identity, each.bytes) for each in found] == [
        (Identity(job="j", epoch=1, clock=clock, attempt=1), 10) for clock in (9, 10)
    ]


def test_superseded_snapshots_go_and_halves_of_kept_ones_stay(tmp_path: Path):
    folder = SiteFolder(tmp_path)
    jobs = job_folder(folder.jobs, "j")
    jobs.mkdir(parents=True)
    for version in (1, 2, 3):
        base_body(jobs, version).write_bytes(b"")
    (jobs / "base-3.body.part").write_bytes(b"")
    (jobs / "base-1.body.part").write_bytes(b"")
    folder.keep_bases("j", (3,))
    assert sorted(path.name for path in jobs.iterdir()) == ["base-3.body", "base-3.body.part"]


def test_what_a_killed_agent_left_half_written_is_removed(tmp_path: Path):
    folder = joined(tmp_path)
    jobs = job_folder(folder.jobs, "j")
    jobs.mkdir(parents=True)
    for stale in (folder.path / "site.json.tmp", jobs / "job.json.tmp", jobs / "init.body"):
        stale.write_bytes(b"half")
    (jobs / "base-1.body.part").write_bytes(b"half")
    folder.remove_stale()
    assert [path.name for path in jobs.iterdir()] == ["base-1.body.part"]
    assert folder.identity() == IDENTITY


def test_a_small_file_is_replaced_whole_with_its_mode(tmp_path: Path):
    path = tmp_path / "secret"
    write_atomic(path, b"old", 0o600)
    write_atomic(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_download_that_would_fill_the_disk_is_refused_with_both_numbers(tmp_path: Path):
    folder = SiteFolder(tmp_path)
    folder.check_space(1)
    with pytest.raises(LimitError, match="MB free"):
        folder.check_space(1 << 60)


def test_the_log_of_what_left_is_json_lines_and_stays_bounded(tmp_path: Path):
    log = SentLog(tmp_path, bytes_max=2_000)
    for number in range(100):
        log.add(number, "update", {"job": "j", "clock": number, "bytes": 5})
    lines = (tmp_path / "sent.jsonl").read_text("utf-8").splitlines()
    before = (tmp_path / "sent.1.jsonl").read_text("utf-8").splitlines()
    last = msgspec.json.decode((lines or before)[-1])
    assert last == {"time": 99.0, "kind": "update", "job": "j", "clock": 99, "bytes": 5}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2_200


def test_paths_are_utf8_whatever_the_locale():
    """PC-085: a path read under the C locale reaches the worker as what it is."""
    raw = "Klinik-Zürich/病院".encode()
    read_as_ascii = raw.decode("ascii", "surrogateescape")
    assert text_of(read_as_ascii) == "Klinik-Zürich/病院"
    assert text_of(Path("a/病院")) == "a/病院"
    assert path_of("a/b") == Path("a/b")
    with pytest.raises(UsageError, match="not UTF-8"):
        text_of(b"caf\xe9".decode("ascii", "surrogateescape"))
