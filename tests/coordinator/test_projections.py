"""Rows of tables from journal entries."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.journal import Entry
from coordinator.projections import PRIMARY_KEYS, Row, rows_of
from protocol.jobspec import Pacing
from tests.coordinator.coretools import World, make_spec

Tables = dict[str, dict[tuple[Any, ...], dict[str, Any]]]


def project(journal: list[Entry]) -> Tables:
    """The tables, by the rule that stands in the docstring of Row."""
    tables: Tables = {name: {} for name in PRIMARY_KEYS}
    for entry in journal:
        for row in rows_of(entry):
            apply(tables, row)
    return tables


def apply(tables: Tables, row: Row) -> None:
    table = tables[row.table]
    if row.insert:
        assert tuple(row.key) == PRIMARY_KEYS[row.table]
        table.setdefault(tuple(row.key.values()), dict(row.key)).update(row.values)
        return
    for found in table.values():
        if all(found.get(name) == value for name, value in row.key.items()):
            found.update(row.values)


def two_rounds() -> World:
    here = World().running("a", "b", spec=make_spec(pacing=Pacing(quorum=2)))
    here.round()
    here.evaluated("a", 1, accuracy=0.5)
    here.upload("a")
    here.failed("b", "no memory")
    here.failed("b", "no memory")
    return here


def test_a_queued_update_is_counted_once_its_version_is_made() -> None:
    here = World().running("a", "b")
    here.upload("a")
    here.upload("b")
    verdicts = [row["verdict"] for row in project(here.journal)["updates"].values()]
    assert verdicts == ["queued", "queued"]
    assert project(here.journal)["versions"][("j", 1)]["made_at"] is None
    here.committed()
    tables = project(here.journal)
    assert [row["verdict"] for row in tables["updates"].values()] == ["counted", "counted"]
    made = tables["versions"][("j", 1)]
    assert (made["cohort"], made["made_at"]) == ('["a","b"]', 0.0)
    assert tables["jobs"][("j",)]["version"] == 1


def test_a_voided_update_keeps_its_facts_and_gets_the_later_verdict() -> None:
    here = two_rounds()
    updates = project(here.journal)["updates"]
    voided = updates[("j", "a", 1, 1)]
    assert voided["verdict"] == "refused_return"
    assert "the quorum is 2" in voided["reason"]
    assert (voided["examples"], voided["wire_bytes"], voided["version"]) == (100.0, 500, None)
    assert updates[("j", "b", 1, 1)]["reason"] == "failed 2 times: no memory"


def test_a_failed_commit_leaves_no_version_and_no_counted_update() -> None:
    here = World().running("a")
    here.upload("a")
    here.committed(problem="disk full")
    tables = project(here.journal)
    assert tables["versions"][("j", 1)]["made_at"] is None
    assert [row["verdict"] for row in tables["updates"].values()] == ["refused_return"]
    here.round()
    tables = project(here.journal)
    assert tables["versions"][("j", 1)]["made_at"] is not None
    verdicts = [row["verdict"] for row in tables["updates"].values()]
    assert verdicts == ["refused_return", "counted"]


def test_tables_agree_with_the_state_of_the_core() -> None:
    here = two_rounds()
    here.command("stop")
    tables = project(here.journal)
    job = here.job
    row = tables["jobs"][("j",)]
    assert (row["state"], row["version"], row["round"]) == ("stopped", job.number, job.rounds)
    assert row["ended_at"] == job.ended_at
    for site, member in job.members.items():
        found = tables["job_sites"][("j", site)]
        assert (found["active"], found["epoch"]) == (member.active, member.epoch)
        mine = [u["verdict"] for u in tables["updates"].values() if u["site"] == site]
        assert mine.count("counted") == member.counted
        assert len(mine) - mine.count("counted") == member.refused
    assert tables["evaluations"][("j", 1, "a")]["examples"] == 50


def test_every_value_is_a_plain_column_value() -> None:
    for entry in two_rounds().journal:
        for row in rows_of(entry, at=1_700_000_000.0):
            assert set(map(type, row.values.values())) <= {str, int, float, bool, type(None)}
            assert row.values.get("settled_at", 1_700_000_000.0) == 1_700_000_000.0
            assert msgspec.json.encode(row.values)
