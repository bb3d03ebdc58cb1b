import re

import msgspec
import pytest

from protocol import errors
from protocol.errors import (
    ErrorBody,
    InvalidFileError,
    LimitError,
    NotFoundError,
    Problem,
    SkerryError,
    from_body,
)


def kinds(root: type[SkerryError] = SkerryError) -> list[type[SkerryError]]:
    """The classes of the contract; shells may refine them for their own use."""
    mine = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(kind for child in mine for kind in kinds(child))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire_whole(kind: type[SkerryError]):
    problem = Problem(key="a", found="b", allowed="c")
    error = kind("it broke.", "mend it.", problems=(problem,), details={"limit": 3, "who": None})
    raw = msgspec.json.encode(error.body())
    again = from_body(msgspec.json.decode(raw, type=ErrorBody), error.http_status)
    assert type(again) is kind
    assert again.body() == error.body()
    assert str(again) == str(error)


def test_the_tree_at_the_top_of_the_module_is_the_tree():
    drawn = {
        name: (int(code), int(status))
        for name, code, status in re.findall(
            r"── (\w+Error) .* exit (\d)  http (\d+)", errors.__doc__ or ""
        )
    }
    real = {kind.__name__: (kind.exit_code, kind.http_status) for kind in kinds()[1:]}
    assert drawn == real


def test_an_unknown_error_falls_back_on_its_status():
    body = ErrorBody(error="FutureError", message="new.")
    assert type(from_body(body, 404)) is NotFoundError
    assert type(from_body(body, 413)) is LimitError
    assert type(from_body(body, 418)) is SkerryError
    assert from_body(body, 418).message == "new."


def test_problems_and_hint_stand_in_the_text():
    text = str(
        InvalidFileError(
            "two problems:", "see docs.", problems=(Problem(key="k", found="1", allowed="2"),)
        )
    )
    assert text.splitlines() == ["two problems:", "  - k: found 1; allowed: 2", "see docs."]
