"""The active members in order, against looking through all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import journal as j
from coordinator.job import Job, Member, evolve, submitted
from coordinator.roster import Roster
from protocol.messages import SiteRole
from tests.coordinator.coretools import make_spec

SITES = "abcde"


def new_job() -> Job:
    return submitted(j.JobSubmitted(job="j", spec=make_spec(), by="ann"), 0.0)


def enter(job: Job, site: str, role: SiteRole = "site", clock: int = 0, train: int = 1) -> None:
    before = job.members.get(site)
    event = j.SiteEntered(
        job="j",
        site=site,
        role=role,
        epoch=before.epoch + 1 if before else 1,
        clock=clock,
        train_examples=train,
        eval_examples=clock,
        layout_digest="",
    )
    evolve(job, event, 0.0)


def leave(job: Job, site: str, epoch: int) -> None:
    evolve(job, j.SiteEnded(job="j", site=site, epoch=epoch, reason="it left"), 0.0)


def settle(job: Job, site: str, epoch: int) -> None:
    event = j.UpdateSettled(
        job="j",
        site=site,
        epoch=epoch,
        clock=job.members[site].clock,
        attempt=1,
        verdict="refused_drop",
        reason="no",
    )
    evolve(job, event, 0.0)


def looked_through(job: Job) -> Roster[Member]:
    """What the roster must be, from all members."""
    active = [member for _, member in sorted(job.members.items()) if member.active]
    sites = [member for member in active if member.role == "site"]
    clocks = [member.clock for member in sites if member.trains]
    return Roster(
        everybody=active,
        sites=sites,
        evaluators=[member for member in active if member.role == "evaluator"],
        training=[member for member in active if member.trains],
        idle=[member for member in active if not member.trains],
        clocks={clock: clocks.count(clock) for clock in clocks},
        testing=sum(member.eval_examples > 0 for member in sites),
    )


steps = st.one_of(
    st.tuples(
        st.just("enter"),
        st.sampled_from(SITES),
        st.sampled_from(("site", "evaluator")),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    st.tuples(st.sampled_from(("leave", "settle")), st.sampled_from(SITES), st.booleans()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40))
def test_it_is_what_looking_through_all_members_finds(history: list[tuple[object, ...]]) -> None:
    job = new_job()
    for what, site, *rest in history:
        assert isinstance(site, str)
        if what == "enter":
            enter(job, site, *rest)  # type: ignore[arg-type]
        elif site in job.members:
            epoch = job.members[site].epoch - bool(rest[0])  # of this term, or of one before
            (leave if what == "leave" else settle)(job, site, epoch)
        assert job.roster == looked_through(job)
        assert job.evaluators == sum(m.role == "evaluator" for m in job.members.values())
        assert job.roster.lowest_clock() == min(job.roster.clocks, default=None)


def test_nobody_is_active_in_a_job_that_has_ended() -> None:
    job = new_job()
    enter(job, "a")
    enter(job, "b", role="evaluator")
    evolve(job, j.JobMoved(job="j", state="stopped", reason="enough"), 1.0)
    assert job.roster == Roster()
    assert not job.members["a"].active


def test_lists_handed_out_are_not_the_rosters_own() -> None:
    job = new_job()
    for site in "cab":
        enter(job, site)
    for member in job.active():
        leave(job, member.site, 1)
    assert job.active("site") == []
