"""What may go wrong in a run, decided by a seed: the same seed, the same faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Faults:
    """Chances per message, and the actions of the coordinator at which its process dies.

    Delays are uniform up to `delay_seconds_max`; `repeat` is the chance that a message comes twice.
    Instructions to one site keep their order (a mailbox does); everything else may overtake.
    `crash_at` counts the core's actions; the process dies instead of carrying out that one.
    """

    seed: int = 0
    delay_seconds_max: float = 0.0
    repeat: float = 0.0
    crash_at: frozenset[int] = frozenset()
    down_seconds: float = 1.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)  # noqa: S311  faults need no secrets

    def delays(self) -> list[float]:
        """Seconds until each arrival of one message."""
        count = 2 if self._random.random() < self.repeat else 1
        return [0.01 + self._random.uniform(0.0, self.delay_seconds_max) for _ in range(count)]
