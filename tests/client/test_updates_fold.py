"""Updates of real sites through the real fold process: what the one writes the other takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.fold import FoldService
from coordinator.foldapi import Fold, Folded, InitTaken, Screen, Screened, TakeInit
from coordinator.journal import CohortMember
from protocol.jobspec import JobSpec, Local
from tests.client.localjobs import Parts, Site, read_parts
from tests.client.sampletasks import Normed
from tests.client.workerprocess import make_spec


class Coordinator:
    """The coordinator's part, played with the fold service alone."""

    def __init__(self, folder: Path, spec: JobSpec, init: Path) -> None:
        self.service = FoldService()
        self.spec = spec
        self.folder = folder
        (folder / "spools").mkdir(parents=True)
        shutil.copy(init, folder / "init.body")
        taken = self.service.handle(TakeInit(**self._request(), spec=spec))
        assert isinstance(taken, InitTaken)
        assert not taken.fault + taken.facts.problem
        self.digest = taken.facts.digest

    def _request(self) -> dict[str, Any]:
        return {"id": 1, "job": "job-1", "folder": str(self.folder)}

    def version(self, number: int) -> Path:
        return self.folder / "versions" / f"{number}.body"

    def screen(self, update: Path, name: str) -> str:
        shutil.copy(update, self.folder / "spools" / name)
        answer = self.service.handle(Screen(**self._request(), spool=name))
        assert isinstance(answer, Screened)
        return answer.fault + answer.facts.problem

    def fold(self, version: int, members: tuple[CohortMember, ...]) -> None:
        answer = self.service.handle(
            Fold(
                **self._request(),
                spec=self.spec,
                version=version,
                base_version=version - 1,
                base_digest=self.digest,
                cohort=members,
                active_sites=len(members),
            )
        )
        assert isinstance(answer, Folded)
        assert not answer.fault + answer.facts.problem
        self.digest = answer.facts.digest


@pytest.mark.parametrize("local", [Local(), Local(scaffold=True), Local(prox=0.1)])
def test_versions_are_the_weighted_means_of_what_the_sites_sent(tmp_path: Path, local: Local):
    """PC-001, PC-002: delta and running statistics by examples; the counter is an int64 mean."""
    spec = make_spec(local=local)
    sites = [
        Site(tmp_path / name, Normed({"examples": count}), spec=spec, site=name)
        for name, count in (("a1", 12), ("b2", 36))
    ]
    server = Coordinator(tmp_path / "job", spec, sites[0].base)
    for clock in range(2):
        before = read_parts(server.version(clock))[1]
        sent: list[Parts] = []
        members = []
        for site in sites:
            shutil.copy(server.version(clock), site.base)
            site.digest = server.digest
            steps = 3 if site is sites[0] else 5
            sent.append(site.train(clock, steps=steps)[1])
            spool = f"{site.load.site}-{clock}.body"
            body = site.folder / f"update-1-{clock}-1" / "body"
            assert server.screen(body, spool) == ""
            members.append(CohortMember(site=site.load.site, epoch=1, clock=clock, spool=spool))
            site.settle("counted", clock)
        server.fold(clock + 1, tuple(members))
        after = read_parts(server.version(clock + 1))[1]
        mean = 0.25 * sent[0]["delta"] + 0.75 * sent[1]["delta"]
        torch.testing.assert_close(after["params"], before["params"] + mean)
        torch.testing.assert_close(
            after["buffers"], 0.25 * sent[0]["buffers"] + 0.75 * sent[1]["buffers"]
        )
        expected = round(0.25 * sent[0]["ints"].item() + 0.75 * sent[1]["ints"].item())
        assert after["ints"].tolist() == [expected]
        if local.scaffold:
            change = (sent[0]["control"] + sent[1]["control"]) / 2
            torch.testing.assert_close(after["control"], before["control"] + change)
