"""What the owner of a site can set for its agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.logs import Form


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One task that the owner lets run: `[tasks.NAME]`."""

    reference: Annotated[
        str,
        Meta(
            min_length=1,
            description="The code: `path/to/task.py:Class`, `path/to/task.py` or `module:Class`.",
        ),
    ]
    sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description=(
                "Only this very code may run; `skerry task check` prints the hash. Empty: the code "
                "as it lies there."
            ),
        ),
    ] = ""
    data: Annotated[str, Meta(description="Path of this site's data: `site.data` in the task.")] = (
        ""
    )
    options: Annotated[
        dict[str, str], Meta(description="Values for the task: `site.options`.")
    ] = {}


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `skerry agent`. Relative paths in `tasks` are taken from `base`."""

    folder: Annotated[
        Path, Meta(description="The site's folder: identity, state, log of what was sent.")
    ] = Path("site")
    base: Annotated[
        Path | None,
        Meta(description="Folder that relative paths start from. Empty: the current one."),
    ] = None
    tasks: Annotated[
        dict[str, TaskSettings], Meta(description="The allow-list: which tasks may run here.")
    ] = {}
    worker_command: Annotated[
        tuple[str, ...], Meta(min_length=1, description="Starts a worker.")
    ] = (sys.executable, "-m", "client.worker")
    threads: Annotated[
        int, Meta(ge=0, le=4096, description="CPU threads of a worker. 0: as torch decides.")
    ] = 0
    url: Annotated[
        str,
        Meta(description="Address of the coordinator, if it moved since the site joined."),
    ] = ""
    proxy: Annotated[
        str,
        Meta(description="HTTP proxy. Empty: what HTTPS_PROXY, HTTP_PROXY and NO_PROXY say."),
    ] = ""
    ca_bundle: Annotated[
        Path | None,
        Meta(description="Certificates (PEM) to trust instead of the CA that was pinned at join."),
    ] = None
    insecure: Annotated[
        bool,
        Meta(description="Allow plain http:// beyond this machine. Everybody on the way can read."),
    ] = False
    load_timeout_seconds: Annotated[
        float, Meta(gt=0, description="How long a task may take to load its data.")
    ] = 3600.0
    work_timeout_seconds: Annotated[
        float, Meta(gt=0, description="How long a step or an evaluation may take, in seconds.")
    ] = 3600.0
    log: Annotated[Form, Meta(description="Form of the log: auto, text or json.")] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="What is worth a line; debug tells of every period."),
    ] = "info"
