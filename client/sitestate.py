"""What a site carries from period to period, and how an update moves into it. No torch.

A job's folder:

    state/state.safetensors              the current state; absent before the first settled update
    update-<epoch>-<clock>-<attempt>/
        body                             as it goes over the wire
        meta.json                        an UpdateRecord
        state.safetensors                the state after this update
    .tmp-*                               unfinished or unwanted; removed at the next start

An update's folder appears whole, by one rename, and goes whole, by one rename. Its state becomes
current by one `replace`. The JSON value of a state says under `update` which update it came from
and under `returned` which ones were put back into its residual, so that a verdict that is repeated
after a crash finds out what was already done.

Under a rule that lets a site go on while an update of it is only queued, that update may come back
when a later one is finished already, which had no part of it. Then it is put back into the current
state and into the one after the later update: whichever becomes current, the next period has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from client.statefile import read_value
from protocol.bodies import UpdateMeta
from protocol.messages import VerdictKind

BODY: Final = "body"
META: Final = "meta.json"
STATE: Final = "state.safetensors"
_TEMPORARY: Final = ".tmp-"


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in an update's meta.json: its identity, and figures for the site's own log."""

    job: str
    site: str
    epoch: int
    clock: int
    attempt: int
    base_version: int
    bytes: int
    examples: float
    steps: int
    norm: float
    seconds: float
    of: int = 0  # steps that were asked for; 0: unknown
    cut: bool = False  # by the period's time box
    parts: dict[str, int] = {}


def update_name(epoch: int, clock: int, attempt: int) -> str:
    """Name of an update's folder; also its identity in a state."""
    return f"update-{epoch}-{clock}-{attempt}"


def find_update(folder: Path, epoch: int, clock: int, attempt: int) -> str:
    """Name of an update's folder; with `attempt` 0 of the one that lies there for the clock."""
    if not attempt:
        for path in folder.glob(update_name(epoch, clock, 0)[:-1] + "*"):
            return path.name
    return update_name(epoch, clock, attempt)


def current_state(folder: Path) -> Path:
    """Path of the current state's file, which may not exist yet."""
    return folder / "state" / STATE


def read_record(update: Path) -> UpdateRecord:
    """The record of an update's folder."""
    return msgspec.json.decode((update / META).read_bytes(), type=UpdateRecord)


def unsettled(folder: Path) -> tuple[UpdateRecord, ...]:
    """The updates that wait for a verdict, in order of their identity."""
    records = [read_record(path) for path in folder.glob("update-*-*-*")]
    return tuple(sorted(records, key=lambda r: (r.epoch, r.clock, r.attempt)))


def prepare_folder(folder: Path) -> None:
    """Make the folders and remove what a killed process left unfinished."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)
    for path in (folder / "state").glob("*.tmp"):
        path.unlink()


@contextlib.contextmanager
def new_update(folder: Path, name: str) -> Iterator[Path]:
    """A folder to write an update into; when the block ends well it is in its place, whole."""
    temporary = folder / (_TEMPORARY + name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(folder / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_record(
    update: Path, meta: UpdateMeta, size: int, *, of: int = 0, cut: bool = False
) -> None:
    """Write an update's meta.json; `size` is the length of its body, `of` the steps asked for."""
    record = UpdateRecord(
        job=meta.job,
        site=meta.site,
        epoch=meta.epoch,
        clock=meta.clock,
        attempt=meta.attempt,
        base_version=meta.base_version,
        bytes=size,
        examples=meta.examples,
        steps=meta.steps,
        norm=meta.norm,
        seconds=meta.train_seconds,
        of=of,
        cut=cut,
        parts={part.name: part.bytes for part in meta.parts},
    )
    (update / META).write_bytes(msgspec.json.encode(record))


def settle(
    folder: Path,
    name: str,
    verdict: VerdictKind,
    give_back: Callable[[Path, Path, Path, list[str]], None],
) -> None:
    """Make the site's state what the verdict says. Safe to repeat after a crash at any point.

    A `queued` update stays in its folder, without its state, until a final word or `forget_queued`:
    it may still be voided and come back. `give_back(state, body, target, returned)` writes `state`
    with the body's delta put back into its residual to `target`, in one step, and `returned` under
    the key of this name; it is called for `refused_return` only.
    """
    update, current = folder / name, current_state(folder)
    if not update.exists():
        return
    after, value = update / STATE, read_value(current)
    fresh = after.exists() and value.get("update") != name
    if verdict == "refused_return":
        later = [path for path in folder.glob(f"update-*-*-*/{STATE}") if path != after]
        places = [(after if fresh else current, current), *((path, path) for path in later)]
        for state, target in places:
            # Noted for as long as the update lies here, where it could be put back again.
            returned = [n for n in read_value(state).get("returned", []) if (folder / n).exists()]
            if name not in returned:
                give_back(state, update / BODY, target, [*returned, name])
    elif verdict != "refused_drop" and fresh:
        os.replace(after, current)  # noqa: PTH105  the name says that it replaces
    if verdict == "queued":
        after.unlink(missing_ok=True)
    else:
        _remove(folder, name)


def forget_queued(folder: Path, applied: int | None) -> None:
    """Remove the queued updates that are settled for good: those before clock `applied`, or all."""
    for update in folder.glob("update-*-*-*"):
        if (update / STATE).exists():
            continue
        if applied is None or read_record(update).clock < applied:
            _remove(folder, update.name)


def _remove(folder: Path, name: str) -> None:
    gone = folder / f"{_TEMPORARY}gone-{name}"
    shutil.rmtree(gone, ignore_errors=True)
    (folder / name).rename(gone)
    shutil.rmtree(gone)
