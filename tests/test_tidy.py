"""Style and layering, enforced as ordinary tests: by syntax tree, never by words in a line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sourcetree import (
    FLOORS,
    LOOSE,
    PACKAGES,
    ROOT,
    Source,
    calls,
    dotted,
    files,
    imported,
    imports_when_loaded,
    product,
    sources,
)

# Decisions that take `now` as an argument, wherever they stand; whole packages end with a dot.
PURE = (
    "protocol.",
    "aggregation.",
    "privacy.",
    "coordinator.assign",
    "coordinator.core",
    "coordinator.evaluation",
    "coordinator.explain",
    "coordinator.job",
    "coordinator.lifecycle",
    "coordinator.membership",
    "coordinator.projections",
    "coordinator.round",
    "coordinator.selection",
    "coordinator.sessions",
    "client.assignment",
    "client.delivery",
    "client.pipeline",
    "client.session",
)
NO_FILES = ("protocol", "aggregation", "privacy")

# Never, anywhere in the product: what to use instead.
BANNED_IMPORTS = {
    "pickle": "safetensors for tensors, msgspec for the rest",
    "marshal": "msgspec",
    "shelve": "the store",
    "dill": "safetensors and msgspec",
    "cloudpickle": "safetensors and msgspec",
    "joblib": "safetensors and msgspec",
}
BANNED_CALLS = {
    "torch.load": "safetensors, or protocol.bodyio",
    "torch.save": "safetensors, or protocol.bodyio",
    "yaml.load": "TOML by tomllib",
    "numpy.load": "safetensors",
    "eval": "a parser",
    "exec": "importlib, at a site, for what its owner allows",
    "compile": "importlib, at a site, for what its owner allows",
    "os.system": "a list of arguments",
    "os.popen": "a list of arguments",
    "subprocess.getoutput": "a list of arguments",
    "asyncio.create_subprocess_shell": "asyncio.create_subprocess_exec",
}
CLOCKS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter",
    "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today",
    "datetime.date.today",
}  # fmt: skip
FILE_CALLS = {"open", "io.open", "os.open"}
FILE_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink"}

# Global generators may be seeded in one place only: where user code, which may draw from them, runs.
SEEDS_GLOBALLY = {"client.seeds"}
OWN_GENERATORS = {
    "random.Random", "random.SystemRandom", "numpy.random.default_rng", "numpy.random.Generator",
    "numpy.random.PCG64", "numpy.random.Philox", "numpy.random.SeedSequence",
    "numpy.random.get_state", "numpy.random.set_state", "random.getstate",
}  # fmt: skip
TORCH_GLOBAL = {
    "torch.manual_seed", "torch.seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all",
}  # fmt: skip

# Modules without a test file of their own, and why.
NO_TEST_FILE = {
    "coordinator.actions": "values only; the engine's and the core's tests go through all of them",
    "coordinator.foldapi": "values only; the fold process's tests speak it",
    "coordinator.journal": "values only; the store's and the core's tests write and read them",
    "coordinator.stimuli": "values only; the core's tests make all of them",
    "client.ipc": "values only; the worker's and the agent's tests speak it",
}

CHANGE_HEADINGS = {"Added", "Changed", "Fixed", "Removed", "Privacy", "Wire format"}
FILE_BYTES_MAX = 300_000
CASES = [*range(1, 57), *range(76, 91), 107, 109]


def is_pure(source: Source) -> bool:
    return any(
        source.module == name or (name.endswith(".") and f"{source.module}.".startswith(name))
        for name in PURE
    )


def expect_none(wrong: list[str]) -> None:
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} found:", *wrong]), pytrace=False)


def at(source: Source, node: ast.AST) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 0)}"


# ---------------------------------------------------------------- layers


def test_a_package_imports_only_from_lower_floors():
    wrong = []
    for source in product():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.stmt):
                continue
            for name in {each.split(".")[0] for each in imported(node)} - {source.package}:
                if name in LOOSE or FLOORS.get(name, -1) >= FLOORS[source.package]:
                    wrong.append(f"{at(source, node)} imports {name}")
    expect_none(wrong)


def test_no_module_imports_itself_in_a_circle():
    modules = {source.module for source in product()}
    graph: dict[str, set[str]] = {}
    for source in product():
        named = set(imports_when_loaded(source.tree)) & modules
        # `from a import b` loads a too, but that a is no dependency when b is a module in it.
        graph[source.module] = {
            name for name in named - {source.module} if not source.module.startswith(f"{name}.")
        }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_internal_imports_stand_at_the_top_of_a_module():
    wrong = []
    for source in product():
        for function in ast.walk(source.tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    names = imported(node) if isinstance(node, ast.stmt) else ()
                    if any(name.split(".")[0] in PACKAGES for name in names):
                        wrong.append(f"{at(source, node)}: import {names[0]} at the top")
    expect_none(wrong)


# Imported by processes that must stay small; what must not come with them.
TORCH_FREE = {
    "coordinator.server": ("torch", "safetensors"),
    "coordinator.engine": ("torch", "safetensors"),
    "client.agent": ("torch", "numpy", "sqlalchemy", "safetensors"),
    "skerry.cli": ("torch",),
    "skerry.cli.agent": ("torch", "numpy", "sqlalchemy", "cryptography", "alembic", "coordinator"),
    "skerry.cli.coordinator": ("torch", "numpy", "alembic", "asyncpg", "client.agent"),
    "protocol.messages": ("torch", "numpy", "asyncio"),
    "protocol.bodyio": ("torch", "numpy", "asyncio"),
    "protocol.jobfile": ("torch", "numpy", "asyncio"),
    "privacy.tokens": ("torch", "asyncio"),
}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_small_process_stays_small(module: str):
    heavy = TORCH_FREE[module]
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- banned calls


def test_nothing_banned_is_imported():
    wrong = []
    for source in sources():
        if source.package == "tests":
            continue  # tests make hostile pickles
        for node in ast.walk(source.tree):
            for name in imported(node) if isinstance(node, ast.stmt) else ():
                better = BANNED_IMPORTS.get(name.split(".")[0])
                if better:
                    wrong.append(f"{at(source, node)} imports {name}: use {better}")
    expect_none(wrong)


def test_nothing_banned_is_called():
    wrong = []
    for source in sources():
        for name, node in calls(source):
            if name in BANNED_CALLS and source.package != "tests":
                wrong.append(f"{at(source, node)} calls {name}: use {BANNED_CALLS[name]}")
            for keyword in node.keywords:
                literal = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "shell" and not literal:
                    wrong.append(f"{at(source, node)} passes shell=: use a list of arguments")
    expect_none(wrong)


def test_pure_cores_read_no_clock():
    wrong = []
    for source in product():
        for name, node in calls(source) if is_pure(source) else ():
            if name in CLOCKS:
                wrong.append(f"{at(source, node)} calls {name}: take `now` as an argument")
    expect_none(wrong)


def test_every_pure_core_that_is_named_exists():
    modules = {source.module for source in product()}
    assert [name for name in PURE if name.rstrip(".") not in modules] == []
    assert sorted(SEEDS_GLOBALLY - modules) == []


def test_values_packages_touch_no_file():
    wrong = []
    for source in product():
        if source.package not in NO_FILES:
            continue
        for name, node in calls(source):
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in FILE_CALLS or method in FILE_METHODS:
                wrong.append(f"{at(source, node)} opens a file: take bytes or a callable")
    expect_none(wrong)


def draws_globally(name: str) -> bool:
    if name in TORCH_GLOBAL:
        return True
    return name.startswith(("random.", "numpy.random.")) and name not in OWN_GENERATORS


def test_randomness_comes_from_a_generator_that_was_passed():
    wrong = []
    for source in product():
        for name, node in calls(source) if source.module not in SEEDS_GLOBALLY else ():
            if draws_globally(name):
                wrong.append(f"{at(source, node)} calls {name}: take a seeded generator")
    expect_none(wrong)


def test_tests_do_not_sleep():
    wrong = []
    for source in sources():
        for name, node in calls(source) if source.package == "tests" else ():
            yields = len(node.args) == 1 and getattr(node.args[0], "value", None) == 0
            if name == "time.sleep" or (name in ("asyncio.sleep", "anyio.sleep") and not yields):
                wrong.append(f"{at(source, node)} sleeps: wait for an event, or move the clock")
    expect_none(wrong)


def test_only_the_command_line_prints():
    wrong = []
    for source in product():
        for name, node in calls(source) if source.package != "skerry" else ():
            if name == "print":
                wrong.append(f"{at(source, node)} prints: use logging")
    expect_none(wrong)


def public_functions(
    tree: ast.Module,
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Public functions and methods, and whether they may be an override."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, False
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield inner, bool(node.bases)


def names_its_keywords(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, extra: ast.arg
) -> bool:
    """True for `P.kwargs` and `Unpack[...]`, which mypy checks, and where click names the options."""
    kind = ast.unparse(extra.annotation) if extra.annotation else ""
    by_click = source.module.startswith("skerry.cli.") and bool(function.decorator_list)
    return kind.endswith(".kwargs") or kind.startswith("Unpack[") or by_click


def test_public_functions_name_their_arguments():
    wrong = []
    for source in product():
        for function, may_override in public_functions(source.tree):
            extra = function.args.kwarg
            if extra is None or may_override or function.name.startswith("_"):
                continue
            if not names_its_keywords(source, function, extra):
                wrong.append(f"{at(source, function)} {function.name} takes **kwargs: name them")
    expect_none(wrong)


def test_the_rules_see_through_aliases():
    code = (
        "import numpy as np, subprocess as sp\nfrom time import monotonic as m\nfrom torch import load\n"
        "np.random.rand(3)\nm()\nload('x')\nsp.run('x', shell=True)\neval('1')\n"
    )
    names = [name for name, _ in calls(Source("x.py", "x", ast.parse(code + "rng.random()\n")))]
    assert names.pop() == ""  # a generator that was passed
    assert names == ["numpy.random.rand", "time.monotonic", "torch.load", "subprocess.run", "eval"]
    assert draws_globally(names[0])
    assert names[1] in CLOCKS
    assert names[2] in BANNED_CALLS
    method = ast.parse("self.eval()", mode="eval").body
    assert isinstance(method, ast.Call)
    assert dotted(method.func, {}) not in BANNED_CALLS


# ---------------------------------------------------------------- the tree itself


def test_no_note_to_self_is_left_over():
    wrong = []
    for name in files():
        if not name.endswith((".py", ".md", ".toml", ".js", ".css", ".html", ".sh", "run")):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if name != "tests/test_tidy.py" and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
                wrong.append(f"{name}:{number}: {line.strip()[:80]}")
    expect_none(wrong)


def mirrors(module: str) -> set[str]:
    """Test files that are about a module by their name: `fold_init` has test_fold_init or test_fold."""
    package, *inner = module.split(".")
    words = "_".join(inner).split("_")
    flat = {f"tests.{package}.test_{'_'.join(words[:n])}" for n in range(1, len(words) + 1)}
    return {*flat, ".".join(["tests", package, *inner[:-1], f"test_{inner[-1]}"])}


def modules_under_test() -> set[str]:
    """Modules that a test file of their own package imports by name."""
    found: set[str] = set()
    for source in sources():
        _, *folders = source.module.split(".")
        if source.package == "tests" and len(folders) > 1 and folders[-1].startswith("test_"):
            names = (
                each
                for node in ast.walk(source.tree)
                if isinstance(node, ast.stmt)
                for each in imported(node)
            )
            found |= {each for each in names if each.split(".")[0] == folders[0]}
    return found


def test_every_module_has_a_test_file_or_a_test_that_imports_it():
    present = {source.module for source in sources()}
    tested = modules_under_test()
    missing = []
    for source in product():
        inner = source.module.split(".")[1:]
        if source.path.endswith("__init__.py") or inner[-1] == "__main__" or "migrations" in inner:
            continue
        if source.module in NO_TEST_FILE or source.module in tested:
            continue
        if not mirrors(source.module) & present:
            missing.append(f"{source.path}: no tests/{source.package}/test_{'_'.join(inner)}.py")
    expect_none(missing)


def test_modules_excused_from_tests_exist():
    assert sorted(NO_TEST_FILE.keys() - {source.module for source in product()}) == []


def test_every_folder_of_tests_is_a_package():
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(each) for each in sorted(folders) if not (each / "__init__.py").exists()] == []


def test_no_file_is_a_blob():
    big = [name for name in files() if (ROOT / name).stat().st_size > FILE_BYTES_MAX]
    expect_none(big)


def test_the_changelog_has_its_form():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## Unreleased"
    assert all(re.fullmatch(r"## \d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", each) for each in versions[1:])
    headings = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert headings <= CHANGE_HEADINGS


def claimed_cases() -> dict[int, list[str]]:
    """Case number -> the tests whose own docstring begins with it."""
    found: dict[int, list[str]] = {}
    for source in sources():
        if source.package != "tests":
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            said = re.match(r"(PC-\d{3}(?:, |: | and )?)+", ast.get_docstring(node) or "")
            if said and node.name.startswith("test_"):
                for number in re.findall(r"PC-(\d{3})", said[0]):
                    found.setdefault(int(number), []).append(f"{source.path}::{node.name}")
    return found


def listed_cases() -> dict[int, str]:
    """Case number -> why it has no test, from the table in tests/cases.md."""
    text = (ROOT / "tests" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| PC-(\d{3}) \| (.+?) \|$", text, re.MULTILINE)
    return {int(number): reason for number, reason in rows}


def test_every_case_has_a_test_or_a_reason():
    claimed, listed = claimed_cases(), listed_cases()
    missing = [f"PC-{n:03}" for n in CASES if n not in claimed and n not in listed]
    expect_none(missing)


def test_no_case_has_both_a_test_and_a_reason_for_having_none():
    both = claimed_cases().keys() & listed_cases().keys()
    expect_none([f"PC-{number:03}" for number in sorted(both)])
    assert all(len(reason) > 20 for reason in listed_cases().values())
