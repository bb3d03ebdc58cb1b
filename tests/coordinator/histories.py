"""Random histories of a few sites and jobs, for properties that hold after every stimulus."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st

from coordinator import stimuli as s
from protocol import messages as m
from protocol.errors import SkerryError
from protocol.jobspec import Pacing, Sites, Stop
from simulation.bodies import vector_layout
from tests.coordinator.coretools import LAYOUT, World, make_spec

SITES = ("a", "b", "c", "eva")
JOBS = ("j", "k")
KINDS = (
    *("connect", "ready", "ready", "upload", "upload", "upload", "commit", "evaluate", "wait"),
    *("connect", "ready", "ready", "upload", "upload", "upload", "commit", "init", "save"),
    *("submit", "command", "close", "leave", "decline", "fail", "restart", "round", "evaluate"),
)

Step = tuple[str, str, str, int]

step = st.tuples(
    st.sampled_from(KINDS), st.sampled_from(SITES), st.sampled_from(JOBS), st.integers(0, 11)
)

BEGINNING: list[Step] = [  # two jobs, one of them with two sites and in its first round
    ("submit", "a", "j", 1),
    ("connect", "a", "j", 2),
    ("connect", "b", "j", 2),
    ("ready", "a", "j", 1),
    ("ready", "b", "j", 4),
    ("init", "a", "j", 1),
    ("submit", "a", "k", 2),
]
ROUND: list[Step] = [("round", "a", "j", 0)]
FRESH: list[Step] = [("connect", "a", "j", 4), ("ready", "a", "j", 1)]
DRAINING: list[Step] = [("command", "a", "j", 1), ("round", "a", "j", 0)]
OFTEN: tuple[list[Step], ...] = ([], ROUND, [*ROUND, *DRAINING], [*DRAINING, *FRESH])

histories = st.tuples(st.sampled_from(OFTEN), st.lists(step, min_size=25, max_size=80)).map(
    lambda drawn: [*BEGINNING, *drawn[0], *drawn[1]]
)


def play(here: World, what: Step) -> None:
    """Let one thing happen; what the core refuses, as it should, changes nothing."""
    kind, site, job, pick = what
    with contextlib.suppress(SkerryError):
        _play(here, kind, site, job, pick)


def _play(here: World, kind: str, site: str, job: str, pick: int) -> None:
    known = here.core.job(job) if job in here.core.jobs() else None
    here.now += pick / 16
    match kind:
        case "connect":
            tasks = (("digits",), ("other",), (), ())[pick % 4]
            role: m.SiteRole = "evaluator" if site == "eva" else "site"
            here.connect(site, role, instance=str(pick % 2), tasks=tasks)
        case "ready":
            layout = LAYOUT if pick else vector_layout(5)
            here.ready(site, job, train=100 * (pick % 5 > 0), test=50 * (pick % 3), layout=layout)
        case "upload" if known is not None and site in known.members:
            here.upload(site, job, here.facts(site, job, problem="" if pick else "NaN in 'w'"))
        case "commit" if known is not None and known.committing is not None:
            here.committed(job, problem="" if pick else "no memory")
        case "evaluate" if known is not None:
            accuracy = 0.9 if pick > 8 else 0.1
            here.evaluated(site, max(known.number - pick % 2, 0), job, accuracy=accuracy)
        case "round" if known is not None and known.round is not None:
            for name in known.round.sites("training"):
                here.upload(name, job)
            here.committed(job)
        case "fail" if known is not None and site in known.members:
            if pick % 2:
                here.failed(site, "no memory", job, fatal=pick == 1)
            else:  # in evaluating
                failed = m.Failed(job=job, epoch=0, clock=0, attempt=0, reason="no data")
                here.report(site, failed)
        case "save" if known is not None:
            here.saved(known.number, job, problem="" if pick else "no room")
        case "wait":
            here.core.heard(site, here.now)
            here.tick(pick * pick / 12)
        case "submit":
            here.submit(job, _spec(pick))
        case "init":
            here.init(known.init_site if known is not None and pick else site, job)
        case "command":
            commands = ("pause", "drain", *["resume"] * 4, "stop")
            here.command(commands[pick % 7], job)  # type: ignore[arg-type]
        case "close":
            here.close(site)
        case "leave":
            here.step(s.SiteLeft(site=site, reason="", removed=pick == 0))
        case "decline":
            here.report(site, m.Declined(job=job, reason="not mine"))
        case "restart" if pick < 3:
            here.restart()
        case _:
            pass


def _spec(pick: int) -> Any:
    return make_spec(
        sites=Sites(wanted=1 + pick % 2, names=("a", "b") if pick % 5 == 4 else ()),
        stop=Stop(versions=3, target=0.8, metric="accuracy"),
        pacing=Pacing(deadline_seconds=20.0, start_timeout_seconds=100.0),
    )
