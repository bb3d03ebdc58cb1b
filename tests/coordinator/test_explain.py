"""Sentences for people."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import stimuli as s
from protocol import messages as m
from protocol.jobspec import Pacing, Sites
from tests.coordinator.coretools import World, make_spec


def doing(here: World) -> dict[str, str]:
    return {view.site: view.doing for view in here.core.view("j", here.now).sites}


def test_an_open_round_names_who_is_waited_for_how_far_it_is_and_until_when() -> None:
    here = World().running("a", "edge-2")
    here.upload("a")
    here.report("edge-2", m.Progress(job="j", epoch=1, clock=0, step=3, of=10))
    here.now += 2.0
    assert here.waiting() == (
        "round 1: waits for edge-2 (training, step 3 of 10, last heard 2 s ago), deadline in 58 s"
    )
    assert doing(here) == {
        "a": "waiting for edge-2",
        "edge-2": "training clock 0, step 3 of 10, last heard 2 s ago",
    }


def test_a_job_names_only_sites_that_could_come_and_says_how_long_it_waits() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=3, names=("a", "b", "late"))))
    for site in ("a", "b", "stranger"):
        here.connect(site)
    here.report("a", m.Declined(job="j", reason="one example is too few. Give it more."))
    assert here.waiting() == (
        "0 of 3 sites are ready; waiting for 3 more sites: a: one example is too few. "
        "Give it more; b is loading; late is not connected; "
        "who declined is asked again when its agent was restarted; at most 1 d more"
    )


def test_a_job_that_everybody_declined_says_so_at_once_with_all_reasons() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=2)))
    for site in ("a", "b", "c"):
        here.connect(site)
        here.report(site, m.Declined(job="j", reason=f"no GPU at {site}."))
    here.step(s.SiteLeft(site="c", reason="bye"))
    assert here.waiting() == (
        "0 of 2 sites are ready; waiting for 2 more sites: a: no GPU at a; b: no GPU at b; "
        "c is not connected, and declined before: no GPU at c; "
        "who declined is asked again when its agent was restarted; at most 1 d more"
    )
    here.close("a")
    here.connect("a", instance="2")  # it has a GPU now
    assert here.to(m.Prepare) == ["a"]
    here.ready("a")
    assert here.waiting().startswith("1 of 2 sites are ready; waiting for 1 more site: b: no GPU")


@pytest.mark.parametrize("rule", ["bsp", "ssp", "async"])
def test_a_job_whose_sites_all_failed_for_good_names_them(rule: Any) -> None:
    here = World().running("a", "b", spec=make_spec(pacing=Pacing(rule=rule, quorum=2)))
    here.failed("a", "data set is gone", fatal=True)
    here.failed("b", "disk is broken", fatal=True)
    assert "a: data set is gone; b: disk is broken" in here.waiting()
    assert "asked again when its agent was restarted" in here.waiting()


def test_a_pause_says_who_asked_for_it_and_why() -> None:
    here = World().running("a", "b")
    here.step(s.JobCommand(job="j", stimulus="pause", by="ann", reason="maintenance"))
    here.upload("a")
    here.upload("b")
    here.committed()
    assert here.waiting() == (
        "pause asked for by ann: maintenance; waits for somebody to resume it"
    )


def test_a_closed_connection_and_a_coordinator_restart_are_told_apart() -> None:
    here = World().running("a", "b")
    here.close("a")
    assert "a (training, connection closed, last heard 0 s ago)" in here.waiting()
    here.restart()
    assert "a (training, not heard since the coordinator started)" in here.waiting()


def test_every_condition_of_a_site_has_its_sentence() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=5, select=2)))
    here.join("a")
    here.join("b")
    here.join("c")
    here.join("empty", train=0, test=0)
    here.join("eva", role="evaluator", test=0)
    here.join("d")
    here.connect("loader")
    here.connect("no")
    here.report("no", m.Declined(job="j", reason="not allowed here"))
    here.init("eva")
    assert here.job.round is not None
    first, second = sorted(here.job.round.tasks)
    here.upload(first, facts=here.facts(first, problem="NaN"))
    gone, idle = sorted({"a", "b", "c", "d"} - {first, second})
    here.step(s.SiteLeft(site=gone, reason="maintenance"))
    found = doing(here)
    assert found[first] == "out of round 1: NaN"
    assert found[second].startswith("training clock 0")
    assert found[gone] == "maintenance"
    assert found[idle] == "waiting for the next round"
    assert found["empty"] == "no data"
    assert found["eva"] == "no data to evaluate on"
    assert found["no"] == "refused: not allowed here"
    here.ready("loader")
    here.close("loader")
    here.connect("loader", instance="2")
    assert doing(here)["loader"] == "loading task and data"


def test_folding_and_the_end_are_told() -> None:
    here = World().running("a", "b")
    here.upload("a")
    here.upload("b")
    assert here.waiting() == "version 1 is being folded from 2 updates"
    here.committed()
    here.command("stop")
    assert here.waiting() == ""
    assert doing(here)["a"] == "done: the job is stopped"


def test_a_long_list_of_names_is_cut() -> None:
    names = [f"site-{index:02}" for index in range(20)]
    here = World().running(*names)
    assert "site-11" in here.waiting()
    assert ", and 8 more, deadline in 1 min" in here.waiting()


def test_dense_bytes_count_what_float32_would_have_cost_in_both_directions() -> None:
    here = World().running("a", "b")
    assert here.core.view("j", here.now).dense_bytes == 2 * 16
    here.round()
    assert here.core.view("j", here.now).dense_bytes == (4 + 2) * 16
