import pytest

from protocol.errors import VersionError
from protocol.version import PROTOCOL, SOFTWARE, check_protocol


@pytest.mark.parametrize("theirs", [6, 7])
def test_protocol_n_talks_to_itself_and_to_the_one_before(theirs: int):
    check_protocol(theirs, 7)


def test_the_first_protocol_has_none_before_it():
    check_protocol(1, 1)
    for theirs in (0, 2):
        with pytest.raises(VersionError):
            check_protocol(theirs, 1)


@pytest.mark.parametrize(
    ("theirs", "says", "advice"),
    [
        (8, "protocol 8", "This side runs"),
        (5, "protocol 5", "Upgrade the agent"),
        (None, "no protocol version", "Upgrade the agent"),
    ],
)
def test_any_other_protocol_is_refused_with_both_numbers_and_what_to_upgrade(
    theirs: int | None, says: str, advice: str
):
    """PC-087: n+1, n-2 and no version at all."""
    with pytest.raises(VersionError) as caught:
        check_protocol(theirs, 7)
    text = str(caught.value)
    assert says in text
    assert "speaks protocol 7" in text
    assert advice in text
    assert SOFTWARE in text
    assert caught.value.details == {"theirs": theirs, "ours": 7, "oldest": 6}
    assert caught.value.http_status == 426


def test_the_other_side_can_be_named():
    with pytest.raises(VersionError, match="the coordinator speaks protocol"):
        check_protocol(PROTOCOL + 1, who="the coordinator")
