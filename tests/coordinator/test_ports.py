"""Listening sockets, and who holds a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from coordinator.ports import bind, holder_of
from protocol.errors import UsageError


def test_port_0_takes_a_free_one():
    with bind("127.0.0.1", 0, "listen_agents") as sock:
        assert sock.getsockname()[1] > 0
        assert holder_of(sock.getsockname()[1]).endswith(f"(pid {os.getpid()})")


def test_localhost_is_ipv4():
    with bind("localhost", 0, "listen_agents") as sock:
        assert sock.family == socket.AF_INET


def test_a_taken_port_is_named_with_its_process_and_the_setting():
    """PC-084: the error names port and process, and which setting to change."""
    program = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with pytest.raises(UsageError) as refused:
            bind("127.0.0.1", port, "listen_people")
        assert str(port) in refused.value.message
        assert f"(pid {other.pid})" in refused.value.message
        assert "listen_people" in refused.value.hint
        other.communicate(timeout=10)


def test_nobody_holds_a_free_port():
    with bind("127.0.0.1", 0, "listen_agents") as sock:
        port = sock.getsockname()[1]
    assert holder_of(port) == ""


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_refused(host: str):
    with pytest.raises(UsageError, match="listen_agents"):
        bind(host, 0, "listen_agents")
