from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from client.loading import (
    code_folder,
    count_examples,
    load_data,
    load_task,
    single_example_note,
    user_reason,
)
from client.task import Data, SiteContext, Task
from protocol.errors import NotFoundError, RefusedError, UsageError
from tests.client.sampletasks import Linear, Normed, examples

ONE = "import client.task\nclass Only(client.task.Task):\n    pass\n"


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("made_", "skerry_task_")):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_with_one_task_needs_no_class_name(tmp_path: Path):
    task = load_task(write(tmp_path, "made_one.py", ONE), {"width": 3})
    assert type(task).__name__ == "Only"
    assert task.options == {"width": 3}


def test_a_task_can_import_what_lies_beside_it(tmp_path: Path):
    write(tmp_path, "made_parts.py", "WIDTH = 7\n")
    text = ONE + "import made_parts\nOnly.width = made_parts.WIDTH\n"
    assert load_task(write(tmp_path, "made_beside.py", text)).width == 7  # type: ignore[attr-defined]


def test_a_file_named_like_a_known_module_does_not_replace_it(tmp_path: Path):
    task = load_task(write(tmp_path, "json.py", ONE))
    assert type(task).__module__ == "skerry_task_json"
    import json

    assert json.loads("1") == 1


def test_a_module_is_named_by_its_import_path():
    assert isinstance(load_task("tests.client.sampletasks:Linear"), Linear)


@pytest.mark.parametrize(
    ("text", "name", "error", "words"),
    [
        ("x = 1\n", "", UsageError, r"0 subclasses of skerry.Task \(none\)"),
        (ONE + "class Two(Only):\n    pass\n", "", UsageError, r"\(Only, Two\)"),
        (ONE, ":Missing", NotFoundError, "no 'Missing'; its tasks: Only"),
        (ONE + "class Plain:\n    pass\n", ":Plain", UsageError, "not a subclass"),
    ],
)
def test_what_is_no_task_is_refused_with_what_there_is(
    tmp_path: Path, text: str, name: str, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        load_task(write(tmp_path, "made_bad.py", text) + name)


def test_a_missing_module_is_named():
    with pytest.raises(NotFoundError, match="made_nothing"):
        load_task("made_nothing.tasks:Task")


def test_data_must_be_data():
    class Wrong(Task):
        def data(self, site: SiteContext) -> Data:
            return [1]  # type: ignore[return-value]

    with pytest.raises(UsageError, match="returned a list"):
        load_data(Wrong(), SiteContext(name="a", role="site", job="j", seed=0))


def test_examples_are_counted_by_length_or_in_one_pass():
    task = Linear()
    assert count_examples(task, None) == 0
    assert count_examples(task, examples(5)) == 5
    assert count_examples(task, DataLoader(examples(7), batch_size=2)) == 7
    batches = [(torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(2, 4), torch.zeros(2))]
    assert count_examples(task, iter(batches)) == 5


@pytest.mark.parametrize(
    ("model", "count", "batch", "merged"),
    [
        (Normed().model(), 33, 32, True),
        (Normed().model(), 32, 32, False),
        (nn.Linear(1, 1), 33, 32, False),
        (nn.Linear(1, 1), 1, 1, False),
        (Normed().model(), 0, 32, False),
    ],
)
def test_single_examples_matter_only_to_batchnorm(
    model: nn.Module, count: int, batch: int, merged: bool
):
    """PC-047: a remainder of one is merged exactly when the model has BatchNorm."""
    note = single_example_note(model, examples(count), count, batch)
    assert bool(note) is merged


def test_batches_of_one_are_refused_for_batchnorm():
    with pytest.raises(RefusedError, match="batches of one example"):
        single_example_note(Normed().model(), examples(8), 8, 1)


def test_a_reason_names_the_users_own_line(tmp_path: Path):
    text = ONE + "    def data(self, site):\n        return 1 / 0\n"
    reference = write(tmp_path, "made_fails.py", text)
    task = load_task(reference)
    with pytest.raises(ZeroDivisionError) as caught:
        task.data(SiteContext(name="a", role="site", job="j", seed=0))
    reason = user_reason(caught.value, code_folder(reference))
    assert (
        reason
        == f"made_fails.py:{text.count(chr(10))} in data: ZeroDivisionError: division by zero"
    )


def test_a_reason_of_our_own_is_the_sentence_and_what_to_do():
    error = RefusedError("it is full.", "Make room.")
    assert user_reason(error, None) == "it is full. Make room."
