"""The documentation: links lead somewhere, commands exist, examples in it are valid."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from protocol import jobfile
from skerry.cli.main import cli
from tests.skerry.test_cli import commands

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = {" ".join(path) for path in commands(cli)}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def spoken(line: str) -> list[str]:
    """The commands `skerry ...` in a line of shell."""
    line = line.partition(" #")[0]
    return re.findall(r"(?=(?:^|run |\$\(|bin/)skerry ([^>;)]*))", line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_flags(page: Path):
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    for line in lines:
        for words in map(shlex.split, (part.replace('"', "") for part in spoken(line))):
            path = next((n for n in (2, 1) if " ".join(words[:n]) in VERBS), 0)
            assert path, line
            command: click.Command | None = cli
            for name in words[:path]:
                assert isinstance(command, click.Group)
                command = command.get_command(click.Context(command), name)
            assert command is not None
            known = {flag for option in command.params for flag in (*option.opts, "--help")}
            flags = {word.split("=")[0] for word in words[path:] if word.startswith("-")}
            assert flags <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_in_the_pages_is_toml_and_whole_jobs_are_valid(page: Path):
    for text in blocks(page, "toml"):
        found = tomllib.loads(text)
        if {"name", "task", "stop"} <= set(found):
            jobfile.parse(text, where=page.name)


def test_commands_are_found_in_shell_as_people_write_it():
    assert spoken('./run skerry join "$(skerry token create)" --name a  # once') == [
        'join "$(skerry token create',
        "token create",
    ]
    told = [
        one for block in blocks(ROOT / "README.md", "sh") for one in map(spoken, block.splitlines())
    ]
    assert sum(map(len, told)) >= 7


def test_the_first_screen_of_the_readme_has_the_two_commands():
    head = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert any(line.startswith("./run demo") for line in head)
    assert any(line.startswith("./run test") for line in head)
