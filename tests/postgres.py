"""A PostgreSQL server of one's own, for as long as a test session needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from time import monotonic
from typing import Self

START_SECONDS = 30.0
OWNER = "postgres"


def found() -> Path | None:
    """The folder of the server's programs, newest first; None when it is not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    on_path = shutil.which("initdb")
    return places[0].parent if places else Path(on_path).parent if on_path else None


def why_not() -> str:
    """Why no server can be started here; empty when one can."""
    if found() is None:
        return "PostgreSQL is not installed (on Debian: apt-get install postgresql)"
    if os.getuid() == 0:
        try:
            pwd.getpwnam(OWNER)
        except KeyError:
            return f"PostgreSQL does not run as root, and there is no user {OWNER!r}"
    return ""


class Postgres:
    """A private cluster on loopback, without the caution of a real one (no fsync)."""

    def __init__(self) -> None:
        programs = found()
        assert programs is not None
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="skerry-pg-"))
        self._databases = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def _as_owner(self) -> dict[str, int]:
        """PostgreSQL refuses to run as root."""
        if os.getuid():
            return {}
        owner = pwd.getpwnam(OWNER)
        os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        return {"user": owner.pw_uid, "group": owner.pw_gid}

    def __enter__(self) -> Self:
        data, who = self._folder / "data", self._as_owner()
        subprocess.run(
            [self._programs / "initdb", "-D", data, "-U", OWNER, "-A", "trust", "-N", "-E", "UTF8"],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **who,  # type: ignore[call-overload]
        )
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "fsync": "off",
                   "unix_socket_directories": self._folder}  # fmt: skip
        settings = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        self._server = subprocess.Popen(
            [self._programs / "postgres", "-D", data, *settings],
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "log").open("wb"),
            cwd=self._folder,
            **who,  # type: ignore[arg-type]
        )
        end = monotonic() + START_SECONDS
        ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode:
            log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
            assert self._server.poll() is None, log
            assert monotonic() < end, log
        return self

    def __exit__(self, *_: object) -> None:
        self._server.send_signal(signal.SIGINT)  # ends sessions and stops
        self._server.wait(START_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"skerry_{self._databases}"
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", OWNER]
        subprocess.run([self._programs / "createdb", *where, name], check=True)
        return f"postgresql+asyncpg://{OWNER}@127.0.0.1:{self.port}/{name}"
