"""A site that talks to an Engine directly: real bodies, no sockets, no torch."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from coordinator.engine import Engine, EngineSettings
from protocol.bodies import SnapshotMeta, UpdateMeta, dense_parts, encode_meta_json
from protocol.bodyio import BodyReader, write_body
from protocol.errors import BusyError, ConflictError
from protocol.jobspec import Evaluation, JobSpec, Keep, Pacing, Period, Sites, Stop, TaskRef
from protocol.layout import Layout, TensorSpec
from protocol.messages import (
    EndJob,
    Evaluate,
    Evaluated,
    Events,
    Hello,
    Initialise,
    Instruction,
    Join,
    Prepare,
    Ready,
    Receipt,
    Train,
)
from protocol.metrics import metric
from protocol.views import JobRequest, TokenRequest

PIECE = 1 << 16


def layout_of(size: int) -> Layout:
    return Layout(tensors=(TensorSpec(name="w", shape=(size,), dtype="float32", role="train"),))


def floats(values: Sequence[float]) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}f", *values))


def body_of(meta: bytes, parts: Sequence[memoryview]) -> bytes:
    out = bytearray()
    write_body(out.extend, meta, parts)
    return bytes(out)


def init_body(job: str, size: int) -> bytes:
    layout = layout_of(size)
    params = floats([0.0] * size)
    meta = SnapshotMeta(
        job=job,
        version=0,
        digest=hashlib.sha256(params).hexdigest(),
        layout=layout,
        parts=dense_parts(layout, "snapshot", control=False),
    )
    return body_of(encode_meta_json(meta), [params, memoryview(b""), memoryview(b"")])


def update_body(site: str, train: Train, delta: Sequence[float], examples: float = 10.0) -> bytes:
    layout = layout_of(len(delta))
    meta = UpdateMeta(
        job=train.job,
        site=site,
        epoch=train.epoch,
        clock=train.clock,
        attempt=train.attempt,
        base_version=train.base.version,
        base_digest=train.base.digest,
        layout_digest=layout.digest(),
        examples=examples,
        steps=1,
        effective_steps=1.0,
        parts=dense_parts(layout, "update", control=False),
    )
    return body_of(encode_meta_json(meta), [floats(delta), memoryview(b""), memoryview(b"")])


def read_params(path: Path) -> list[float]:
    with path.open("rb") as file:
        reader = BodyReader(file.readinto)
        data = b"".join(bytes(piece) for part, _, piece in reader.frames() if part == 0)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def spec_of(
    *,
    wanted: int = 1,
    versions: int = 2,
    keep: int = 2,
    keep_updates: bool = False,
    checkpoint_every: int = 10,
    durability: str = "process",
    evaluate: bool = False,
) -> JobSpec:
    from protocol.jobspec import Checkpoint

    return JobSpec(
        name="a job",
        task=TaskRef(name="task"),
        durability=durability,  # type: ignore[arg-type]
        sites=Sites(wanted=wanted),
        period=Period(steps=1),
        stop=Stop(versions=versions),
        pacing=Pacing(deadline_seconds=60.0),
        evaluation=Evaluation(every=1 if evaluate else 0, sites=evaluate),
        checkpoint=Checkpoint(every=checkpoint_every),
        keep=Keep(versions=keep, updates=keep_updates),
    )


async def joined(engine: Engine, site: str) -> str:
    """Register a site; -> its secret."""
    made = await engine.create_token(TokenRequest(), by="test")
    token_id, secret = made.token.split(".")
    join = Join(token_id=token_id, token_secret=secret, name=site, public_key="00" * 32, proof="")
    return (await engine.redeem(join)).secret


async def send(upload: object, body: bytes, *, piece: int = PIECE) -> Receipt:
    for at in range(0, len(body), piece):
        await upload.write(body[at : at + piece])  # type: ignore[attr-defined]
    return await upload.finish()  # type: ignore[attr-defined,no-any-return]


class StubSite:
    """Does what it is told until its job ends; `log` is what it was told, in order."""

    def __init__(self, engine: Engine, name: str, *, size: int = 4, step: float = 1.0) -> None:
        self.engine = engine
        self.name = name
        self.size = size
        self.step = step
        self.log: list[Instruction] = []
        self.receipts: list[Receipt] = []
        self.trains = 0
        self.hold_at: int | None = None  # clock at which it stops to train
        self.held = asyncio.Event()
        self._session = ""
        self._first = 1

    async def hello(self, instance: str = "one") -> None:
        hello = Hello(instance=instance, tasks=("task",))
        welcome = await self.engine.open_session(self.name, hello)
        self._session, self._cursor, self._first = welcome.session, welcome.cursor, 1

    async def report(self, event: object) -> None:
        events = Events(first=self._first, items=(event,))  # type: ignore[arg-type]
        self._first += 1
        await self.engine.site_events(self.name, self._session, events)

    async def run(self, instance: str = "one") -> None:
        """Until the job has ended."""
        await self.hello(instance)
        while True:
            answer = await self.engine.mailbox(self.name).wait(self._cursor, 30.0)
            self._cursor = answer.cursor
            for item in answer.items:
                self.log.append(item)
                await self.do(item)
                if isinstance(item, EndJob):
                    return

    async def do(self, item: Instruction) -> None:
        match item:
            case Prepare():
                layout = layout_of(self.size)
                await self.report(
                    Ready(
                        job=item.job,
                        layout=layout,
                        layout_digest=layout.digest(),
                        train_examples=10,
                        eval_examples=10,
                    )
                )
            case Initialise():
                body = init_body(item.job, self.size)
                self.receipts.append(await self.upload_init(item.job, body))
            case Train():
                if self.hold_at is not None and item.clock >= self.hold_at:
                    self.held.set()
                    return
                self.trains += 1
                if item.evaluate:
                    await self.evaluated(item.job, item.base.version)
                self.receipts.append(await self.upload(item))
            case Evaluate():
                await self.evaluated(item.job, item.base.version)
            case _:
                pass

    async def upload_init(self, job: str, body: bytes) -> Receipt:
        offset = 0
        try:
            upload = await self.engine.begin_init(
                job=job, site=self.name, offset=0, length=len(body)
            )
        except ConflictError as error:
            offset = int(error.details["offset"] or 0)
            upload = await self.engine.begin_init(
                job=job, site=self.name, offset=offset, length=len(body) - offset
            )
        return await send(upload, body[offset:])

    async def evaluated(self, job: str, version: int) -> None:
        metrics = {"loss": metric(1.0 / (1 + version), 10.0)}
        await self.report(Evaluated(job=job, version=version, examples=10.0, metrics=metrics))

    async def upload(self, train: Train) -> Receipt:
        """Send an update, from wherever the coordinator has it."""
        body = update_body(self.name, train, [self.step + train.clock] * self.size)
        identity = {
            "job": train.job,
            "site": self.name,
            "epoch": train.epoch,
            "clock": train.clock,
            "attempt": train.attempt,
        }
        while True:
            state = await self.engine.upload_state(**identity)  # type: ignore[arg-type]
            if state.verdict != "unsettled":
                return state
            left = body[state.offset :]
            try:
                upload = await self.engine.begin_upload(
                    **identity,  # type: ignore[arg-type]
                    offset=state.offset,
                    length=len(left),
                )
                return await send(upload, left)
            except BusyError:
                await self.engine.room()


def settings_of(folder: Path, **changes: object) -> EngineSettings:
    values: dict[str, object] = {"data_dir": folder, "disk_reserve_bytes": 0, **changes}
    return EngineSettings(**values)  # type: ignore[arg-type]


async def submitted(engine: Engine, spec: JobSpec) -> str:
    return await engine.submit(JobRequest(spec=spec), "tester")


async def state_of(engine: Engine, job: str, *states: str) -> str:
    """Wait on the journal until the job is in one of these states."""
    async for _ in engine.subscribe(0, job):
        found = (await engine.job(job)).job.state
        if found in states:
            return found
    raise AssertionError("the engine stopped")
