"""`skerry job ...`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from client.taskref import hash_task
from protocol import jobfile
from protocol.errors import (
    InvalidFileError,
    RefusedError,
    UnreachableError,
    UsageError,
)
from protocol.guarantees import guarantees
from protocol.jobspec import JobSpec
from protocol.views import JobRequest, JobView, Validation, VersionView
from protocol.words import size, span
from skerry import merge
from skerry.cli import access
from skerry.cli.output import confirm, emit, json_flag, note, number, table
from skerry.cli.watch import watch_job


@click.group()
def job() -> None:
    """Submit, watch and steer jobs."""


def read_job(file: Path) -> JobSpec:
    """A job file, with the hash of its task's code filled in.

    Raises:
        InvalidFileError: every problem of the file.
        NotFoundError: the task's file is not there.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{file} cannot be read: {error}.") from None
    spec = jobfile.parse(text, where=str(file))
    if spec.task.file and not spec.task.sha256:
        digest = hash_task(spec.task.file, file.parent)
        spec = msgspec.structs.replace(spec, task=msgspec.structs.replace(spec.task, sha256=digest))
    return spec


@job.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--init",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A safetensors file that becomes version 0, instead of a model from the seed.",
)
@click.option("--watch", is_flag=True, help="Stay and show progress until the job has ended.")
@json_flag
@access.options
def submit(file: Path, init: Path | None, watch: bool, as_json: bool, **given: Any) -> int:
    """Submit the job in FILE.

    \b
    Examples:
      skerry job submit job.toml --watch
      skerry job submit job.toml --init model.safetensors --json
    """
    spec = read_job(file)
    api = access.connect(given)
    stored = api.store_init(init).init if init else ""
    view = api.submit(JobRequest(spec=spec, init=stored)).job
    if watch:
        note(f"job {view.id} was taken; Ctrl-C ends watching, not the job")
        return watch_job(api, view.id, as_json=as_json)
    if as_json:
        emit(view)
    else:
        click.echo(f"job {view.id} was taken: {view.state}, {view.waiting or view.reason}")
    return 0


@job.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--offline", is_flag=True, help="Do not ask a coordinator.")
@json_flag
@access.options
def validate(file: Path, offline: bool, as_json: bool, **given: Any) -> int:
    """Name every problem of the job in FILE.

    Nothing is submitted. The file is checked here; a coordinator that answers is asked as well.
    """
    found = Validation(problems=())
    try:
        spec = read_job(file)
        found = Validation(
            problems=(), warnings=jobfile.validate(spec)[1], guarantees=guarantees(spec)
        )
        if not offline:
            found = _ask_too(found, JobRequest(spec=spec), given)
    except InvalidFileError as error:
        if not error.problems:
            raise
        found = Validation(problems=error.problems)
    for text in found.warnings:
        note(f"warning: {text}")
    if as_json:
        emit(found)
    elif found.problems:
        count = len(found.problems)
        click.echo(f"{file} has {count} problem{'s' if count > 1 else ''}:")
        for problem in found.problems:
            click.echo(f"  {problem}")
    else:
        click.echo(f"{file} is valid; its pacing guarantees:")
        for sentence in found.guarantees:
            click.echo(f"  - {sentence}")
    return InvalidFileError.exit_code if found.problems else 0


def _ask_too(found: Validation, request: JobRequest, given: dict[str, Any]) -> Validation:
    try:
        online = access.connect(given).validate(request)
    except UnreachableError as error:
        note(f"checked offline only: {error.message}")
        return found
    except RefusedError as error:
        note(f"checked offline only: {error.message}")
        return found
    warnings = (*found.warnings, *(one for one in online.warnings if one not in found.warnings))
    promised = () if online.problems else found.guarantees
    return Validation(problems=online.problems, warnings=warnings, guarantees=promised)


@job.command("list")
@json_flag
@access.options
def list_jobs(as_json: bool, **given: Any) -> None:
    """List all jobs."""
    jobs = access.connect(given).jobs()
    if as_json:
        emit({"jobs": jobs})
    elif not jobs:
        note("no jobs yet; `skerry job submit job.toml` submits one")
    else:
        rows = [
            (view.id, view.name, view.state, view.version, *_metric(view), view.waiting or "")
            for view in jobs
        ]
        click.echo(
            table(("id", "name", "state", "version", "metric", "value", "waits for"), rows, (3, 5))
        )


@job.command()
@click.argument("name")
@json_flag
@access.options
def show(name: str, as_json: bool, **given: Any) -> None:
    """Show one job: its state, its sites and its last versions. NAME may be its id or its name."""
    api = access.connect(given)
    identity = api.find_job(name)
    detail = api.job(identity)
    if as_json:
        emit(detail)
        return
    view = detail.job
    saved = f", dense exchange {size(view.dense_bytes)}" if view.dense_bytes else ""
    click.echo(f"{view.id}  {view.name}  {view.state}  version {view.version}")
    if view.reason or view.waiting:
        click.echo(f"  {view.waiting or view.reason}")
    click.echo(f"  running {span(view.running_seconds)}, model {size(view.model_bytes)}")
    click.echo(f"  up {size(view.bytes_up)}, down {size(view.bytes_down)}{saved}")
    for metric, value in sorted(view.metrics.items()):
        worst = (
            f" (worst {value.worst_site} {number(value.worst_value)})" if value.sites > 1 else ""
        )
        at = f" at version {view.metrics_version}" if view.metrics_version is not None else ""
        click.echo(f"  {metric} {number(value.value)}{worst}{at}")
    rows = [
        (
            s.site,
            s.clock,
            s.counted,
            s.refused,
            f"{s.data_share:.0%}",
            f"{s.version_share:.0%}",
            size(s.bytes_up),
            size(s.bytes_down),
            s.doing,
        )
        for s in view.sites
    ]
    heads = ("site", "clock", "counted", "refused", "of data", "of versions", "up", "down", "doing")
    click.echo("\n" + table(heads, rows, (1, 2, 3, 4, 5, 6, 7)))
    versions = api.versions(identity, max(-1, view.version - 5))
    click.echo("\n" + _version_table(versions))


@job.command()
@click.argument("name")
@json_flag
@access.options
def watch(name: str, as_json: bool, **given: Any) -> int:
    """Show progress until the job has ended.

    The exit code is 1 when it failed. With --json: one line per version, then one line with
    the job.
    """
    api = access.connect(given)
    return watch_job(api, api.find_job(name), as_json=as_json)


def _steering(verb: str, sentence: str) -> None:
    @job.command(verb, help=sentence)
    @click.argument("name")
    @click.option("--reason", default="", help="Why; it stands in the job's history.")
    @access.options
    def steer(name: str, reason: str, **given: Any) -> None:
        api = access.connect(given)
        identity = api.find_job(name)
        api.command(identity, verb, reason)
        note(f"job {identity}: asked to {verb}")


_steering("pause", "Open no new round; sites and model are kept.")
_steering("resume", "Go on after a pause.")
_steering("drain", "Let the open round close, then finish.")
_steering("stop", "End the job now; nothing of the open round is counted.")


@job.command()
@click.argument("name")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write (default: JOB-VERSION.safetensors).",
)
@click.option("--version", "wanted", type=int, help="Which version (default: the newest).")
@click.option(
    "--base",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A safetensors file with the tensors that never left the sites (frozen, local).",
)
@click.option("--partial", is_flag=True, help="Write what there is, without those tensors.")
@json_flag
@access.options
def export(
    name: str,
    output: Path | None,
    wanted: int | None,
    base: Path | None,
    partial: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Download a version as a safetensors file.

    `load_file` and `load_state_dict(strict=True)` take it as it is.
    """
    api = access.connect(given)
    identity = api.find_job(name)
    version = api.job(identity).job.version if wanted is None else wanted
    target = output or Path(f"{identity}-{version}.safetensors")
    part = target.with_name(target.name + f".{os.getpid()}.part")
    try:
        missing = api.export(identity, part, version)
        if missing.total and base:
            merge.merge(part, base, missing.names if len(missing.names) == missing.total else None)
        elif missing.total and not partial:
            listed = ", ".join(missing.names[:5]) + (" ..." if missing.total > 5 else "")
            raise UsageError(
                f"{missing.total} tensors of this model never left the sites: {listed}.",
                "Give a file that holds them with --base, or take the rest with --partial.",
            )
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    still = 0 if base else missing.total
    if as_json:
        emit(
            {
                "job": identity,
                "version": version,
                "path": str(target),
                "bytes": target.stat().st_size,
                "missing": [] if base else missing.names,
            }
        )
    else:
        without = f", without {still} tensors that never left the sites" if still else ""
        click.echo(f"{target}: version {version}, {size(target.stat().st_size)}{without}")


@job.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@access.options
def delete(name: str, yes: bool, **given: Any) -> None:
    """Delete a job that has ended, with its models and its history."""
    api = access.connect(given)
    identity = api.find_job(name)
    if not yes:
        confirm(f"Delete job {identity} with everything stored about it?")
    api.delete(identity)
    note(f"job {identity} is deleted")


def _metric(view: JobView) -> tuple[str, str]:
    """The metric to show in one line: accuracy when there is one, else the first by name."""
    if not view.metrics:
        return "-", "-"
    name = "accuracy" if "accuracy" in view.metrics else min(view.metrics)
    return name, number(view.metrics[name].value)


def _version_table(versions: tuple[VersionView, ...]) -> str:
    rows = []
    for one in versions:
        shown = ", ".join(f"{key} {number(m.value)}" for key, m in sorted(one.metrics.items()))
        missing = "; ".join(f"{site}: {why}" for site, why in one.missing.items())
        made = time.strftime("%H:%M:%S", time.localtime(one.made_at))
        rows.append((one.version, made, len(one.cohort), shown or "-", missing or "-"))
    return table(("version", "made", "sites", "metrics", "missing"), rows, (0, 2))
