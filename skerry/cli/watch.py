"""Progress of a job: a live line on a terminal, one line per version elsewhere, JSON lines."""

from __future__ import annotations

import sys
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from protocol.errors import JobFailedError
from protocol.views import JobView, VersionView
from protocol.words import size
from skerry.api import Api, follow
from skerry.cli.output import emit, note, number


def watch_job(api: Api, job: str, *, as_json: bool) -> int:
    """Follow a job to its end; 0 when it finished or was stopped, 1 when it failed."""
    total = api.job(job).spec.stop.versions
    view: JobView | None = None
    with Live(total) as live:
        for change in follow(api, job):
            for version in change.versions:
                if as_json:
                    emit(version)
                else:
                    live.line(version_line(version, change.job))
            view = change.job
            live.update(view)
    if view is None:
        return 0
    if as_json:
        emit(view)
    else:
        click.echo(f"job {view.id} {view.state}: {view.reason or 'done'}")
    if view.state == "failed":
        hint = f"`skerry job show {view.id}` shows its sites."
        note(hint)
        return JobFailedError.exit_code
    return 0


def version_line(version: VersionView, job: JobView) -> str:
    """One version in one line."""
    parts = [f"version {version.version:>3}"]
    for name, value in sorted(version.metrics.items()):
        worst = ""
        if value.sites > 1:
            worst = f" (worst {value.worst_site} {number(value.worst_value)})"
        parts.append(f"{name} {number(value.value)}{worst}")
    parts.append(f"{len(version.cohort)} sites" if version.version else "the start")
    parts.append(f"{size(job.bytes_up + job.bytes_down)} so far")
    parts += [f"without {site}: {why}" for site, why in version.missing.items()]
    return "  ".join(parts)


class Live:
    """A bar on a terminal's stderr; elsewhere `line`s, and a note when a job waits to begin."""

    def __init__(self, total: int | None, *, on_stderr: bool = False) -> None:
        console = Console(stderr=True)
        self._shown = console.is_terminal
        self._on_stderr = on_stderr
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f}" if total else "{task.completed:.0f}"
            ),
            TimeElapsedColumn(),
            TextColumn(
                "{task.fields[doing]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            expand=True,
            console=console,
            transient=True,
            disable=not self._shown,
        )
        self._waiting = ""
        self._task = self._bar.add_task("versions", total=total, doing="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, view: JobView) -> None:
        """Move the bar to the job's version and say what it waits for."""
        if self._shown:
            doing = view.waiting or view.reason or view.state
            self._bar.update(self._task, completed=view.version, doing=doing)
        elif view.state in ("initialising", "paused"):
            waiting = view.waiting.partition(", at most ")[0]  # what follows counts seconds down
            if waiting and waiting != self._waiting:
                note(waiting)
            self._waiting = waiting

    def line(self, text: str) -> None:
        """Print a line on stdout (or stderr), above the bar where both are the terminal."""
        if self._shown and (self._on_stderr or sys.stdout.isatty()):
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=self._on_stderr)
