"""The protocol number, and who may talk to whom.

Protocol n talks to n-1; anything else is refused with both numbers. `SOFTWARE` is for people;
only `PROTOCOL` decides.
"""

from typing import Final

from protocol.errors import VersionError

PROTOCOL: Final = 1
SOFTWARE: Final = "0.1.0"


def check_protocol(theirs: int | None, ours: int = PROTOCOL, *, who: str = "the agent") -> None:
    """Pass when the peer speaks `ours` or `ours - 1`.

    Raises:
        VersionError: naming both numbers and which side to upgrade.
    """
    oldest = max(1, ours - 1)
    if theirs is not None and oldest <= theirs <= ours:
        return
    spoken = "no protocol version" if theirs is None else f"protocol {theirs}"
    behind = theirs is None or theirs < oldest
    raise VersionError(
        f"{who} speaks {spoken}, this side speaks protocol {ours} and takes {oldest} to {ours}.",
        f"Upgrade {who} to Skerry {SOFTWARE} or newer."
        if behind
        else f"This side runs Skerry {SOFTWARE}: upgrade it, or run an older release on {who}.",
        details={"theirs": theirs, "ours": ours, "oldest": oldest},
    )
