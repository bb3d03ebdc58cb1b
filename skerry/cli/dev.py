"""`skerry dev`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from protocol.errors import UsageError
from protocol.views import JobRequest
from skerry import federation
from skerry.api import follow
from skerry.cli.jobs import read_job
from skerry.cli.output import note
from skerry.cli.watch import Live, version_line
from skerry.federation import EXAMPLES, SitePlan
from skerry.processes import Processes
from skerry.signals import terminated_as_interrupted


@click.command()
@click.option(
    "--job",
    "file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=EXAMPLES / "digits" / "job.toml",
    help="The job to submit (default: the digits example); its task's file lies beside it.",
)
@click.option("--sites", type=click.IntRange(1, 32), default=4, show_default=True)
@click.option("--alpha", default="0.5", show_default=True, help="Skew of the split over sites.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep it here.")
def dev(file: Path, sites: int, alpha: str, folder: Path | None) -> None:
    """Start a coordinator and sites on this machine, submit a job, and stay up until Ctrl-C.

    Every site gets the options part, parts and alpha, which the example tasks split their data by.

    \b
    Examples:
      skerry dev
      skerry dev --sites 2 --job examples/fashion_mnist/job.toml
    """
    with (
        terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="skerry-dev-") as temporary,
    ):
        _stay(file, sites, alpha, folder or Path(temporary))


def _stay(file: Path, sites: int, alpha: str, folder: Path) -> None:
    spec = read_job(file)
    if not spec.task.file:
        raise UsageError(f"{file} names no task file.", "Give `file` in its [task] section.")
    spec = federation.for_sites(spec, sites)
    plans = [
        SitePlan(
            name=f"site-{part + 1}",
            task=spec.task.name,
            reference=str(file.parent.absolute() / spec.task.file),
            options={"part": str(part), "parts": str(sites), "alpha": alpha},
        )
        for part in range(sites)
    ]
    with Processes(folder / "logs") as processes:
        started = federation.start(processes, folder, plans)
        note(f"page:   {started.addresses.people}/")
        note(f"token:  {folder}/coordinator/admin-token")
        note(f"logs:   {folder}/logs")
        note(f"in another shell:  export SKERRY_DATA_DIR={folder}/coordinator")
        job = started.api.submit(JobRequest(spec=spec)).job.id
        with Live(spec.stop.versions) as live:
            for change in follow(started.api, job):
                processes.check()
                for version in change.versions:
                    live.line(version_line(version, change.job))
                live.update(change.job)
        view = started.api.job(job).job
        note(f"job {job} {view.state}: {view.reason or 'done'}; Ctrl-C ends everything")
        processes.wait_for_an_end()
