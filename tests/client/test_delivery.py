from __future__ import annotations

import random
from pathlib import Path

from client.delivery import DAMAGED_MAX, Deliveries
from client.sessionapi import AskVerdict, CallOff, Identity, StoredUpdate, Upload
from protocol.messages import Receipt

ONE = Identity(job="j", epoch=1, clock=1, attempt=1)
TWO = Identity(job="j", epoch=1, clock=2, attempt=1)
OTHER = Identity(job="k", epoch=1, clock=1, attempt=1)


def stored(identity: Identity) -> StoredUpdate:
    return StoredUpdate(identity=identity, body=Path("/b"), bytes=100)


def deliveries(*identities: Identity) -> Deliveries:
    return Deliveries([stored(each) for each in identities], random.Random(1))


def test_a_fresh_update_is_sent_from_its_first_byte_without_asking():
    one = deliveries()
    assert one.send(stored(ONE)) == [Upload(update=stored(ONE), offset=0)]
    assert one.connected() == []


def test_everything_left_behind_is_asked_about_once():
    both = deliveries(ONE, OTHER)
    assert both.connected() == [AskVerdict(identity=ONE), AskVerdict(identity=OTHER)]
    assert both.connected() == []


def test_pauses_grow_while_nothing_arrives_and_start_again_when_something_does():
    one = deliveries()
    one.send(stored(ONE))
    now, pauses = 0.0, []
    for _ in range(12):
        assert one.broke(ONE, now, damaged=False)
        wake = one.wake_at()
        assert wake is not None
        pauses.append(wake - now)
        now = wake
        assert one.tick(now) == [AskVerdict(identity=ONE)]
        one.stands(ONE, Receipt(offset=0), now, superseded=False)
    assert max(pauses) > 2.0
    one.stands(ONE, Receipt(offset=50), now, superseded=False)  # it had moved on in between
    one.broke(ONE, now, damaged=False)
    wake = one.wake_at()
    assert wake is not None
    assert wake - now <= 0.8


def test_damaged_bytes_are_given_up_only_when_nothing_gets_through():
    one = deliveries()
    one.send(stored(ONE))
    for _ in range(DAMAGED_MAX - 1):
        assert one.broke(ONE, 0.0, damaged=True)
    one.tick(10.0)
    one.stands(ONE, Receipt(offset=50), 10.0, superseded=False)
    results = [one.broke(ONE, 10.0, damaged=True) for _ in range(DAMAGED_MAX)]
    assert results == [True] * (DAMAGED_MAX - 1) + [False]
    judged = one.judged("j")
    assert judged is not None
    assert judged.verdict == "refused_drop"


def test_a_verdict_is_final_and_calls_off_what_is_under_way():
    one = deliveries()
    one.send(stored(ONE))
    assert one.judge(ONE, "refused_drop") == [CallOff(identity=ONE)]
    assert one.judge(ONE, "counted") == []
    one.stands(ONE, Receipt(offset=100, verdict="counted"), 0.0, superseded=False)
    judged = one.judged("j")
    assert judged is not None
    assert judged.verdict == "refused_drop"


def test_updates_are_settled_in_order_and_by_job():
    three = deliveries(TWO, ONE, OTHER)
    for identity in (TWO, ONE, OTHER):
        three.judge(identity, "counted")
    judged = three.judged("j")
    assert judged is not None
    assert judged.update.identity == ONE
    assert three.pending("j") == [ONE, TWO]
    three.settled(ONE)
    three.forget("j")
    assert three.pending("j") == []
    assert three.pending("k") == [OTHER]


def test_a_receipt_that_leaves_a_rest_is_asked_about_not_trusted():
    one = deliveries()
    one.send(stored(ONE))
    assert one.stands(ONE, Receipt(offset=60), 0.0, superseded=False) == []
    wake = one.wake_at()
    assert wake is not None
    assert one.tick(wake) == [AskVerdict(identity=ONE)]
    assert one.stands(ONE, Receipt(offset=60), wake, superseded=False) == [
        Upload(update=stored(ONE), offset=60)
    ]
