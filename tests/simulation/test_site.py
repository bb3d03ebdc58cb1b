"""The simulated site keeps to the protocol, whatever is repeated."""

from __future__ import annotations

from collections.abc import Callable

from protocol import messages as m
from simulation.bodies import encode_snapshot, vector_layout
from simulation.clock import VirtualClock
from simulation.site import Identity, SimSite


class Wire:
    """Records what the site says."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.said: list[object] = []
        self.base = encode_snapshot("j", 0, vector_layout(4), [0.0] * 4)

    def hello(self, site: SimSite) -> None:
        self.said.append("hello")

    def report(self, site: SimSite, event: m.Event) -> None:
        self.said.append(event)

    def upload(self, site: SimSite, identity: Identity, attempt: int, body: bytes) -> None:
        self.said.append((identity, attempt, body))

    def upload_init(self, site: SimSite, job: str, body: bytes) -> None:
        self.said.append("init")

    def fetch(self, job: str, version: int) -> bytes:
        return self.base

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.clock.after(seconds, call)

    def settle(self) -> list[object]:
        while self.clock.step():
            pass
        said, self.said = self.said, []
        return said


def trained() -> tuple[Wire, SimSite, m.Train]:
    from simulation.bodies import decode

    wire = Wire()
    site = SimSite("a", wire)
    site.connected = True
    site.loaded.add("j")
    digest = decode(wire.base)[0].digest  # type: ignore[union-attr]
    base = m.VersionRef(version=0, digest=digest, bytes=len(wire.base))
    return wire, site, m.Train(job="j", epoch=1, clock=0, attempt=1, base=base, steps=3)


def test_a_repeated_train_is_trained_once_and_sent_with_the_same_bytes() -> None:
    wire, site, train = trained()
    site.receive(train)
    site.receive(train)
    [first] = wire.settle()
    site.receive(train)
    assert wire.settle() == [first]
    site.verdict(Identity("j", 1, 0), "queued")
    site.receive(train)
    assert wire.settle() == []


def test_no_period_starts_before_the_one_before_it_is_settled() -> None:
    wire, site, train = trained()
    site.receive(train)
    [(identity, _, _)] = wire.settle()  # type: ignore[misc]
    later = m.Train(job="j", epoch=1, clock=1, attempt=1, base=train.base, steps=3)
    site.receive(later)
    assert [said[0] for said in wire.settle()] == [identity]  # type: ignore[index]
    site.verdict(identity, "queued")
    assert [said[0].clock for said in wire.settle()] == [1]  # type: ignore[index]


def test_an_abort_ends_training_and_drops_what_was_finished() -> None:
    wire, site, train = trained()
    site.receive(train)
    site.receive(m.Abort(job="j", epoch=1, clock=0, attempt=1, reason="late"))
    assert wire.settle() == []
    assert site.training is None


def test_the_later_word_wins_over_an_older_answer() -> None:
    wire, site, train = trained()
    site.receive(train)
    wire.settle()
    identity = Identity("j", 1, 0)
    site.receive(m.Settled(job="j", epoch=1, clock=0, verdict="refused_return", reason="void"))
    site.verdict(identity, "queued")
    assert site.outcome[identity] == "refused_return"


def test_a_killed_process_says_nothing_and_its_update_survives() -> None:
    wire, site, train = trained()
    site.receive(train)
    wire.settle()
    site.receive(m.Evaluate(job="j", base=train.base))
    site.kill()
    assert wire.settle() == []
    site.start()
    site.welcomed()
    said = wire.settle()
    assert said[0] == "hello"
    assert said[1][0] == Identity("j", 1, 0)  # type: ignore[index]


def test_goodbye_without_retry_ends_the_agent() -> None:
    wire, site, _ = trained()
    site.receive(m.Bye(reason="removed", retry=False))
    assert not site.running
    assert wire.settle() == []
