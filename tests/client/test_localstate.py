"""The site's state between periods: memory is a copy of a file, or is read again."""

from __future__ import annotations

from pathlib import Path

import torch

from client.localstate import LocalState
from protocol.jobspec import Local, Optimizer
from tests.client.localjobs import Site
from tests.client.sampletasks import Normed
from tests.client.workerprocess import make_spec

MOMENTUM = Optimizer(lr=0.1, momentum=0.9)


def reopened(site: Site) -> LocalState:
    """What a new process would find on this disk, with a learner of its own."""
    site.restart()
    return site.job.state


def test_a_new_site_is_at_its_first_state_and_owes_nothing(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec())
    assert site.job.state.is_first
    assert site.job.state.residual() is None
    assert not site.job.state.restore(), "memory equals the state already"


def test_a_counted_update_makes_its_state_the_one_that_a_new_process_reads(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec(optimizer=MOMENTUM))
    site.period(0, steps=3)
    momentum = [
        state["momentum_buffer"].clone() for state in site.job.learner.optimizer.state.values()
    ]
    position = site.job.learner.stream.position
    state = reopened(site)
    assert not state.is_first
    assert site.job.learner.stream.position == position
    found = [state["momentum_buffer"] for state in site.job.learner.optimizer.state.values()]
    assert len(found) == len(momentum) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, momentum, strict=True))


def test_a_refused_update_leaves_no_trace_in_memory(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec(optimizer=MOMENTUM))
    site.train(0, steps=3)
    site.settle("refused_drop")
    assert site.job.state.restore(), "memory had moved on from the state that counts"
    assert site.job.state.is_first
    assert site.job.learner.stream.position == (0, 0)
    assert not site.job.learner.optimizer.state


def test_what_was_given_back_is_owed_by_the_next_period_even_after_a_restart(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec())
    _, sent = site.train(0, steps=2)
    site.settle("refused_return")
    residual = reopened(site).residual()
    assert residual is not None
    assert torch.equal(residual, sent["delta"])


def test_scaffolds_control_variate_is_part_of_the_state(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec(local=Local(scaffold=True)))
    site.period(0, steps=2)
    own = site.job.state.control
    assert own is not None
    before = own.clone()
    assert before.abs().sum() > 0
    again = reopened(site).control
    assert again is not None
    assert torch.equal(again, before)
