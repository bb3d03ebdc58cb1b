"""The life of a job: every state and every transition, in one table.

    initialising ──start──> running <──resume── paused
         │                  │  │  └────pause─────^ │
         │                  │  drain               │
         │                  │  v                   │
         │                  │ draining ──> finished│
         └──────┬───────────┴──────┬───────────────┘
              stop               fail
                v                  v
             stopped            failed

`initialising`: waiting for sites or for version 0; `reason` says for what. `draining`: no new
round, the open one may close (a stop rule was met or an operator asked to drain). A paused job
keeps its sites and its model and opens no round.
"""

from __future__ import annotations

from typing import Final, Literal

from protocol.errors import ConflictError

JobState = Literal["initialising", "running", "paused", "draining", "finished", "failed", "stopped"]
JobStimulus = Literal["start", "pause", "resume", "drain", "finish", "stop", "fail"]

TERMINAL: Final[frozenset[JobState]] = frozenset({"finished", "failed", "stopped"})

# What people may ask for; the others follow from what happens.
COMMANDS: Final[frozenset[JobStimulus]] = frozenset({"pause", "resume", "drain", "stop"})

TRANSITIONS: Final[dict[tuple[JobState, JobStimulus], JobState]] = {
    ("initialising", "start"): "running",
    ("initialising", "pause"): "paused",
    ("initialising", "stop"): "stopped",
    ("initialising", "fail"): "failed",
    ("running", "pause"): "paused",
    ("running", "drain"): "draining",
    ("running", "finish"): "finished",
    ("running", "stop"): "stopped",
    ("running", "fail"): "failed",
    ("paused", "resume"): "running",
    ("paused", "drain"): "draining",
    ("paused", "stop"): "stopped",
    ("paused", "fail"): "failed",
    ("draining", "finish"): "finished",
    ("draining", "stop"): "stopped",
    ("draining", "fail"): "failed",
}


def next_state(state: JobState, stimulus: JobStimulus) -> JobState:
    """The state after `stimulus`.

    Raises:
        ConflictError: naming the state and what people may do in it.
    """
    found = TRANSITIONS.get((state, stimulus))
    if found is None:
        allowed = sorted(s for (at, s) in TRANSITIONS if at == state and s in COMMANDS)
        raise ConflictError(
            f"a job that is {state} cannot {stimulus}.",
            f"In this state one can: {', '.join(allowed)}." if allowed else "It has ended.",
        )
    return found
