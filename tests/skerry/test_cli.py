"""The command line: exit codes, one JSON line, notes on stderr, names in every language."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from client.taskref import hash_task
from privacy.tokens import format_join_token, new_join_token
from protocol.errors import ConflictError, InvalidFileError, Problem, RefusedError
from protocol.jobspec import JobSpec, TaskRef
from protocol.metrics import Combined
from protocol.views import (
    InitStored,
    JobDetail,
    JobList,
    SiteList,
    SiteView,
    TokenCreated,
    TokenList,
    TokenView,
    Validation,
    VersionList,
)
from skerry.cli.main import VERBS, cli, run
from skerry.cli.output import number, table
from skerry.cli.sites import seconds
from tests.skerry.fakeapi import FakeApi, fake_api
from tests.skerry.test_api import version
from tests.webui.test_render import job

JOB = """
name = "digits"
[task]
name = "digits"
file = "task.py:Digits"
[period]
steps = 5
[stop]
versions = 2
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def line(self) -> Any:
        """The last line on stdout, which is the only one, as JSON."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


Skerry = Callable[..., Ran]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeApi]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    with fake_api() as running:
        monkeypatch.setenv("SKERRY_COORDINATOR", running.url)
        monkeypatch.setenv("SKERRY_TOKEN", "t")
        running.answer("GET /api/v1/jobs", JobList(jobs=(job(),)))
        detail = JobDetail(job=job(), spec=JobSpec(name="digits", task=TaskRef(name="digits")))
        running.answer("GET /api/v1/jobs/j-1", detail)
        running.answer("GET /api/v1/jobs/j-1/versions", VersionList(versions=(version(0),)))
        running.answer("POST /api/v1/jobs", detail, 201)
        yield running


@pytest.fixture
def skerry(capfd: pytest.CaptureFixture[str]) -> Skerry:
    def call(*arguments: str) -> Ran:
        capfd.readouterr()
        code = run(cli, list(arguments), "skerry")
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return call


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text("class Digits: pass\n", encoding="utf-8")
    file = tmp_path / "job.toml"
    file.write_text(JOB, encoding="utf-8")
    return file


# ---------------------------------------------------------------- all verbs


def commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    found: list[tuple[str, ...]] = []
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found += commands(inner, (*path, name))
    return found


def test_the_verbs_are_those_that_are_documented():
    assert {" ".join(path) for path in commands(cli)} == {
        *("dev", "coordinator", "join", "agent", "config show", "doctor", "version", "task check"),
        *("site list", "site drain", "site revoke"),
        *("token create", "token list", "token revoke"),
        *(
            f"job {verb}"
            for verb in (
                *("submit", "validate", "list", "show", "watch", "pause", "resume"),
                *("drain", "stop", "export", "delete"),
            )
        ),
    }


@pytest.mark.parametrize("path", commands(cli), ids=" ".join)
def test_every_verb_has_help(skerry: Skerry, path: tuple[str, ...]):
    ran = skerry(*path, "--help")
    assert ran.code == 0
    assert ran.out.startswith("Usage: skerry")
    assert "('" not in ran.out  # a default as the flag takes it, not as Python writes it


@pytest.mark.parametrize("group", ["job", "site", "token", "task", "config"])
def test_a_groups_help_cuts_no_sentence_short(skerry: Skerry, group: str):
    assert "..." not in skerry(group, "--help").out.partition("Commands:")[2]


def test_help_comes_without_torch_and_without_the_coordinator():
    code = (
        "import sys\nfrom skerry.cli.main import cli, run\nrun(cli, ['--help'], 'skerry')\n"
        "run(cli, ['job', '--help'], 'skerry')\n"
        "heavy = {'torch', 'sqlalchemy', 'numpy', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert set(VERBS) <= set(ran.stdout.split())


# ---------------------------------------------------------------- exit codes


def ran_with(stdout: int | None, *arguments: str) -> tuple[int, str]:
    close = "" if stdout is not None else "exec >&-; "
    ran = subprocess.run(
        ["sh", "-c", close + 'exec "$@"', "sh", sys.executable, "-m", "skerry", *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def test_a_reader_that_has_gone_is_no_failed_job():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ran_with(writer, "version") == (128 + signal.SIGPIPE, "")
    finally:
        os.close(writer)


def test_a_closed_or_full_output_is_no_traceback():
    assert ran_with(None, "version", "--json") == (0, "")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as file:
        code, text = ran_with(file.fileno(), "version", "--json")
    assert code == 2
    assert text.splitlines()[0] == "error: the output cannot be used: No space left on device."


def test_a_wrong_flag_is_a_usage_error(skerry: Skerry):
    assert skerry("job", "list", "--no-such-flag").code == 2
    assert skerry("nonsense").code == 2


def test_nobody_there_is_unreachable_with_what_to_do(
    skerry: Skerry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    ran = skerry("job", "list", "--coordinator", "http://127.0.0.1:9")
    assert ran.code == 3
    assert "error: no coordinator at http://127.0.0.1:9" in ran.err
    assert "--coordinator" in ran.err
    assert "Traceback" not in ran.err


def test_refused_and_not_found_have_codes_of_their_own(skerry: Skerry, fake: FakeApi):
    fake.answer("GET /api/v1/sites", RefusedError("not allowed.").body(), 403)
    assert skerry("site", "list").code == 4
    assert skerry("job", "show", "other").code == 5
    fake.answer("POST /api/v1/jobs/j-1/pause", ConflictError("it has ended.").body(), 409)
    assert skerry("job", "pause", "digits").code == 4


def test_an_error_with_json_is_one_line_too(skerry: Skerry, fake: FakeApi):
    ran = skerry("job", "show", "other", "--json")
    assert ran.line["error"] == "NotFoundError"
    assert "error: there is no job 'other'" in ran.err


def test_an_interrupt_is_130(skerry: Skerry, fake: FakeApi, monkeypatch: pytest.MonkeyPatch):
    jobs = importlib.import_module("skerry.cli.jobs")

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.access, "connect", interrupt)
    assert skerry("job", "list").code == 130


# ---------------------------------------------------------------- jobs


def test_submitting_hashes_the_task_and_uploads_the_first_model(
    skerry: Skerry, fake: FakeApi, job_file: Path, tmp_path: Path
):
    init = tmp_path / "init.safetensors"
    save_file({"w": torch.zeros(2)}, init)
    fake.answer("POST /api/v1/inits", InitStored(init="i-7", bytes=1), 201)
    ran = skerry("job", "submit", str(job_file), "--init", str(init), "--json")
    assert ran.code == 0
    assert ran.line["id"] == "j-1"
    (sent,) = fake.bodies("POST /api/v1/jobs")
    assert sent["init"] == "i-7"
    assert sent["spec"]["task"]["sha256"] == hash_task(str(tmp_path / "task.py"))
    uploaded = next(raw for call, _, raw in fake.seen if call == "POST /api/v1/inits")
    assert uploaded == init.read_bytes()


def test_all_problems_of_a_job_file_are_listed_before_anything_is_sent(
    skerry: Skerry, fake: FakeApi, job_file: Path
):
    job_file.write_text(JOB.replace("steps = 5", "stepps = 5\nepochs = -1"), encoding="utf-8")
    ran = skerry("job", "submit", str(job_file))
    assert ran.code == 2
    assert "period.stepps" in ran.err
    assert "period.epochs" in ran.err
    assert not fake.seen


def test_validate_works_offline_and_asks_a_coordinator_that_answers(
    skerry: Skerry, fake: FakeApi, job_file: Path
):
    problem = Problem(key="sites.names", found="x", allowed="sites that have joined")
    fake.answer("POST /api/v1/jobs/validate", Validation(problems=(problem,)))
    ran = skerry("job", "validate", str(job_file), "--json")
    assert (ran.code, ran.line["problems"][0]["key"]) == (2, "sites.names")
    assert skerry("job", "validate", str(job_file), "--offline").code == 0
    ran = skerry("job", "validate", str(job_file), "--coordinator", "http://127.0.0.1:9")
    assert ran.code == 0
    assert "checked offline only" in ran.err
    job_file.write_text("name = 3", encoding="utf-8")
    ran = skerry("job", "validate", str(job_file))
    assert ran.code == InvalidFileError.exit_code
    assert "name" in ran.out


def test_numbers_that_are_not_finite_become_null(skerry: Skerry, fake: FakeApi):
    raw = b'{"jobs":[]}'
    fake.answer("GET /api/v1/jobs", raw)
    assert skerry("job", "list", "--json").line == {"jobs": []}
    output = importlib.import_module("skerry.cli.output")
    assert output._finite({"a": [float("nan"), float("inf"), 1.0]}) == {"a": [None, None, 1.0]}


def test_list_and_show_say_what_a_job_waits_for(skerry: Skerry, fake: FakeApi):
    assert "waits for edge-2" in skerry("job", "list").out
    shown = skerry("job", "show", "digits")
    assert shown.code == 0
    for text in ("病院-3", "training clock 3", "1.5 MB", "0.8750"):
        assert text in shown.out


def test_watch_prints_versions_and_ends_with_the_job(skerry: Skerry, fake: FakeApi):
    ended = job(version=1, state="failed", reason="no quorum in 3 rounds", ended_at=1.0)
    spec = JobSpec(name="digits", task=TaskRef(name="digits"))
    fake.answer("GET /api/v1/jobs/j-1", JobDetail(job=ended, spec=spec))
    fake.answer("GET /api/v1/jobs/j-1/versions", VersionList(versions=(version(0), version(1))))
    ran = skerry("job", "watch", "digits", "--json")
    assert ran.code == 1
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line.get("version") for line in lines] == [0, 1, 1]
    assert lines[-1]["state"] == "failed"
    ran = skerry("job", "watch", "digits")
    assert "version   1" in ran.out
    assert "no quorum in 3 rounds" in ran.out


def test_steering_sends_the_reason(skerry: Skerry, fake: FakeApi):
    for verb in ("pause", "resume", "drain", "stop"):
        fake.answer(f"POST /api/v1/jobs/j-1/{verb}", {})
        assert skerry("job", verb, "j-1", "--reason", "Wartung").code == 0
        assert fake.bodies(f"POST /api/v1/jobs/j-1/{verb}") == [{"reason": "Wartung"}]


def test_deleting_asks_first(skerry: Skerry, fake: FakeApi, monkeypatch: pytest.MonkeyPatch):
    fake.answer("DELETE /api/v1/jobs/j-1", {})
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: (_ for _ in ()).throw(click.Abort))
    assert skerry("job", "delete", "digits").code == 130
    assert not [call for call, _, _ in fake.seen if call.startswith("DELETE")]
    assert skerry("job", "delete", "digits", "--yes").code == 0


@pytest.mark.parametrize("verb", [("job", "delete", "digits"), ("site", "revoke", "north")])
def test_without_a_terminal_nothing_is_asked_and_nothing_is_done(
    skerry: Skerry, fake: FakeApi, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ran = skerry(*verb)
    assert ran.code == 2
    assert "Say --yes." in ran.err
    assert all(call.startswith("GET") for call, _, _ in fake.seen)


def test_a_path_that_cannot_be_used_is_a_sentence_and_not_a_traceback(
    skerry: Skerry, tmp_path: Path
):
    (tmp_path / "file").write_text("x")
    folder = str(tmp_path / "file" / "site")
    token = format_join_token(new_join_token("http://127.0.0.1:9", ""))
    ran = skerry("join", token, "--name", "n", "--folder", folder)
    assert ran.code == 2
    assert ran.err.splitlines() == [f"error: {folder} cannot be used: Not a directory."]


def test_export_refuses_a_model_with_holes_unless_they_are_filled_or_accepted(
    skerry: Skerry, fake: FakeApi, tmp_path: Path
):
    save_file({"body": torch.ones(3)}, tmp_path / "sent")
    save_file({"body": torch.zeros(3), "head": torch.ones(2)}, tmp_path / "base.safetensors")
    fake.answer(
        "GET /api/v1/jobs/j-1/export?version=3",
        (tmp_path / "sent").read_bytes(),
        headers={"X-Skerry-Missing": '["head"]', "X-Skerry-Missing-Count": "1"},
    )
    target = tmp_path / "out.safetensors"
    arguments = ["job", "export", "digits", "-o", str(target), "--json"]
    ran = skerry(*arguments)
    assert ran.code == 2
    assert "head" in ran.err
    assert not target.exists()
    assert skerry(*arguments, "--partial").line["missing"] == ["head"]
    assert set(load_file(target)) == {"body"}
    assert skerry(*arguments, "--base", "base.safetensors").line["missing"] == []
    assert torch.equal(load_file(target)["body"], torch.ones(3))
    assert set(load_file(target)) == {"body", "head"}
    assert sorted(file.name for file in tmp_path.iterdir() if "part" in file.name) == []


# ---------------------------------------------------------------- sites and tokens


def token_view(**changes: Any) -> TokenView:
    fields = {"id": "a1", "site": "", "role": "site", "created_at": 0.0, "expires_at": 4e9}
    return TokenView(**{**fields, **changes})


def test_a_token_is_alone_on_stdout_so_that_it_can_be_piped(skerry: Skerry, fake: FakeApi):
    made = TokenCreated(token="skj1.abc", view=token_view(site="edge-1"))
    fake.answer("POST /api/v1/tokens", made, 201)
    ran = skerry("token", "create", "--site", "edge-1", "--ttl", "2h", "--evaluator")
    assert ran.out == "skj1.abc\n"
    assert "for edge-1" in ran.err
    assert fake.bodies("POST /api/v1/tokens") == [
        {"site": "edge-1", "role": "evaluator", "ttl_seconds": 7200.0}
    ]
    assert skerry("token", "create", "--ttl", "40d").code == 2


def test_tokens_show_their_state(skerry: Skerry, fake: FakeApi):
    views = (
        token_view(id="b1"),
        token_view(id="b2", used_at=1.0, used_by="edge-1"),
        token_view(id="b3", revoked=True),
        token_view(id="b4", expires_at=1.0),
    )
    fake.answer("GET /api/v1/tokens", TokenList(tokens=views))
    out = skerry("token", "list").out
    for text in ("good", "used by edge-1", "revoked", "expired"):
        assert text in out


def test_sites_of_all_languages_are_aligned(skerry: Skerry, fake: FakeApi):
    sites = tuple(
        SiteView(
            name=name, role="site", state="connected", last_heard_seconds=1.0, joined_at=0.0,
            software="0.1.0", tasks=("digits",),
        )
        for name in ("Klinik-Zürich", "病院-3")
    )  # fmt: skip
    fake.answer("GET /api/v1/sites", SiteList(sites=sites))
    assert "病院-3" in skerry("site", "list").out
    assert [one["name"] for one in skerry("site", "list", "--json").line["sites"]] == [
        "Klinik-Zürich",
        "病院-3",
    ]


@pytest.mark.parametrize(
    ("text", "found"), [("90", 90.0), ("90s", 90.0), ("30m", 1800.0), ("2h", 7200.0)]
)
def test_spans_are_read(text: str, found: float):
    assert seconds(text) == found


# ---------------------------------------------------------------- text


def test_a_table_counts_wide_characters_and_drops_control_characters():
    lines = table(("a", "b"), [("病院", "1"), ("x\x1b[2J", "22")], right=(1,)).splitlines()
    assert lines[1] == "病院    1"
    assert "\x1b" not in lines[2]
    assert lines[2].endswith("22")


def test_figures_are_short_and_exact_where_it_matters():
    assert number(None) == "-"
    assert number(0.123456) == "0.1235"


NAMES = ["Klinik-Zürich", "病院-3", "edge-\N{ROCKET}", "ü" * 255]


def test_names_are_right_under_a_c_locale(fake: FakeApi, tmp_path: Path):
    """PC-085: LANG=C and PYTHONUTF8=0: names of sites, metrics and files as they are."""
    sites = tuple(
        SiteView(
            name=name, role="site", state="connected", last_heard_seconds=1.0, joined_at=0.0,
            software="0.1.0", tasks=(),
        )
        for name in NAMES
    )  # fmt: skip
    fake.answer("GET /api/v1/sites", SiteList(sites=sites))
    metric = Combined(value=0.5, sites=1, of_sites=1)
    view = job(name="Prüfung-病", metrics={"Genauigkeit-精度": metric})
    spec = JobSpec(name="digits", task=TaskRef(name="digits"))
    fake.answer("GET /api/v1/jobs", JobList(jobs=(view,)))
    fake.answer("GET /api/v1/jobs/j-1", JobDetail(job=view, spec=spec))
    save_file({"w": torch.ones(1)}, tmp_path / "sent")
    exported = (tmp_path / "sent").read_bytes()
    fake.answer("GET /api/v1/jobs/j-1/export?version=3", exported)
    env = {
        **{key: text for key, text in os.environ.items() if not key.startswith(("LC_", "LANG"))},
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }

    def call(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "skerry", *arguments],
            env=env, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr.decode()
        return ran.stdout.decode("utf-8")

    listed = call("site", "list")
    assert [name for name in NAMES if name in listed] == NAMES
    found = json.loads(call("site", "list", "--json"))
    assert [site["name"] for site in found["sites"]] == NAMES
    assert "Genauigkeit-精度" in call("job", "show", "Prüfung-病")
    target = tmp_path / "Modell-für-病院.safetensors"
    call("job", "export", "Prüfung-病", "-o", str(target))
    assert target.read_bytes() == exported


def test_task_check_says_what_would_leave_the_site(skerry: Skerry, tmp_path: Path):
    code = (
        "import torch, skerry\nfrom torch.utils.data import TensorDataset\n"
        "class T(skerry.Task):\n"
        "    def model(self):\n        return torch.nn.Linear(2, 2)\n"
        "    def data(self, site):\n"
        "        x = torch.randn(8, 2)\n"
        "        y = torch.zeros(8, dtype=torch.long) + int(site.options['label'])\n"
        "        return skerry.Data(train=TensorDataset(x, y), test=TensorDataset(x, y))\n"
    )
    file = tmp_path / "task.py"
    file.write_text(code, encoding="utf-8")
    ran = skerry("task", "check", str(file), "-o", "label=1")
    assert ran.code == 0
    for text in ("weight", "2x2", "16 B", hash_task(str(file)), "accuracy"):
        assert text in ran.out
    report = skerry("task", "check", str(file), "-o", "label=1", "--json").line
    assert [tensor["name"] for tensor in report["tensors"]] == ["weight", "bias"]
    ran = skerry("task", "check", str(file))  # the task's own mistake: its author sees where
    assert ran.code == 2
    assert "KeyError" in ran.err
    assert "task.py" in ran.err
    assert skerry("task", "check", str(file), "-o", "label").code == 2
    assert skerry("task", "check", str(tmp_path / "none.py")).code == 5


def test_config_show_names_the_origin_of_each_value(
    skerry: Skerry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKERRY_LEASE_SECONDS", "30")
    monkeypatch.setenv("SKERRY_TOKEN", "secret-text")
    monkeypatch.setenv("SKERRY_LEESE", "1")
    ran = skerry("config", "show", "--json")
    found = ran.line["coordinator"]["lease_seconds"]
    assert found == {"value": 30.0, "origin": "environment SKERRY_LEASE_SECONDS"}
    assert "SKERRY_LEESE is no setting" in ran.err
    assert "secret-text" not in ran.out
    assert ran.line["person"]["token"]["value"] == "(set)"
    assert "False" not in skerry("config", "show", "coordinator").out
    monkeypatch.setenv("SKERRY_LEASE_SECONDS", "-1")
    assert skerry("config", "show").code == 2


def test_version_says_both_numbers(skerry: Skerry):
    assert skerry("version", "--json").line["protocol"] == 1
    assert "protocol 1" in skerry("version").out


def test_doctor_goes_on_after_a_failure_and_tells_by_its_code(skerry: Skerry, fake: FakeApi):
    ran = skerry("doctor", "--coordinator", "http://127.0.0.1:9", "--json")
    assert ran.code == 3
    assert {one["check"] for one in ran.line["findings"]} >= {"python", "disk", "coordinator"}
