"""`skerry task check`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Final

import click

from client.taskcheck import Report, check
from protocol.errors import InvalidFileError, SkerryError
from protocol.jobspec import JobSpec, Period, Stop, TaskRef
from protocol.metrics import Metric
from protocol.words import size
from skerry.cli.jobs import read_job
from skerry.cli.output import emit, json_flag, note, number, table

_STEPS: Final = 20  # of a check without a job file


@click.group()
def task() -> None:
    """Check a task offline."""


@task.command("check")
@click.argument("reference")
@click.option(
    "--job",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help=f"Train as this job says (default: {_STEPS} steps of SGD).",
)
@click.option("--data", default="", help="Path of this site's data: site.data in the task.")
@click.option(
    "--option", "-o", "options", multiple=True, metavar="KEY=VALUE", help="A site option."
)
@json_flag
def check_task(
    reference: str, file: Path | None, data: str, options: tuple[str, ...], as_json: bool
) -> int:
    """Say what would leave this site.

    Runs one period of the task REFERENCE on local data, offline. REFERENCE is
    path/to/task.py:Class, path/to/task.py or package.module:Class.

    \b
    Examples:
      skerry task check examples/digits/task.py
      skerry task check task.py:Mine --job job.toml --data /data/mine -o part=0 -o parts=4
    """
    spec = read_job(file) if file else _small_job(reference)
    try:
        report = check(reference, spec, data=data, options=_pairs(options))
    except SkerryError:
        raise
    except Exception as error:
        # The task's own code failed: its author needs the traceback, whole.
        traceback.print_exception(error, file=sys.stderr)
        note(f"error: the task's code raised {type(error).__name__}: {error}")
        return InvalidFileError.exit_code
    if as_json:
        emit(report)
    else:
        click.echo(render(report))
    return 0


def render(report: Report) -> str:
    """The report for people."""
    rows = [
        (
            tensor.name,
            "x".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            f"{tensor.role}, tied to {tensor.tie}" if tensor.tie else tensor.role,
            size(tensor.leaves) if tensor.leaves else "stays here",
        )
        for tensor in report.tensors
    ]
    parts = ", ".join(f"{name} {size(count)}" for name, count in report.parts.items() if count)
    lines = [
        f"task      {report.task}",
        f"sha256    {report.sha256}",
        f"examples  {report.train_examples} to train, {report.eval_examples} to evaluate",
        f"trained   {report.steps} steps, {1000 * report.seconds_per_step:.1f} ms each",
        f"loss      {number(report.train_loss)}, mean over the period",
        "",
        table(("tensor", "shape", "dtype", "role", "leaves the site"), rows),
        "",
        f"each update: {size(report.update_bytes)} ({parts or 'nothing'})",
        "with it go: number of examples and steps, training loss, norm of the update, its times",
    ]
    if report.before or report.after:
        pairs = [
            (name, _value(report.before.get(name)), _value(report.after.get(name)))
            for name in sorted({*report.before, *report.after})
        ]
        lines += ["", table(("metric, sent too", "before", "after"), pairs, (1, 2))]
    lines += [f"note: {text}" for text in report.notes]
    return "\n".join(lines)


def _value(found: Metric | None) -> str:
    if found is None:
        return "-"
    if isinstance(found.value, (int, float)):
        return number(found.value)
    return found.nonfinite or found.value or "-"


def _small_job(reference: str) -> JobSpec:
    return JobSpec(
        name="check",
        task=TaskRef(name="check", file=reference),
        period=Period(steps=_STEPS),
        stop=Stop(versions=1),
    )


def _pairs(options: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="--option")
        found[key] = value
    return found
