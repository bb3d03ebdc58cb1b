"""Builds what the fold process reads: layouts, version 0 bodies, spools, requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aggregation.tiles import as_bytes
from coordinator.fold import FoldService
from coordinator.fold_model import Model, digest_of
from coordinator.foldapi import Fold, InitTaken, Recover, Refold, SaveCheckpoint, Screen, TakeInit
from coordinator.journal import CohortMember
from coordinator.stimuli import CommitFacts, InitFacts, UpdateFacts
from protocol.bodies import UpdateMeta, dense_parts, encode_meta_json
from protocol.bodyio import write_body
from protocol.jobspec import JobSpec, Local, Period, Server, TaskRef, Weights
from protocol.layout import DType, Layout, Part, Role, TensorSpec

JOB = "job-1"


def spec(*, server: Server | None = None, weights: Weights | None = None, **more: Any) -> JobSpec:
    return JobSpec(
        name="fold",
        task=TaskRef(name="t"),
        period=Period(steps=1),
        server=server or Server(),
        weights=weights or Weights(),
        **more,
    )


SCAFFOLD = Local(scaffold=True)


def tensor(
    name: str, shape: tuple[int, ...], role: Role = "train", dtype: DType = "float32", tie: str = ""
) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role, tie=tie)


def layout(*tensors: TensorSpec) -> Layout:
    return Layout(tensors=tensors)


class Bench:
    """One job in a folder, with a fold service that can be thrown away and made anew."""

    def __init__(self, path: Path, layout: Layout, job_spec: JobSpec) -> None:
        self.path, self.layout, self.spec = path, layout, job_spec
        self.service = FoldService()
        self.digests: dict[int, str] = {}
        self.commits: list[Refold] = []
        (path / "spools").mkdir(parents=True)

    @property
    def where(self) -> dict[str, Any]:
        return {"id": 1, "job": JOB, "folder": str(self.path)}

    def restart(self) -> None:
        self.service = FoldService()

    def init(
        self,
        params: Sequence[float] | torch.Tensor,
        buffers: Sequence[float] = (),
        ints: Sequence[int] = (),
    ) -> InitFacts:
        write_init(self.path / "init.body", self.layout, params, buffers, ints)
        answer = self.service.handle(TakeInit(**self.where, spec=self.spec))
        assert isinstance(answer, InitTaken)
        assert not answer.fault
        self.digests[0] = answer.facts.digest
        return answer.facts

    def spool(
        self,
        site: str,
        delta: Sequence[float] | torch.Tensor,
        *,
        buffers: Sequence[float] = (),
        ints: Sequence[int] = (),
        control: Sequence[float] | None = None,
        clock: int = 0,
        **meta: Any,
    ) -> CohortMember:
        name = f"{site}-{clock}.body"
        write_update(
            self.path / "spools" / name,
            self.layout,
            site,
            delta,
            buffers,
            ints,
            control,
            clock=clock,
            **meta,
        )
        return CohortMember(site=site, epoch=1, clock=clock, spool=name)

    def screen(self, member: CohortMember) -> UpdateFacts:
        answer = self.service.handle(Screen(**self.where, spool=member.spool))
        assert not answer.fault
        return answer.facts

    def fold_answer(
        self, version: int, *cohort: CohortMember, active_sites: int = 0, additive: bool = False
    ) -> Any:
        return self.service.handle(
            Fold(
                **self.where,
                spec=self.spec,
                version=version,
                base_version=version - 1,
                base_digest=self.digests.get(version - 1, ""),
                cohort=cohort,
                active_sites=active_sites or len(cohort),
                additive=additive,
            )
        )

    def fold(
        self, version: int, *cohort: CohortMember, active_sites: int = 0, additive: bool = False
    ) -> CommitFacts:
        answer = self.fold_answer(version, *cohort, active_sites=active_sites, additive=additive)
        assert not answer.fault, answer.fault
        facts: CommitFacts = answer.facts
        if not facts.problem:
            self.digests[version] = facts.digest
            self.commits = [fold for fold in self.commits if fold.version != version]
            self.commits.append(
                Refold(
                    version=version,
                    digest=facts.digest,
                    cohort=cohort,
                    active_sites=active_sites or len(cohort),
                    additive=additive,
                )
            )
        return facts

    def save(self, version: int) -> Any:
        return self.service.handle(SaveCheckpoint(**self.where, version=version))

    def recover(self, checkpoint: int, folds: Sequence[Refold] | None = None) -> Any:
        folds = [f for f in self.commits if f.version > checkpoint] if folds is None else folds
        return self.service.handle(
            Recover(**self.where, spec=self.spec, checkpoint=checkpoint, folds=tuple(folds))
        )

    def version(self, version: int) -> Model:
        from coordinator.fold_model import read_version

        return read_version(self.path / "versions" / f"{version}.body")

    def params(self, version: int) -> list[float]:
        values: list[float] = self.version(version).parts["params"].tolist()
        return values


def flat(
    values: Sequence[float] | torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype).contiguous().flatten()


def write_init(
    path: Path, layout: Layout, params: Any, buffers: Any = (), ints: Any = (), *, version: int = 0
) -> None:
    parts: dict[Part, torch.Tensor] = {
        "params": flat(params),
        "buffers": flat(buffers),
        "ints": flat(ints, torch.int64),
    }
    model = Model(
        job=JOB, layout=layout, version=version, digest=digest_of(parts), parts=parts, state={}
    )
    with path.open("wb") as file:
        write_body(
            file.write, encode_meta_json(model.meta()), [as_bytes(part) for part in parts.values()]
        )


def write_update(
    path: Path,
    layout: Layout,
    site: str,
    delta: Any,
    buffers: Any = (),
    ints: Any = (),
    control: Any = None,
    *,
    clock: int = 0,
    **meta: Any,
) -> None:
    tensors = [flat(delta), flat(buffers), flat(ints, torch.int64)]
    if control is not None:
        tensors.append(flat(control))
    fields: dict[str, Any] = {
        "job": JOB,
        "site": site,
        "epoch": 1,
        "clock": clock,
        "attempt": 1,
        "base_version": 0,
        "base_digest": "",
        "layout_digest": layout.digest(),
        "examples": 1.0,
        "steps": 1,
        "effective_steps": 1.0,
        "parts": dense_parts(layout, "update", control=control is not None),
    } | meta
    with path.open("wb") as file:
        write_body(
            file.write, encode_meta_json(UpdateMeta(**fields)), [as_bytes(part) for part in tensors]
        )
