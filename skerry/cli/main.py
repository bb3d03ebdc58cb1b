"""The entry of the command line: UTF-8, the verbs, errors as sentences, exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any, Final, NamedTuple, TextIO

import click

from protocol.errors import SkerryError, UsageError
from skerry.cli.output import fail

EXIT_CODES: Final = """\b
Exit codes:
  0    ok
  1    the job failed
  2    usage, or an invalid file
  3    no coordinator can be reached
  4    refused
  5    not found
  130  interrupted
"""


class Verb(NamedTuple):
    """Where a verb lives: its module is imported when it is used, so that help comes at once."""

    module: str
    attribute: str
    help: str


VERBS: Final = {
    "dev": Verb("dev", "dev", "A coordinator and example sites in one go; stays up."),
    "coordinator": Verb("coordinator", "coordinator", "Run a coordinator."),
    "join": Verb("join", "join", "Enrol this site with a join token."),
    "agent": Verb("agent", "agent", "Run this site's agent."),
    "job": Verb("jobs", "job", "Submit, watch and steer jobs."),
    "site": Verb("sites", "site", "List, drain and revoke sites."),
    "token": Verb("sites", "token", "Create, list and revoke join tokens."),
    "task": Verb("task", "task", "Check a task offline: what would leave the site?"),
    "config": Verb("local", "config", "Show every setting and where it came from."),
    "doctor": Verb("local", "doctor", "Look for what is wrong on this machine."),
    "version": Verb("local", "version", "Print the versions."),
}


class Lazy(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of the table."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module and take its command."""
        del ctx
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        found = getattr(importlib.import_module(f"skerry.cli.{verb.module}"), verb.attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, without importing any."""
        del ctx
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


@click.command(
    cls=Lazy,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli() -> None:
    """Train one model across many places; the data stays where it is.

    \b
    Examples:
      skerry dev                          coordinator, sites and a job, all on this machine
      skerry coordinator                  a coordinator on 127.0.0.1:8470 and :8471
      skerry token create                 a join token for one site
      skerry join TOKEN --name edge-1     at the site, once
      skerry agent                        at the site, always
      skerry job submit job.toml --watch
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    speak_utf8("skerry", given)
    sys.exit(run(cli, given, "skerry"))


def run(command: click.Command, arguments: list[str], name: str) -> int:
    """Run a command; every error that is meant for people becomes sentences and a code."""
    try:
        # Not `command.main`: that turns a broken pipe into code 1, which is a job that failed.
        with command.make_context(name, list(arguments)) as context:
            result: Any = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except SkerryError as error:
        fail(error, as_json="--json" in arguments)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe has gone, as `head` does
        _give_up_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise  # not about a file: an accident, with its traceback
        if error.filename is None:
            _give_up_output()
        found = UsageError(f"{error.filename or 'the output'} cannot be used: {error.strerror}.")
        fail(found, as_json="--json" in arguments)
        return found.exit_code
    return result if isinstance(result, int) else 0


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def speak_utf8(module: str, arguments: list[str]) -> None:
    """Start again in UTF-8 mode when the locale says otherwise.

    Names, paths and files here are UTF-8 everywhere. Python fixes the encoding of arguments and
    file names when it starts, so under LANG=C nothing less than a new start is right.
    """
    # A stream that the caller closed is none; what goes there is nobody's.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    if sys.getfilesystemencoding().lower() == "utf-8" and sys.stdout.encoding.lower() == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.pop("PYTHONIOENCODING", None)
    os.execv(  # noqa: S606  our own interpreter, our own arguments
        sys.executable, [sys.executable, "-X", "utf8", "-m", module, *arguments]
    )
