"""`./run demo`: one coordinator and four sites train one model, and the result is put to the test.

Two data centres and two edge boxes, each its own process with its own skewed part of the images,
join a coordinator over real sockets. Then the same model is trained by each site alone and on all
the data in one place, with the same code, the same batch size and as many steps as one site took.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Final

import click
import msgspec

from protocol.errors import JobFailedError, SkerryError
from protocol.jobspec import JobSpec
from protocol.views import JobRequest, JobView
from protocol.words import size, span
from skerry import federation
from skerry.api import follow
from skerry.cli.jobs import read_job
from skerry.cli.main import run, speak_utf8
from skerry.cli.output import emit, note, table
from skerry.cli.watch import Live, version_line
from skerry.comparison import compare
from skerry.datasets import has_fashion_mnist
from skerry.federation import EXAMPLES, Federation, SitePlan
from skerry.processes import Processes
from skerry.signals import terminated_as_interrupted

SITES: Final = ("dc-frankfurt", "dc-virginia", "edge-hamburg", "edge-lisbon")
ALPHA: Final = "0.5"  # Dirichlet concentration of the classes over the sites
DEADLINE_SECONDS: Final = 600.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Accuracies are fractions of the whole test set; bytes of all sites."""

    accuracy: float
    central_accuracy: float
    alone_accuracy: float
    wan_bytes_up: int
    wan_bytes_down: int
    dense_bytes: int
    versions: int
    seconds: float
    sites: int


def site_plans(folder: Path, spec: JobSpec) -> list[SitePlan]:
    """Four sites, each with its part of the same Dirichlet split."""
    return [
        SitePlan(
            name=name,
            task=spec.task.name,
            reference=str(folder / spec.task.file),
            options={"part": str(part), "parts": str(len(SITES)), "alpha": ALPHA},
        )
        for part, name in enumerate(SITES)
    ]


def choose_example() -> Path:
    """The folder of the job to run: Fashion-MNIST where it is installed, else digits."""
    if has_fashion_mnist():
        return EXAMPLES / "fashion_mnist"
    note(
        "notice: Fashion-MNIST is not installed (on Debian: apt-get install "
        "dataset-fashion-mnist); using scikit-learn's digits instead."
    )
    return EXAMPLES / "digits"


def run_demo(folder: Path, example: Path, spec: JobSpec, *, as_json: bool) -> Result:
    """The whole demonstration in `folder`; nothing is left running.

    Raises:
        JobFailedError: a process or the job ended badly; the message names the log to read.
    """
    plans = site_plans(example, spec)
    with Processes(folder / "logs") as processes:
        note(f"starting a coordinator and {len(plans)} sites in {folder}")
        started = federation.start(processes, folder, plans)
        note(f"page: {started.addresses.people}/  token: {folder}/coordinator/admin-token")
        begin = monotonic()
        job = started.api.submit(JobRequest(spec=spec)).job.id
        view = _train(processes, started, job, spec, as_json=as_json)
        note("training the same model by each site alone, and on all the data in one place")
        model = folder / "model.safetensors"
        started.api.export(job, model)
        steps = (spec.period.steps or 0) * view.version
        found = compare(processes, folder, spec, plans, model, steps=steps)
        return Result(
            accuracy=found.federated,
            central_accuracy=found.central,
            alone_accuracy=max(found.alone),
            wan_bytes_up=view.bytes_up,
            wan_bytes_down=view.bytes_down,
            dense_bytes=view.dense_bytes,
            versions=view.version,
            seconds=round(monotonic() - begin, 1),
            sites=len(plans),
        )


def _train(
    processes: Processes, started: Federation, job: str, spec: JobSpec, *, as_json: bool
) -> JobView:
    end = monotonic() + DEADLINE_SECONDS
    with Live(spec.stop.versions, on_stderr=as_json) as live:
        for change in follow(started.api, job):
            processes.check()
            for version in change.versions:
                live.line(version_line(version, change.job))
            live.update(change.job)
            if monotonic() > end:
                raise JobFailedError(
                    f"the job is not done after {span(DEADLINE_SECONDS)}: {change.job.waiting}.",
                    f"The logs are in {started.folder / 'logs'}.",
                )
    view = started.api.job(job).job
    if view.state != "finished":
        raise JobFailedError(
            f"the job {view.state}: {view.reason}", f"The logs are in {started.folder / 'logs'}."
        )
    return view


def show(result: Result) -> str:
    """The closing table, and what to try next."""
    wan = result.wan_bytes_up + result.wan_bytes_down
    rows = [
        (
            "accuracy, federated",
            f"{result.accuracy:.4f}",
            f"{result.sites} sites, data never moved",
        ),
        ("accuracy, best site alone", f"{result.alone_accuracy:.4f}", "the same steps, own data"),
        (
            "accuracy, central",
            f"{result.central_accuracy:.4f}",
            "all data in one place, the same steps as one site",
        ),
        ("WAN bytes up", size(result.wan_bytes_up), "all sites, HTTP included"),
        ("WAN bytes down", size(result.wan_bytes_down), ""),
        (
            "dense exchange",
            size(result.dense_bytes),
            f"we sent {wan / result.dense_bytes:.3f} of it",
        ),
        ("versions", str(result.versions), "exchanges"),
        ("time", f"{result.seconds:.1f} s", "from submission to this table"),
    ]
    return "\n".join(
        [
            "",
            table(("", "", ""), rows, (1,)).lstrip("\n"),
            "",
            "Next:",
            "  ./run skerry dev                      the same, but it stays: look at the page",
            "  ./run skerry task check FILE:CLASS    what would leave a site, for your own task",
            "  docs/writing-a-task.md                port your own training script",
            "  docs/running.md                       coordinator and sites on real machines",
        ]
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line on stdout.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs, models and data.")
def demo(as_json: bool, keep: bool) -> None:
    """Train one model at four sites and compare it with central training; about 2 minutes."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-demo-"))
    try:
        with terminated_as_interrupted():
            example = choose_example()
            spec = federation.for_sites(read_job(example / "job.toml"), len(SITES))
            result = run_demo(folder, example, spec, as_json=as_json)
    except (SkerryError, OSError):
        keep = True  # its logs say what happened
        raise
    finally:
        if keep:
            note(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        emit(result)
    else:
        click.echo(show(result))


if __name__ == "__main__":
    speak_utf8("skerry.demo", sys.argv[1:])
    sys.exit(run(demo, sys.argv[1:], "demo"))
