"""Settings from four sources, with the origin of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from client.agentsettings import AgentSettings
from coordinator.settings import CoordinatorSettings
from protocol.errors import InvalidFileError, Problem
from skerry import settings


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    reference: str = ""
    options: dict[str, str] = {}


class Example(msgspec.Struct, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=1, le=9)] = 1
    rate: float = 0.5
    loud: bool = False
    names: tuple[str, ...] = ()
    mode: Literal["a", "b"] = "a"
    folder: Path = Path("here")
    api_token: str = ""
    url: str = ""
    limit: int | None = None
    tasks: dict[str, Inner] = {}

    def problems(self) -> tuple[Problem, ...]:
        if self.size == 8:
            return (Problem(key="size", found="8", allowed="anything but 8"),)
        return ()


def write(tmp_path: Path, text: str):
    file = tmp_path / "settings.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path):
    file = write(tmp_path, 'size = 2\nrate = 0.1\nmode = "b"\n')
    env = {"SKERRY_RATE": "0.2", "SKERRY_LOUD": "yes", "OTHER": "x"}
    loaded = settings.load(Example, file=file, env=env, flags={"loud": "false", "names": None})
    assert (loaded.values.size, loaded.values.rate, loaded.values.loud) == (2, 0.2, False)
    assert loaded.origins["size"] == f"file {file}"
    assert loaded.origins["rate"] == "environment SKERRY_RATE"
    assert loaded.origins["loud"] == "flag --loud"
    origins = {key: origin for key, _, origin in loaded.rows()}
    assert origins["folder"] == "default"


def test_text_of_variables_becomes_what_the_setting_is():
    env = {
        "SKERRY_SIZE": "3",
        "SKERRY_NAMES": "a, b",
        "SKERRY_FOLDER": "/var/x",
        "SKERRY_LIMIT": "7",
        "SKERRY_TASKS__DIGITS__REFERENCE": "t.py",
        "SKERRY_TASKS__DIGITS__OPTIONS": '{ part = "1" }',
    }
    values = settings.load(Example, env=env).values
    assert values.size == 3
    assert values.names == ("a", "b")
    assert values.folder == Path("/var/x")
    assert values.limit == 7
    assert values.tasks == {"digits": Inner(reference="t.py", options={"part": "1"})}


def test_a_secret_comes_from_a_file_and_is_never_shown(tmp_path: Path):
    secret = tmp_path / "token"
    secret.write_text("s3cret\n", encoding="utf-8")
    loaded = settings.load(
        Example,
        env={"SKERRY_API_TOKEN_FILE": str(secret), "SKERRY_URL": "postgres://me:pw@host/db"},
    )
    assert loaded.values.api_token == "s3cret"
    shown = {key: value for key, value, _ in loaded.rows()}
    assert shown["api_token"] == "(set)"
    assert shown["url"] == "postgres://me:***@host/db"


def test_all_problems_of_all_sources_come_at_once(tmp_path: Path):
    file = write(tmp_path, 'sise = 2\nmode = "c"\nrate = "fast"\n')
    env = {"SKERRY_SIZE": "99", "SKERRY_API_TOKEN_FILE": str(tmp_path / "none")}
    with pytest.raises(InvalidFileError) as caught:
        settings.load(Example, file=file, env=env)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"sise", "mode", "rate", "size", "SKERRY_API_TOKEN_FILE"}
    text = str(caught.value)
    assert "did you mean size" in text
    assert "environment SKERRY_SIZE" in text


def test_rules_between_settings_are_asked_too():
    with pytest.raises(InvalidFileError, match="anything but 8") as caught:
        settings.load(Example, env={"SKERRY_SIZE": "8", "SKERRY_RATE": "fast"})
    assert [problem.key for problem in caught.value.problems] == ["rate", "size"]


def test_a_file_that_is_no_toml_is_named(tmp_path: Path):
    for text in ("size = ", "size = 1\nsize = 2"):
        with pytest.raises(InvalidFileError, match=r"settings.toml"):
            settings.load(Example, file=write(tmp_path, text))
    with pytest.raises(InvalidFileError, match=r"none.toml"):
        settings.load(Example, file=tmp_path / "none.toml")


def test_a_typing_error_in_a_variable_is_found():
    env = {"SKERRY_SIZZE": "1", "SKERRY_SIZE": "1", "SKERRY_API_TOKEN_FILE": "x", "HOME": "/"}
    assert settings.unknown_variables(env, [Example]) == ["SKERRY_SIZZE"]


def test_files_are_looked_for_in_order(tmp_path: Path):
    home = tmp_path / "skerry"
    home.mkdir()
    file = home / "agent.toml"
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert settings.find_file("agent", env) is None
    file.write_text("", encoding="utf-8")
    assert settings.find_file("agent", env) == file
    assert settings.find_file("agent", {**env, "SKERRY_CONFIG": "/x.toml"}) == Path("/x.toml")


@pytest.mark.parametrize("kind", [CoordinatorSettings, AgentSettings])
def test_the_real_settings_load_from_nothing(kind: type[msgspec.Struct]):
    loaded = settings.load(kind)
    assert loaded.values == kind()
    assert not loaded.origins
