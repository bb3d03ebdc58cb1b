"""Links between sites and their coordinator: bandwidth, latency, jitter and loss in virtual time.

A transfer shares its direction of the link with the others that are under way: each gets an equal
part of the bandwidth, and none more than one TCP connection carries over so long and lossy a way.
`profiles` has measured figures between regions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from protocol.names import derive_seed
from simulation.clock import VirtualClock

SEGMENT_BYTES: Final = 1460  # of one TCP segment
WINDOW_BYTES: Final = 4 << 20  # that one TCP connection may have under way
# CUBIC's mean window is C_CUBIC * RTT^(3/4) / p^(3/4) segments: RFC 9438, 5.1, C = 0.4, beta = 0.7.
CUBIC: Final = (0.4 * 3.7 / 1.2) ** 0.25
RENO: Final = 1.22  # Mathis et al., CCR 1997: sqrt(3/2) / sqrt(p) segments
_ROUNDING_BYTES: Final = 1e-6

NotNegative = Annotated[float, Meta(ge=0.0)]


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A site's link, both ways. Loss is a fraction of segments, jitter the sigma of a log-normal
    factor on the bandwidth that every transfer draws.
    """

    up_mbps: Annotated[NotNegative, Meta(description="Towards the coordinator. 0: no limit.")] = 0.0
    down_mbps: Annotated[NotNegative, Meta(description="Towards the site. 0: no limit.")] = 0.0
    rtt_ms: Annotated[NotNegative, Meta(description="Round-trip time.")] = 10.0
    rtt_spread_ms: Annotated[
        NotNegative, Meta(description="Round trips take this much more or less, drawn uniformly.")
    ] = 0.0
    jitter: Annotated[NotNegative, Meta(description="Sigma of the bandwidth's factor.")] = 0.0
    loss: Annotated[float, Meta(ge=0.0, lt=1.0, description="Share of segments that are lost.")] = (
        0.0
    )


def tcp_bytes_per_second(rtt_seconds: float, loss: float) -> float:
    """What one TCP connection carries at most: its window a round trip, or what loss leaves of it.

    The larger of CUBIC's and Reno's mean window, as CUBIC does in its TCP-friendly region.
    """
    if rtt_seconds <= 0.0:
        return math.inf
    window = float(WINDOW_BYTES)
    if loss > 0.0:
        cubic = CUBIC * (rtt_seconds / loss) ** 0.75
        window = min(window, SEGMENT_BYTES * max(cubic, RENO / math.sqrt(loss)))
    return window / rtt_seconds


class Flow:
    """One transfer under way. `moved` bytes had got through when it ended."""

    __slots__ = ("_done", "finish", "moved", "over", "size", "stretch")

    def __init__(
        self, size: float, stretch: float, done: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self.size = size
        self.stretch = stretch  # > 1: its bytes take longer than the link's nominal ones
        self.finish = 0.0  # at which service of its pipe it is through
        self.moved = 0.0
        self.over = False
        self._done = (done, arguments)

    def arrive(self) -> None:
        """Tell whoever waits for it."""
        done, arguments = self._done
        done(*arguments)


class Pipe:
    """One direction of a link: transfers share it equally (processor sharing)."""

    def __init__(self, clock: VirtualClock, bytes_per_second: float, each_at_most: float) -> None:
        self._clock = clock
        self._capacity = bytes_per_second
        self._each = each_at_most
        self._served = 0.0  # bytes that a flow has got that is here since the beginning
        self._since = 0.0
        self._flows: list[tuple[float, int, Flow]] = []  # by the service at which each is through
        self._live = 0
        self._asked = 0
        self._ticket = 0
        self.blocked = False

    @property
    def busy(self) -> bool:
        """Something is under way."""
        return self._live > 0

    def send(
        self, size: float, done: Callable[..., None], *arguments: Any, stretch: float = 1.0
    ) -> Flow:
        """Begin a transfer of `size` bytes; `done` is called when the last one is through."""
        flow = Flow(size, stretch, done, arguments)
        self._account()
        self._live += 1
        self._asked += 1
        flow.finish = self._served + size * stretch
        heapq.heappush(self._flows, (flow.finish, self._asked, flow))
        self._schedule()
        return flow

    def cancel(self, flow: Flow) -> float:
        """Break a transfer off; the bytes that got through."""
        if not flow.over:
            self._account()
            self._end(flow)
            flow.moved = max(0.0, flow.size - (flow.finish - self._served) / flow.stretch)
            self._schedule()
        return flow.moved

    def block(self, blocked: bool) -> None:
        """Nothing gets through from now on, or it does again."""
        self._account()
        self.blocked = blocked
        self._schedule()

    def _rate(self) -> float:
        if self.blocked or not self._live:
            return 0.0
        return min(self._each, self._capacity / self._live)

    def _account(self) -> None:
        rate = self._rate()
        if rate and math.isfinite(rate):
            self._served += rate * (self._clock.now - self._since)
        self._since = self._clock.now

    def _end(self, flow: Flow) -> None:
        flow.over = True
        self._live -= 1

    def _schedule(self) -> None:
        self._ticket += 1
        while self._flows and self._flows[0][2].over:
            heapq.heappop(self._flows)
        rate = self._rate()
        if self._flows and rate:
            left = (self._flows[0][0] - self._served) / rate if math.isfinite(rate) else 0.0
            self._clock.after(max(left, 0.0), self._due, self._ticket)

    def _due(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._account()
        if not math.isfinite(self._rate()):
            self._served = max(self._served, self._flows[0][0])
        through = []
        while self._flows and self._flows[0][0] <= self._served + _ROUNDING_BYTES * self._served + (
            _ROUNDING_BYTES
        ):
            flow = heapq.heappop(self._flows)[2]
            if not flow.over:
                self._end(flow)
                flow.moved = flow.size
                through.append(flow)
        self._schedule()
        for flow in through:
            flow.arrive()


class Link:
    """A site's way to its coordinator and back. Draws depend on the seed and the site only."""

    def __init__(self, clock: VirtualClock, spec: LinkSpec, *, seed: int, site: str) -> None:
        self.spec = spec
        self._random = Random(derive_seed(seed, "link", site))  # noqa: S311  no secrets
        self._half_rtt = spec.rtt_ms / 2000.0
        self._half_spread = spec.rtt_spread_ms / 2000.0
        each = tcp_bytes_per_second(spec.rtt_ms / 1000.0, spec.loss)
        self.up = Pipe(clock, _bytes_per_second(spec.up_mbps), each)
        self.down = Pipe(clock, _bytes_per_second(spec.down_mbps), each)

    def latency(self) -> float:
        """Seconds that a message is under way, one way."""
        if not self._half_spread:
            return self._half_rtt
        spread = self._random.uniform(-self._half_spread, self._half_spread)
        return max(0.0, self._half_rtt + spread)

    def stretch(self) -> float:
        """How much longer than nominally a transfer takes that begins now."""
        return math.exp(self._random.gauss(0.0, self.spec.jitter)) if self.spec.jitter else 1.0

    def retransmitted(self, size: float) -> float:
        """Bytes that go over the wire once more for so many that arrive."""
        return size * self.spec.loss / (1.0 - self.spec.loss)

    def block(self, blocked: bool) -> None:
        """Cut the link, or mend it."""
        self.up.block(blocked)
        self.down.block(blocked)


def _bytes_per_second(mbps: float) -> float:
    return mbps * 125_000.0 if mbps else math.inf
