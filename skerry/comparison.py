"""What the federated model is compared with: each site alone, and all the data in one place.

The training is done by `skerry.baselines` in processes of their own, one for each of two cores:
whoever asks stays without torch. Request and answer are JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from protocol.errors import JobFailedError
from protocol.jobspec import JobSpec
from skerry.federation import SitePlan
from skerry.processes import Processes, wait_for_line

DEADLINE_SECONDS: Final = 300.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one process trains and measures. Sites are given by their options for the task."""

    reference: str
    spec: JobSpec
    steps: int
    everything: dict[str, str]  # options under which the task loads all the data
    alone: tuple[dict[str, str], ...] = ()
    central: bool = False
    model: str = ""  # a safetensors file to measure


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracies on the whole test set, as fractions."""

    alone: tuple[float, ...] = ()
    central: float | None = None
    model: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracies of the federated model, of central training, and of every site alone."""

    federated: float
    central: float
    alone: tuple[float, ...]


def compare(
    processes: Processes,
    folder: Path,
    spec: JobSpec,
    plans: Sequence[SitePlan],
    model: Path,
    *,
    steps: int,
) -> Comparison:
    """Train `steps` steps by each site alone and on all data; measure them and `model`.

    Raises:
        JobFailedError: a process ended badly or took too long; its log is named.
    """
    half = len(plans) // 2
    everything = {**plans[0].options, "part": "0", "parts": "1"}
    common = Request(reference=plans[0].reference, spec=spec, steps=steps, everything=everything)
    shares = (
        msgspec.structs.replace(common, central=True, alone=_options(plans[:half])),
        msgspec.structs.replace(common, model=str(model), alone=_options(plans[half:])),
    )
    children = []
    for number, request in enumerate(shares, 1):
        file = folder / f"baselines-{number}.json"
        file.write_bytes(msgspec.json.encode(request))
        children.append(
            processes.start(f"baselines-{number}", [str(file)], module="skerry.baselines")
        )
    first, second = (
        msgspec.json.decode(wait_for_line(processes, child, DEADLINE_SECONDS), type=Measured)
        for child in children
    )
    if first.central is None or second.model is None:
        raise JobFailedError("the baselines did not measure what they were asked for.")
    return Comparison(
        federated=second.model, central=first.central, alone=(*first.alone, *second.alone)
    )


def _options(plans: Sequence[SitePlan]) -> tuple[dict[str, str], ...]:
    return tuple(plan.options for plan in plans)
