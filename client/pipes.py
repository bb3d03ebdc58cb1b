"""The worker's end of the pipes to its agent.

No threads: a process that never starts one can be forked safely by a user's data loader. Messages
that arrive during training are seen between two steps, by `stop_asked`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections import deque
from time import monotonic
from types import FrameType
from typing import Final

import msgspec

from client.ipc import Stop, ToWorker, WorkerMessage, to_worker
from protocol import limits
from protocol.errors import MalformedError

_CHUNK_BYTES: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1


class AgentGoneError(Exception):
    """The agent closed the pipe or died: the worker has nobody to work for."""


class Pipe:
    """Reads messages from one file descriptor and writes them to another."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._bytes = bytearray()
        self._queue: deque[ToWorker] = deque()

    def next(self) -> ToWorker:
        """The next message; waits for it as long as the agent lives.

        Raises:
            AgentGoneError: the pipe was closed.
            MalformedError: a line that is no message.
        """
        while not self._queue:
            self._read()
        return self._queue.popleft()

    def stop_asked(self) -> bool:
        """True when a Stop has arrived, which is taken; other messages stay queued. Never waits."""
        while select.select([self._read_fd], [], [], 0)[0]:
            self._read()
        for message in self._queue:
            if isinstance(message, Stop):
                self._queue.remove(message)
                return True
        return False

    def stop_within(self, seconds: float) -> bool:
        """Let so much time pass; True at once when a Stop arrives, which is taken."""
        until = monotonic() + seconds
        while not self.stop_asked():
            left = until - monotonic()
            if left <= 0:
                return False
            select.select([self._read_fd], [], [], left)
        return True

    def wait_with(self, fd: int) -> bool:
        """Wait until `fd` can be read (True) or the agent says something (False)."""
        ready, _, _ = select.select([self._read_fd, fd], [], [])
        if self._read_fd in ready:
            self._read()
        return fd in ready

    def send(self, message: WorkerMessage) -> None:
        """Write one message, whole."""
        view = memoryview(msgspec.json.encode(message) + b"\n")
        try:
            while view:
                view = view[os.write(self._write_fd, view) :]
        except BrokenPipeError:
            raise AgentGoneError from None

    def _read(self) -> None:
        chunk = os.read(self._read_fd, _CHUNK_BYTES)
        if not chunk:
            raise AgentGoneError
        self._bytes += chunk
        *lines, rest = self._bytes.split(b"\n")
        if len(rest) > limits.JSON_BODY_BYTES_MAX:
            raise MalformedError(f"a line of more than {limits.JSON_BODY_BYTES_MAX} bytes.")
        self._bytes = bytearray(rest)
        for line in lines:
            try:
                self._queue.append(to_worker.decode(line))
            except msgspec.MsgspecError as error:
                raise MalformedError(f"this is no message to a worker: {error}") from None


def take_over_stdio() -> Pipe:
    """Keep stdin and stdout for messages; what the user reads or prints goes elsewhere.

    The user's prints land on stderr, reads find an empty file. A child process that the user's code
    starts inherits neither pipe.
    """
    sys.stdout.flush()
    pipe = Pipe(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipe


def live_with_parent() -> None:
    """End this process when its parent dies, even during a long step; leave Ctrl-C to the parent.

    The kernel's signal also comes when only the parent's *thread* ends, so the handler looks
    whether the parent is really another one now. Without such a signal (not Linux) the closed pipe
    is noticed between two steps.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def look(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGHUP, look)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
