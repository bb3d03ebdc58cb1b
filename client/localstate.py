"""What a site carries from period to period, in memory and on disk.

State is a value with one address at a time: the current state file (`sitestate`). What is in memory
is only a copy that is known to equal some file, and it is read again when a period ended in any
other way than with a counted update. So a restarted worker, a refused update, a failed period and a
stopped one are a single case.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from client import sitestate
from client.bodyfiles import read_delta
from client.statecodec import decode_value, encode_value, fetch, store
from client.statefile import StateReader, read_value, write_state
from client.tensors import byte_view
from client.training import Learner

_FIRST: Final = ""  # no update was settled yet
_UNKNOWN: Final = "?"  # memory holds something that no file holds


class LocalState:
    """The optimizer, schedule and stream of a `Learner`, tensors that never leave, SCAFFOLD's c_k.

    `local` are the live tensors of role local, `first_local` what they hold at first;
    `control` is float32, as long as `params`, or None; `elements` is the length of `delta`.
    """

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        *,
        local: Mapping[str, Tensor],
        first_local: Mapping[str, Tensor],
        control: Tensor | None,
        elements: int,
    ) -> None:
        self._current = sitestate.current_state(folder)
        self._learner = learner
        self._local = local
        self._first_local = first_local
        self.control = control
        self._elements = elements
        self._at = _UNKNOWN
        self.restore()
        self._value("", {})  # what cannot be kept is refused before the first round

    @property
    def is_first(self) -> bool:
        """True while memory is as it was before the first period."""
        return self._at == _FIRST

    def leave(self) -> None:
        """A period begins: until it has ended well, memory equals no file."""
        self._at = _UNKNOWN

    def reached(self, update: str) -> None:
        """Memory equals the state that was saved with this update."""
        self._at = update

    def restore(self) -> bool:
        """Make memory equal to the current state; False when it already was."""
        value = read_value(self._current)
        if self._at == value.get("update", _FIRST):
            return False
        self._learner.renew_optimizer()
        self._learner.stream.forget()
        if value:
            with self._current.open("rb") as file:
                self._read(StateReader(file))
        else:
            self._begin()
        self._at = str(value.get("update", _FIRST))
        return True

    @torch.no_grad()
    def _begin(self) -> None:
        for name, tensor in self._first_local.items():
            self._local[name].copy_(tensor)
        if self.control is not None:
            self.control.zero_()
        self._learner.stream.seek((0, 0))

    @torch.no_grad()
    def _read(self, reader: StateReader) -> None:
        value, learner = reader.value, self._learner
        for name, tensor in self._local.items():
            tensor.copy_(fetch(reader, f"local/{name}"))
        if self.control is not None:
            self.control.copy_(fetch(reader, "control"))
        number, taken = value["stream"]
        learner.stream.seek((int(number), int(taken)))
        tensors = {
            name: fetch(reader, name)
            for name in reader.entries
            if name.startswith(("optimizer", "schedule"))
        }
        learner.optimizer.load_state_dict(decode_value(value["optimizer"], tensors))
        if learner.schedule is not None and value["schedule"] is not None:
            learner.schedule.load_state_dict(decode_value(value["schedule"], tensors))
        learner.velocity = float(value["velocity"])

    def save(self, path: Path, update: str) -> None:
        """Write memory as the state after `update`.

        Raises:
            UsageError: the optimizer or schedule holds something that cannot be kept.
        """
        tensors = {f"local/{name}": tensor for name, tensor in self._local.items()}
        if self.control is not None:
            tensors["control"] = self.control
        value = self._value(update, tensors)
        write_state(path, value, [store(name, tensor) for name, tensor in tensors.items()])

    def _value(self, update: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        learner = self._learner
        keep = learner.spec.optimizer.state == "keep"
        optimizer = learner.optimizer.state_dict()
        if not keep:
            optimizer["state"] = {}
        schedule: Any = None
        if learner.schedule is not None:
            schedule = encode_value(learner.schedule.state_dict(), "schedule", tensors)
        return {
            "update": update,
            "stream": learner.stream.position,
            "velocity": learner.velocity if keep else 0.0,
            "optimizer": encode_value(optimizer, "optimizer", tensors),
            "schedule": schedule,
        }

    def residual(self) -> Tensor | None:
        """What earlier periods owe, float32, as long as `delta`; None: nothing."""
        if not self._current.exists():
            return None
        with self._current.open("rb") as file:
            reader = StateReader(file)
            return fetch(reader, "residual") if "residual" in reader.entries else None

    def give_back(self, state: Path, body: Path, target: Path, returned: list[str]) -> None:
        """Write `state` with the delta of `body` added to its residual to `target`."""
        residual = torch.zeros(self._elements)
        read_delta(body, byte_view(residual))
        with state.open("rb") as file:
            reader = StateReader(file)
            if "residual" in reader.entries:
                residual.add_(fetch(reader, "residual"))
            kept = [
                store(name, fetch(reader, name)) for name in reader.entries if name != "residual"
            ]
            value = reader.value | {"returned": returned}
        write_state(target, value, [*kept, store("residual", residual)])
