"""Journal events -> rows of tables. Pure: the store writes them in the transaction of the events.

A projection of the whole journal, from an empty database, gives the same rows again.

    table        primary key                          further columns (type; default when unset)
    jobs         job                                  name str, task str, by str, spec str (JSON of
                                                      JobSpec), state str, reason str,
                                                      version int (-1: none yet), round int,
                                                      model_bytes int, dense_bytes int (one dense
                                                      exchange in one direction), checkpoint int
                                                      (-1), created_at float, ended_at float | None
    job_sites    job, site                            role str, active bool, epoch int, clock int
                                                      (start clock of the epoch), train_examples
                                                      int, eval_examples int, joined_at_version
                                                      int, note str (why it ended or was refused)
    versions     job, version                         round int, cohort str (JSON list of sites),
                                                      missing str (JSON object site -> reason),
                                                      active_sites int, digest str, bytes int,
                                                      update_norm float, model_norm float,
                                                      fold_seconds float, by str,
                                                      made_at float | None
                                                      (None: closed, not made yet; do not show)
    updates      job, site, epoch, clock              attempt int, verdict str, reason str,
                                                      spool str, version int | None (the one it
                                                      counts in), wire_bytes int, examples float,
                                                      steps int, norm float, train_seconds float,
                                                      metrics str (JSON object), settled_at float
    evaluations  job, version, site                   role str, examples float, metrics str (JSON
                                                      object), at float

Columns that an insert leaves out take "", 0, False or None by their type (cohort "[]", missing and
metrics "{}"). A verdict `queued` becomes `counted` when its version is made. Counts per site are
sums over `updates`; `number` of an update (for paging) is the store's own running id.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from coordinator import journal as j
from protocol.jobstates import TERMINAL

Table = Literal["jobs", "job_sites", "versions", "updates", "evaluations"]
Value = str | int | float | bool | None

PRIMARY_KEYS: Final[dict[Table, tuple[str, ...]]] = {
    "jobs": ("job",),
    "job_sites": ("job", "site"),
    "versions": ("job", "version"),
    "updates": ("job", "site", "epoch", "clock"),
    "evaluations": ("job", "version", "site"),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A write to one table.

    `insert` True: `key` is the whole primary key; insert the row, or set just these columns where
    it is there already. `insert` False: set these columns in every row that matches `key`, which
    may be none.
    """

    table: Table
    key: dict[str, Value]
    values: dict[str, Value]
    insert: bool = True


def rows_of(entry: j.Entry, at: float | None = None) -> list[Row]:
    """The rows that one journal entry writes, in order.

    `at` is the Unix time at which the entry was recorded; without it, columns ending in `_at` hold
    job time (4.9).
    """
    event = entry.event
    when = entry.now if at is None else at
    match event:
        case j.JobSubmitted():
            return [_submitted(event, when)]
        case j.JobMoved():
            return _moved(event, when)
        case j.SiteEntered() | j.SiteEnded() | j.SiteRefused():
            return [_site(event)]
        case j.RoundOpened():
            return [_job(event.job, round=event.round)]
        case j.UpdateSettled():
            return [_settled(event, when)]
        case j.RoundClosed():
            return _closed(event)
        case j.VersionMade():
            return _made(event, when)
        case j.CheckpointMade():
            return [_job(event.job, checkpoint=event.version)]
        case j.EvaluationReported():
            return [_evaluated(event, when)]
        case j.InitAsked() | j.PeriodOpened() | j.Retried() | j.SiteFailed() | j.Commanded():
            return []


def _job(job: str, **values: Value) -> Row:
    return Row(table="jobs", key={"job": job}, values=values, insert=False)


def _submitted(event: j.JobSubmitted, when: float) -> Row:
    values: dict[str, Value] = {
        "name": event.spec.name,
        "task": event.spec.task.name,
        "by": event.by,
        "spec": _json(event.spec),
        "state": "initialising",
        "reason": "",
        "version": -1,
        "round": 0,
        "model_bytes": 0,
        "dense_bytes": 0,
        "checkpoint": -1,
        "created_at": when,
        "ended_at": None,
    }
    return Row(table="jobs", key={"job": event.job}, values=values)


def _moved(event: j.JobMoved, when: float) -> list[Row]:
    moved = _job(event.job, state=event.state, reason=event.reason)
    if event.state not in TERMINAL:
        return [moved]
    ended = _job(event.job, ended_at=when)
    gone = Row(table="job_sites", key={"job": event.job}, values={"active": False}, insert=False)
    return [moved, ended, gone]


def _site(event: j.SiteEntered | j.SiteEnded | j.SiteRefused) -> Row:
    key: dict[str, Value] = {"job": event.job, "site": event.site}
    if isinstance(event, j.SiteEntered):
        values: dict[str, Value] = {
            "role": event.role,
            "active": True,
            "epoch": event.epoch,
            "clock": event.clock,
            "train_examples": event.train_examples,
            "eval_examples": event.eval_examples,
            "joined_at_version": event.joined_at_version,
            "note": "",
        }
        return Row(table="job_sites", key=key, values=values)
    if isinstance(event, j.SiteEnded):
        gone: dict[str, Value] = {"active": False, "note": event.reason}
        return Row(table="job_sites", key=key, values=gone, insert=False)
    # A site that was refused before it ever entered has a row too: people look for it there.
    return Row(table="job_sites", key=key, values={"active": False, "note": event.reason})


def _settled(event: j.UpdateSettled, when: float) -> Row:
    key: dict[str, Value] = {
        "job": event.job,
        "site": event.site,
        "epoch": event.epoch,
        "clock": event.clock,
    }
    values: dict[str, Value] = {
        "attempt": event.attempt,
        "verdict": event.verdict,
        "reason": event.reason,
        "spool": event.spool,
        "version": None,
        "settled_at": when,
    }
    if event.verdict != "refused_return":  # that one is a later word: the facts stand already
        values |= {
            "wire_bytes": event.wire_bytes,
            "examples": event.examples,
            "steps": event.steps,
            "norm": event.norm,
            "train_seconds": event.train_seconds,
            "metrics": _json(event.metrics),
        }
    return Row(table="updates", key=key, values=values)


def _closed(event: j.RoundClosed) -> list[Row]:
    if not event.cohort:
        return []
    values: dict[str, Value] = {
        "round": event.round,
        "cohort": _json([member.site for member in event.cohort]),
        "missing": _json(event.missing),
        "active_sites": event.active_sites,
        "made_at": None,
    }
    rows = [
        Row(table="versions", key={"job": event.job, "version": event.version}, values=values),
    ]
    for member in event.cohort:
        key: dict[str, Value] = {
            "job": event.job,
            "site": member.site,
            "epoch": member.epoch,
            "clock": member.clock,
        }
        rows.append(Row(table="updates", key=key, values={"version": event.version}, insert=False))
    return rows


def _made(event: j.VersionMade, when: float) -> list[Row]:
    values: dict[str, Value] = {
        "digest": event.digest,
        "bytes": event.bytes,
        "update_norm": event.update_norm,
        "model_norm": event.model_norm,
        "fold_seconds": event.fold_seconds,
        "by": event.by,
        "made_at": when,
    }
    if event.version == 0:  # no round came before it
        values |= {"round": 0, "cohort": "[]", "missing": "{}", "active_sites": 0}
    rows = [
        Row(table="versions", key={"job": event.job, "version": event.version}, values=values),
        Row(
            table="updates",
            key={"job": event.job, "version": event.version},
            values={"verdict": "counted"},
            insert=False,
        ),
        _job(event.job, version=event.version, model_bytes=event.bytes),
    ]
    if event.layout is not None:
        rows.append(_job(event.job, dense_bytes=event.layout.dense_bytes()))
    return rows


def _evaluated(event: j.EvaluationReported, when: float) -> Row:
    key: dict[str, Value] = {"job": event.job, "version": event.version, "site": event.site}
    values: dict[str, Value] = {
        "role": event.role,
        "examples": event.examples,
        "metrics": _json(event.metrics),
        "at": when,
    }
    return Row(table="evaluations", key=key, values=values)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
