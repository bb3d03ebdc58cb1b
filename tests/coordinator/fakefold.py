"""A fold process without torch that misbehaves on demand; run as a program.

The job's name says what to do: `die` (the first time), `always_die`, `hang` (the first time),
`garbage` (the first time), `fault`, `full`, `unknown` (until recovered), `wrong`, `env`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from coordinator.foldapi import (
    Done,
    FoldAnswer,
    Folded,
    FoldRequest,
    Quit,
    Recover,
    Saved,
    Wake,
    request_decoder,
)
from coordinator.stimuli import CommitFacts

held: set[str] = set()


def first_time(request: FoldRequest) -> bool:
    marker = Path(request.folder) / f"{request.job}.seen"
    if marker.exists():
        return False
    marker.touch()
    return True


def answer(request: FoldRequest) -> FoldAnswer | None:
    what = request.job
    if isinstance(request, Wake):
        return Done(id=request.id)
    with (Path(request.folder) / "asked").open("a") as file:
        file.write(f"{type(request).__name__} {what}\n")
    if isinstance(request, Recover):
        held.add(what)
        return Folded(id=request.id, facts=CommitFacts(version=request.checkpoint))
    if what == "always_die" or (what == "die" and first_time(request)):
        os._exit(3)
    if what == "hang" and first_time(request):
        return None
    if what == "garbage" and first_time(request):
        sys.stdout.write("this is no JSON\n")
        sys.stdout.flush()
        return None
    if what == "fault":
        return Done(id=request.id, fault="the file is missing")
    if what == "full":
        return Done(id=request.id, fault="no space left", disk_full=True)
    if what == "unknown" and what not in held:
        return Done(id=request.id, fault="not held", unknown_state=True)
    if what == "wrong":
        return Saved(id=request.id, version=1)
    return Done(id=request.id)


def main() -> None:
    sys.stderr.write("the fake fold process speaks\n")
    sys.stderr.flush()
    for line in sys.stdin.buffer:
        request = request_decoder.decode(line)
        if isinstance(request, Quit):
            return
        found = answer(request)
        if found is not None:
            sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
