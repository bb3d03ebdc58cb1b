"""Loads a task from its file or module, its data, and checks both before the first round."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from client.stream import is_dataset
from client.task import Data, SiteContext, Task
from client.taskref import parse_ref
from client.tensors import unwrap
from protocol.errors import NotFoundError, RefusedError, SkerryError, UsageError


def load_task(
    reference: str, options: dict[str, Any] | None = None, base: Path | None = None
) -> Task:
    """Import the code that a reference names and make its task.

    Raises:
        UsageError: the reference or what it names is no task.
        NotFoundError: no such file, module or class.
    """
    parsed = parse_ref(reference, base)
    if parsed.path is not None:
        module = _import_file(parsed.path)
    else:
        try:
            module = importlib.import_module(parsed.module)
        except ModuleNotFoundError as error:
            raise NotFoundError(f"the module {error.name!r} is not installed here.") from error
    kind = _named(module, parsed.name) if parsed.name else _single(module, reference)
    return kind(options)


def _import_file(path: Path) -> ModuleType:
    """Import a file as a script would be run: what lies beside it can be imported too.

    The module has the file's name where that is free, so that data loader processes that are
    spawned and not forked find it again.
    """
    path = path.resolve()
    if not path.is_file():
        raise NotFoundError(f"there is no task file {path}.")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem.isidentifier() else "task"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"skerry_task_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NotFoundError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _named(module: ModuleType, name: str) -> type[Task]:
    kind = getattr(module, name, None)
    if kind is None:
        known = ", ".join(k.__name__ for k in _tasks(module)) or "none"
        raise NotFoundError(f"{module.__name__} has no {name!r}; its tasks: {known}.")
    if not (inspect.isclass(kind) and issubclass(kind, Task)):
        raise UsageError(f"{name!r} in {module.__name__} is not a subclass of skerry.Task.")
    return kind


def _tasks(module: ModuleType) -> list[type[Task]]:
    return [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Task) and kind.__module__ == module.__name__
    ]


def _single(module: ModuleType, reference: str) -> type[Task]:
    found = _tasks(module)
    if len(found) == 1:
        return found[0]
    names = ", ".join(kind.__name__ for kind in found) or "none"
    raise UsageError(
        f"{reference} has {len(found)} subclasses of skerry.Task ({names}); exactly one is needed.",
        f"Name it: {reference}:Class.",
    )


def load_data(task: Task, site: SiteContext) -> Data:
    """This site's data, as the task loads it.

    Raises:
        UsageError: the task gave something else than Data.
    """
    data = task.data(site)
    if not isinstance(data, Data):
        raise UsageError(
            f"{type(task).__name__}.data must return skerry.Data(train=..., test=...); it returned "
            f"a {type(data).__name__}."
        )
    return data


def count_examples(task: Task, data: Any) -> int:
    """Number of examples: a length where there is one, else counted in one pass."""
    if data is None:
        return 0
    if is_dataset(data):
        return len(data)
    if isinstance(data, DataLoader) and data.batch_size is not None:
        try:
            return len(data.sampler)  # type: ignore[arg-type]
        except TypeError:
            pass
    return sum(task.batch_examples(batch) for batch in data)


def batchnorm_of(model: nn.Module) -> str:
    """Name of the first BatchNorm layer; empty without any."""
    for name, module in unwrap(model).named_modules():
        if isinstance(module, _BatchNorm):
            return name or type(module).__name__
    return ""


def single_example_note(model: nn.Module, train: Any, examples: int, batch_size: int) -> str:
    """A note when the last batch of one example has to be merged for BatchNorm; else empty.

    Raises:
        RefusedError: such a batch would come and cannot be merged into another one.
    """
    layer = batchnorm_of(model)
    if not layer or not examples:
        return ""
    if is_dataset(train):
        if examples == 1 or batch_size == 1:
            what = "one training example" if examples == 1 else "batches of one example"
            raise RefusedError(
                f"this site has {what}, and BatchNorm layer {layer!r} cannot train on that.",
                "Give this site more data, a larger optimizer.batch_size, or use GroupNorm.",
            )
        if examples % batch_size == 1:
            return (
                f"the last batch of each pass has one example, too few for BatchNorm {layer!r}: "
                "it is merged into the batch before"
            )
        return ""
    if isinstance(train, DataLoader) and train.batch_size is not None and not train.drop_last:
        single = examples == 1 or train.batch_size == 1 or examples % train.batch_size == 1
        if single:
            raise RefusedError(
                f"the task's DataLoader gives a last batch of one example ({examples} examples in "
                f"batches of {train.batch_size}); BatchNorm layer {layer!r} cannot train on that.",
                "Set drop_last=True, or return the data set itself: then the batch is merged.",
            )
    return ""


_NOT_THE_USERS = (str(Path(__file__).resolve().parent), str(Path(nn.__file__).parents[2]))


def user_reason(error: BaseException, folder: Path | None) -> str:
    """One line for people: what was raised and, if in the user's code, where in their file.

    `folder` is where the task lies; frames of Skerry and of installed packages are left out.
    """
    if isinstance(error, SkerryError):
        return f"{error.message} {error.hint}".strip()
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if folder is not None
        and frame.filename.startswith(str(folder))
        and not frame.filename.startswith(_NOT_THE_USERS)
    ]
    if not own:
        return what
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {what}"


def code_folder(reference: str) -> Path | None:
    """The folder of the user's code: of the file, or of the imported top-level package."""
    parsed = parse_ref(reference)
    if parsed.path is not None:
        return parsed.path.resolve().parent
    file = getattr(sys.modules.get(parsed.module.partition(".")[0]), "__file__", None)
    return Path(file).resolve().parent if file else None
