"""Starts an agent as a process of its own: `python -m tests.client.agentprocess FOLDER`."""

import asyncio
import sys
from pathlib import Path

from client.agent import run_agent
from client.agentsettings import AgentSettings, TaskSettings
from protocol.errors import SkerryError


def settings_for(folder: Path, **more: object) -> AgentSettings:
    """Settings that run the stub worker for the task `stub`."""
    return AgentSettings(
        folder=folder,
        tasks={"stub": TaskSettings(reference="client.stub:Stub")},
        worker_command=(sys.executable, "-m", "client.stub"),
        **more,  # type: ignore[arg-type]
    )


def main() -> int:
    try:
        return asyncio.run(run_agent(settings_for(Path(sys.argv[1]), log="text")))
    except SkerryError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
