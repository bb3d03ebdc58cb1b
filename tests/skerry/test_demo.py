"""The demo, `skerry dev` and what they are made of: real processes, real sockets, a small job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file

from client.loading import load_task
from protocol.jobspec import Period, Stop
from skerry import demo
from skerry.baselines import measure
from skerry.cli.jobs import read_job
from skerry.comparison import Request
from skerry.federation import EXAMPLES, SitePlan, agent_toml, for_sites

DIGITS = EXAMPLES / "digits"
RESULT_KEYS = {
    *("accuracy", "central_accuracy", "alone_accuracy", "wan_bytes_up", "wan_bytes_down"),
    *("dense_bytes", "versions", "seconds", "sites"),
}


@pytest.mark.e2e
def test_four_sites_train_one_model_and_are_compared(tmp_path: Path):
    spec = msgspec.structs.replace(
        for_sites(read_job(DIGITS / "job.toml"), len(demo.SITES)),
        period=Period(steps=30), stop=Stop(versions=6),
    )  # fmt: skip
    result = demo.run_demo(tmp_path, DIGITS, spec, as_json=True)
    assert result.versions == 6
    assert result.sites == 4
    assert result.accuracy > result.alone_accuracy
    assert result.central_accuracy > result.alone_accuracy
    model = 4 * 4810
    assert result.dense_bytes == 2 * model * result.versions * result.sites
    assert result.wan_bytes_up > model * result.versions * result.sites
    assert set(msgspec.to_builtins(result)) == RESULT_KEYS
    text = demo.show(result)
    assert f"{result.accuracy:.4f}" in text
    assert "Next:" in text
    assert not running_in(tmp_path)


def running_in(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


def wait_for(stream: IO[str], start: str) -> str:
    for line in stream:
        if line.startswith(start):
            return line
    raise AssertionError(f"it ended without a line that starts with {start!r}")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGINT, ["-m", "skerry.demo", "--json"]),
        (signal.SIGTERM, ["-m", "skerry", "dev", "--sites", "2"]),
    ],
)
def test_a_signal_leaves_no_process_and_no_folder_behind(
    tmp_path: Path, number: signal.Signals, arguments: list[str]
):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        wait_for(process.stderr, "page:")
        assert running_in(tmp_path)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not running_in(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_fashion_mnist_digits_are_used_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "has_fashion_mnist", lambda: False)
    assert demo.choose_example() == DIGITS
    assert "apt-get install dataset-fashion-mnist" in capsys.readouterr().err
    monkeypatch.setattr(demo, "has_fashion_mnist", lambda: True)
    assert demo.choose_example() == EXAMPLES / "fashion_mnist"


def test_the_settings_of_a_site_survive_names_in_any_language():
    plan = SitePlan(
        name="x", task='Prüfung "病"', reference="C:\\t\\ä.py:T\x7f", data="/d", options={"k": "v"}
    )
    found = tomllib.loads(agent_toml(plan, 1))
    task = found["tasks"]['Prüfung "病"']
    assert task == {"reference": "C:\\t\\ä.py:T\x7f", "data": "/d", "options": {"k": "v"}}
    assert found["threads"] == 1


def test_baselines_train_with_the_code_and_the_optimizer_of_the_job(tmp_path: Path):
    spec = read_job(DIGITS / "job.toml")
    reference = str(DIGITS / "task.py:Digits")
    whole = {"part": "0", "parts": "1"}
    torch.manual_seed(0)
    save_file(load_task(reference).model().state_dict(), tmp_path / "model")
    request = Request(
        reference=reference, spec=spec, steps=150, everything=whole, central=True, alone=(whole,),
        model=str(tmp_path / "model"),
    )  # fmt: skip
    found = measure(request)
    assert found.central is not None
    assert found.model is not None
    assert found.alone == (found.central,)  # alone with all the data is central training
    assert found.central > 0.8 > found.model


def test_the_result_is_one_line_of_plain_numbers():
    result = demo.Result(
        accuracy=0.9, central_accuracy=0.9, alone_accuracy=0.8, wan_bytes_up=1, wan_bytes_down=2,
        dense_bytes=3, versions=4, seconds=5.0, sites=4,
    )  # fmt: skip
    assert set(json.loads(msgspec.json.encode(result))) == RESULT_KEYS
