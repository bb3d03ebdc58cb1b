from typing import get_args

import pytest

from protocol.errors import ConflictError
from protocol.jobstates import COMMANDS, TERMINAL, TRANSITIONS, JobState, JobStimulus, next_state

STATES: tuple[JobState, ...] = get_args(JobState)
STIMULI: tuple[JobStimulus, ...] = get_args(JobStimulus)


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_reach_a_terminal_one(state: JobState):
    reached, frontier = {state}, [state]
    while frontier:
        here = frontier.pop()
        following = {after for (at, _), after in TRANSITIONS.items() if at == here} - reached
        reached |= following
        frontier += following
    assert reached & TERMINAL


def test_every_state_can_be_reached_from_the_first():
    reached: set[JobState] = {"initialising"}
    for _ in STATES:
        reached |= {after for (at, _), after in TRANSITIONS.items() if at in reached}
    assert reached == set(STATES)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stimulus", STIMULI)
def test_each_pair_moves_or_is_refused_with_what_is_allowed(state: JobState, stimulus: JobStimulus):
    after = TRANSITIONS.get((state, stimulus))
    if after is not None:
        assert next_state(state, stimulus) == after
        return
    with pytest.raises(ConflictError) as caught:
        next_state(state, stimulus)
    text = str(caught.value)
    assert f"a job that is {state} cannot {stimulus}" in text
    if state in TERMINAL:
        assert "ended" in text
    else:
        hint = text.partition("one can: ")[2].rstrip(".").split(", ")
        assert hint == sorted({o for (at, o) in TRANSITIONS if at == state} & COMMANDS)


def test_an_ended_job_stays_ended():
    assert not [at for (at, _) in TRANSITIONS if at in TERMINAL]


def test_a_person_can_stop_and_trouble_can_fail_every_living_job():
    for state in set(STATES) - TERMINAL:
        assert next_state(state, "stop") == "stopped"
        assert next_state(state, "fail") == "failed"
