"""Leases, grace, and two agents with one name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.sessions import QUEUE_SLACK, Admitted, Refused, Sessions


def sessions() -> Sessions:
    found = Sessions(lease_seconds=5.0, grace_seconds=3.0)
    found.connect("a", "site", "one", (), now=0.0)
    return found


def test_a_live_namesake_is_refused_with_the_holders_last_seen_time() -> None:
    """PC-033: the second of two agents with one name is refused, and the first is left alone."""
    known = sessions()
    known.heard("a", 1.0)
    found = known.admit("a", "two", now=2.0)
    assert isinstance(found, Refused)
    assert found.last_heard_seconds == 1.0
    assert found.retry_after_seconds == 4.0
    assert "last heard 1.0 s ago" in found.reason
    assert isinstance(known.admit("a", "one", now=2.0), Admitted)


def test_a_restarted_agent_is_let_in_within_the_lease() -> None:
    """PC-033: killed and restarted: at once when its connection closed, else when the lease ends."""
    known = sessions()
    known.close("a", 1.0)
    assert isinstance(known.admit("a", "two", now=1.1), Admitted)
    silent = sessions()
    assert isinstance(silent.admit("a", "two", now=4.9), Refused)
    assert isinstance(silent.admit("a", "two", now=5.0), Admitted)


def test_a_closed_connection_leaves_only_the_grace() -> None:
    known = sessions()
    known.close("a", 1.0)
    assert known.expire(3.9) == []
    assert [session.site for session in known.expire(4.0)] == ["a"]


def test_grace_never_lengthens_a_lease() -> None:
    known = sessions()
    known.close("a", 4.0)
    assert known.wake_at() == 5.0


def test_any_byte_revives_a_closed_connection() -> None:
    known = sessions()
    known.close("a", 1.0)
    known.heard("a", 2.0)
    assert known.wake_at() == 7.0


def test_a_site_expected_after_a_restart_is_not_revived_by_its_old_session() -> None:
    known = Sessions(5.0, 3.0)
    known.expect([("a", "site")], 10.0)
    known.heard("a", 14.0)
    assert [session.site for session in known.expire(15.0)] == ["a"]
    assert isinstance(known.admit("a", "any", 11.0), Admitted)


def test_the_coordinators_own_silence_does_not_count() -> None:
    known = sessions()
    known.extend(15.0)
    assert known.expire(19.9) == []
    known.spare(20.0)
    assert known.expire(22.9) == []
    assert len(known.expire(23.0)) == 1


def test_connect_tells_another_process_from_the_same_one() -> None:
    known = sessions()
    assert not known.connect("a", "site", "one", (), now=1.0)
    assert known.connect("a", "site", "two", (), now=1.0)
    known.drop("a")
    assert known.get("a") is None
    assert known.wake_at() is None
    assert list(known) == []


class _Looking:
    """The same without a queue: looks at every lease each time."""

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}
        self.open: set[str] = set()
        self.expected: set[str] = set()

    def do(self, what: str, site: str, now: float, seconds: float) -> list[str]:
        match what:
            case "connect" | "expect":
                self.ends[site] = now + 5.0
                (self.open.add if what == "connect" else self.open.discard)(site)
                (self.expected.add if what == "expect" else self.expected.discard)(site)
            case "heard" if site in self.ends and site not in self.expected:
                self.ends[site] = max(self.ends[site], now + 5.0)
                self.open.add(site)
            case "close" if site in self.open:
                self.open.discard(site)
                self.ends[site] = min(self.ends[site], now + 3.0)
            case "drop":
                self._forget(site)
            case "extend":
                self.ends = {name: end + seconds for name, end in self.ends.items()}
            case "spare":
                self.ends = {name: max(end, now + 3.0) for name, end in self.ends.items()}
            case "expire":
                gone = sorted(name for name, end in self.ends.items() if now >= end)
                for name in gone:
                    self._forget(name)
                return gone
        return []

    def _forget(self, site: str) -> None:
        self.ends.pop(site, None)
        self.open.discard(site)


def _do(known: Sessions, what: str, site: str, now: float, seconds: float) -> list[str]:
    match what:
        case "connect":
            known.connect(site, "site", site, (), now)
        case "expect":
            known.expect([(site, "site")], now)
        case "heard":
            known.heard(site, now)
        case "close":
            known.close(site, now)
        case "drop":
            known.drop(site)
        case "extend":
            known.extend(seconds)
        case "spare":
            known.spare(now)
        case "expire":
            return [session.site for session in known.expire(now)]
    return []


CALLS = ("connect", "expect", "heard", "heard", "close", "drop", "extend", "spare", "expire")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(CALLS), st.sampled_from("abcd"), st.integers(0, 12)), max_size=60
    )
)
def test_the_queue_of_leases_tells_what_looking_at_all_leases_tells(
    history: list[tuple[str, str, int]],
) -> None:
    known, looking, now = Sessions(5.0, 3.0), _Looking(), 0.0
    for what, site, wait in history:
        now += wait / 4
        assert _do(known, what, site, now, wait) == looking.do(what, site, now, wait)
        assert {session.site: session.ends_at for session in known} == looking.ends
        assert known.wake_at() == min(looking.ends.values(), default=None)


def test_a_sign_of_life_costs_no_queue_and_a_flapping_connection_little() -> None:
    known = sessions()
    for beat in range(1000):
        known.heard("a", beat / 1000)
    assert len(known._queue) == 1
    for turn in range(1000):
        known.close("a", 1.0 + turn / 1000)
        known.connect("a", "site", "one", (), 1.0 + turn / 1000)
    assert len(known._queue) <= 2 + QUEUE_SLACK
    assert known.wake_at() == 1.999 + 5.0
