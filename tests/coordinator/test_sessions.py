"""Leases, grace, and two agents with one name."""

from __future__ import annotations

from coordinator.sessions import Admitted, Refused, Sessions


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
