from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from client import ipc
from client.pipes import AgentGoneError, Pipe
from protocol.errors import MalformedError


class Ends:
    """A pipe with the agent's two ends of it."""

    def __init__(self) -> None:
        inner_read, self.to_worker = os.pipe()
        self.from_worker, inner_write = os.pipe()
        self.fds = {inner_read, self.to_worker, self.from_worker, inner_write}
        self.pipe = Pipe(inner_read, inner_write)

    def say(self, message: ipc.WorkerMessage) -> None:
        os.write(self.to_worker, msgspec.json.encode(message) + b"\n")

    def close(self, *fds: int) -> None:
        for fd in fds:
            os.close(fd)
            self.fds.discard(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close(*list(made.fds))


INIT = ipc.MakeInit(path="x")


def test_messages_come_in_order_however_they_are_cut(ends: Ends):
    raw = b"".join(msgspec.json.encode(m) + b"\n" for m in (INIT, ipc.Stop(), INIT))
    os.write(ends.to_worker, raw[:5])
    assert not ends.pipe.stop_asked()
    os.write(ends.to_worker, raw[5:])
    assert [ends.pipe.next() for _ in range(3)] == [INIT, ipc.Stop(), INIT]


def test_a_stop_is_taken_and_other_messages_wait(ends: Ends):
    assert not ends.pipe.stop_asked()
    ends.say(INIT)
    ends.say(ipc.Stop())
    assert ends.pipe.stop_asked()
    assert not ends.pipe.stop_asked()
    assert ends.pipe.next() == INIT


def test_a_closed_pipe_ends_the_worker_when_it_reads_and_when_it_writes(ends: Ends):
    ends.close(ends.to_worker, ends.from_worker)
    with pytest.raises(AgentGoneError):
        ends.pipe.next()
    with pytest.raises(AgentGoneError):
        ends.pipe.stop_asked()
    with pytest.raises(AgentGoneError):
        ends.pipe.send(ipc.Stopped())


@pytest.mark.parametrize("line", [b"garbage", b'{"type":"unknown"}', b'{"type":"make_init"}'])
def test_a_line_that_is_no_message_is_refused(ends: Ends, line: bytes):
    os.write(ends.to_worker, line + b"\n")
    with pytest.raises(MalformedError, match="no message to a worker"):
        ends.pipe.next()


def test_what_is_sent_is_one_line(ends: Ends):
    ends.pipe.send(ipc.WorkerFailed(reason="two\nlines"))
    raw = os.read(ends.from_worker, 1000)
    assert raw.count(b"\n") == 1
    assert ipc.from_worker.decode(raw) == ipc.WorkerFailed(reason="two\nlines")


def test_waiting_with_another_file_says_which_of_them_spoke(ends: Ends):
    read, write = os.pipe()
    ends.fds |= {read, write}
    os.write(write, b"1")
    assert ends.pipe.wait_with(read)
    os.read(read, 1)
    ends.say(ipc.Stop())
    assert not ends.pipe.wait_with(read)
    assert ends.pipe.stop_asked()


def test_prints_go_to_stderr_and_reads_find_nothing():
    code = (
        "from client import ipc, pipes\n"
        "pipe = pipes.take_over_stdio()\n"
        "print('printed', repr(open(0).read()))\n"
        "pipe.send(ipc.Stopped())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"line\n", capture_output=True, timeout=60, check=True
    )
    assert ipc.from_worker.decode(done.stdout) == ipc.Stopped()
    assert done.stderr == b"printed ''\n"
