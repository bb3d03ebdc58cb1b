"""Links carry what their figures say, whoever shares them."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from simulation.clock import VirtualClock
from simulation.wan import Flow, Link, LinkSpec, Pipe, tcp_bytes_per_second

MB = 1e6


def run(clock: VirtualClock) -> None:
    while clock.step():
        pass


@pytest.mark.parametrize(
    ("rtt", "loss", "mbps"),
    [(0.230, 0.0, 146.0), (0.2, 1e-4, 18.4), (0.06, 0.005, 3.36)],
    ids=["its window", "CUBIC", "TCP-friendly"],
)
def test_one_connection_carries_what_window_and_loss_leave(
    rtt: float, loss: float, mbps: float
) -> None:
    assert tcp_bytes_per_second(rtt, loss) * 8e-6 == pytest.approx(mbps, rel=0.01)


def test_a_transfer_takes_its_bytes_over_the_bandwidth() -> None:
    clock, ends = VirtualClock(), list[float]()
    Pipe(clock, 2 * MB, math.inf).send(5 * MB, lambda: ends.append(clock.now))
    run(clock)
    assert ends == pytest.approx([2.5])


def test_transfers_that_meet_share_and_the_rest_has_it_all_again() -> None:
    clock, ends = VirtualClock(), dict[str, float]()
    pipe = Pipe(clock, 1 * MB, math.inf)
    pipe.send(4 * MB, lambda: ends.__setitem__("long", clock.now))

    def meet() -> None:
        pipe.send(1 * MB, lambda: ends.__setitem__("short", clock.now))

    clock.at(1.0, meet)
    run(clock)
    # one second alone, then half each until the short one is through, then alone again
    assert ends == pytest.approx({"short": 3.0, "long": 5.0})
    assert not pipe.busy


def test_nobody_gets_more_than_a_connection_carries() -> None:
    clock, ends = VirtualClock(), list[float]()
    pipe = Pipe(clock, 10 * MB, 1 * MB)
    for _ in range(2):
        pipe.send(3 * MB, lambda: ends.append(clock.now))
    run(clock)
    assert ends == pytest.approx([3.0, 3.0])


def test_a_transfer_that_is_broken_off_has_moved_what_it_had() -> None:
    clock = VirtualClock()
    pipe = Pipe(clock, 1 * MB, math.inf)
    flows: list[Flow] = [pipe.send(4 * MB, pytest.fail) for _ in range(1)]
    ends: list[float] = []
    pipe.send(4 * MB, lambda: ends.append(clock.now))
    moved: list[float] = []
    clock.at(2.0, lambda: moved.append(pipe.cancel(flows[0])))
    run(clock)
    assert moved == pytest.approx([1 * MB])
    assert ends == pytest.approx([5.0])
    assert pipe.cancel(flows[0]) == moved[0]


def test_a_cut_link_carries_nothing_until_it_is_mended() -> None:
    clock, ends = VirtualClock(), list[float]()
    link = Link(clock, LinkSpec(up_mbps=8.0), seed=1, site="a")
    link.up.send(2 * MB, lambda: ends.append(clock.now))
    clock.at(1.0, link.block, True)
    clock.at(7.0, link.block, False)
    run(clock)
    assert ends == pytest.approx([8.0])


def test_without_a_limit_a_transfer_takes_no_time() -> None:
    clock, ends = VirtualClock(), list[float]()
    link = Link(clock, LinkSpec(rtt_ms=0.0), seed=1, site="a")
    for size in (9 * MB, 1.0, 0.0):
        link.down.send(size, lambda: ends.append(clock.now))
    run(clock)
    assert ends == [0.0] * 3


def test_draws_are_the_sites_own() -> None:
    spec = LinkSpec(rtt_ms=60.0, rtt_spread_ms=20.0, jitter=0.1)

    def draws(site: str, seed: int) -> list[float]:
        link = Link(VirtualClock(), spec, seed=seed, site=site)
        return [one for _ in range(200) for one in (link.latency(), link.stretch())]

    assert draws("a", 1) == draws("a", 1)
    assert draws("a", 1) != draws("b", 1) != draws("b", 2)
    latencies, stretches = draws("a", 1)[::2], draws("a", 1)[1::2]
    assert all(0.020 <= one <= 0.040 for one in latencies)
    assert fmean(math.log(one) ** 2 for one in stretches) == pytest.approx(0.01, rel=0.3)


def test_what_is_lost_is_sent_again() -> None:
    link = Link(VirtualClock(), LinkSpec(loss=0.005), seed=1, site="a")
    assert link.retransmitted(199.0) == pytest.approx(1.0)
