"""Every byte is counted once, by site and job, and survives a restart."""

from __future__ import annotations

import pytest

from coordinator.ledger import Bytes, Ledger, LedgerRow


def test_bytes_are_counted_by_link_site_and_job() -> None:
    ledger = Ledger()
    ledger.add("a", "j1", 10, 1)
    ledger.add("a", "j2", 20, 2)
    ledger.add("b", "j1", 40, 4)
    ledger.add("a", "", 5, 0)
    assert ledger.link("a", "j1") == Bytes(10, 1)
    assert ledger.site("a") == Bytes(35, 3)
    assert ledger.job("j1") == Bytes(50, 5)
    assert ledger.total() == Bytes(75, 7)
    assert ledger.site("nobody") == Bytes()


def test_a_counter_that_goes_back_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="negative"):
        Ledger().add("a", "j", -1, 0)


def test_only_changed_totals_are_written_and_loading_them_goes_on() -> None:
    ledger = Ledger()
    ledger.add("a", "j1", 10, 1)
    ledger.add("b", "j1", 0, 0)  # nothing happened
    rows = ledger.take_dirty()
    assert rows == [LedgerRow("a", "j1", 10, 1)]
    assert ledger.take_dirty() == []
    ledger.put_back(rows)
    ledger.add("a", "j1", 5, 0)
    assert ledger.take_dirty() == [LedgerRow("a", "j1", 15, 1)]
    again = Ledger()
    again.load([LedgerRow("a", "j1", 15, 1)])
    assert again.take_dirty() == []
    again.add("a", "j1", 1, 1)
    assert again.take_dirty() == [LedgerRow("a", "j1", 16, 2)]


def test_what_is_stored_is_up_to_date_with_the_sockets() -> None:
    ledger = Ledger()
    ledger.sources.append(lambda: ledger.add("a", "j1", 3, 1))
    ledger.sources.append(lambda: ledger.add("b", "j1", 1, 0))
    assert ledger.take_dirty() == [LedgerRow("a", "j1", 3, 1), LedgerRow("b", "j1", 1, 0)]
    ledger.refresh()
    assert ledger.job("j1") == Bytes(8, 2)


def test_a_deleted_job_leaves_its_bytes_with_its_sites() -> None:
    ledger = Ledger()
    ledger.add("a", "j1", 10, 1)
    ledger.add("a", "j2", 20, 2)
    ledger.take_dirty()
    ledger.forget_job("j1")
    assert ledger.job("j1") == Bytes()
    assert ledger.site("a") == Bytes(30, 3)
    assert ledger.link("a", "") == Bytes(10, 1)
    assert ledger.take_dirty() == [LedgerRow("a", "", 10, 1)]
