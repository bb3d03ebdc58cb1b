"""Client drift on real images: scikit-learn's digits at Dirichlet(0.1) over ten sites.

MLP 64-64-10, five local epochs of batch 32 at lr 0.05, all sites in every round, 100 rounds:
averaging, FedProx (mu = 0.1) and SCAFFOLD, paired over data seeds. The sites are the worker's own
`LocalJob`, the server is the fold process's own `FoldService`, both in this process; only sockets
and pacing are left out.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import TensorDataset

from client import ipc
from client.localjob import LocalJob
from client.sitestate import BODY, update_name
from client.task import Data, SiteContext, Task
from coordinator.fold import FoldService
from coordinator.foldapi import Fold, Folded, InitTaken, TakeInit
from coordinator.journal import CohortMember
from protocol import jobfile
from skerry.datasets import digits, dirichlet_split

SITES: Final = 10
EPOCHS: Final = 5
RULES: Final[dict[str, dict[str, object]]] = {
    "fedavg": {},
    "fedprox": {"prox": 0.1},
    "scaffold": {"scaffold": True},
}


class DigitsPart(Task):
    """One site's part; the split depends on the data seed alone."""

    def __init__(self, data_seed: int, alpha: float, part: int) -> None:
        super().__init__()
        self._data_seed, self._alpha, self._part = data_seed, alpha, part

    def model(self) -> nn.Module:
        """MLP 64-64-10."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site: SiteContext) -> Data:
        """This site's training images; all test images, which one site evaluates on."""
        del site
        images = digits(seed=self._data_seed)
        mine = dirichlet_split(images.train_y, SITES, self._alpha, self._data_seed)[self._part]
        return Data(
            train=TensorDataset(
                torch.from_numpy(images.train_x[mine]), torch.from_numpy(images.train_y[mine])
            ),
            test=TensorDataset(torch.from_numpy(images.test_x), torch.from_numpy(images.test_y)),
        )


def train(rule: str, data_seed: int, alpha: float, rounds: int) -> list[float]:
    """Accuracy of every version, from 1 on."""
    torch.set_num_threads(1)
    spec = jobfile.from_mapping(
        {
            "name": rule,
            "seed": data_seed,
            "task": {"name": "digits"},
            "period": {"epochs": EPOCHS},
            "optimizer": {"lr": 0.05, "batch_size": 32, "state": "reset"},
            "local": RULES[rule],
            "stop": {"versions": rounds},
        }
    )
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as name:
        folder = Path(name)
        sites = []
        for part in range(SITES):
            load = ipc.Load(
                job="j", spec=spec, folder=str(folder / f"{part}"), task="", site=f"{part}",
                role="site",
            )  # fmt: skip
            sites.append(LocalJob(load, DigitsPart(data_seed, alpha, part)))
        (folder / "job" / "spools").mkdir(parents=True)
        sites[0].make_init(folder / "job" / "init.body")
        service = FoldService()
        request: dict[str, Any] = {"id": 1, "job": "j", "folder": str(folder / "job")}
        taken = service.handle(TakeInit(**request, spec=spec))
        assert isinstance(taken, InitTaken)
        digest = taken.facts.digest
        accuracies = []
        for clock in range(rounds):
            base = folder / "job" / "versions" / f"{clock}.body"
            cohort = []
            for site in sites:
                period = ipc.TrainPeriod(
                    base_path=str(base), base_version=clock, base_digest=digest, epoch=1,
                    clock=clock, attempt=1, epochs=EPOCHS,
                )  # fmt: skip
                site.load_base(period)
                update = site.train(period, lambda *_: None)
                spool = f"{site.load.site}.body"
                shutil.move(update / BODY, folder / "job" / "spools" / spool)
                cohort.append(CohortMember(site=site.load.site, epoch=1, clock=clock, spool=spool))
            folded = service.handle(
                Fold(
                    **request, spec=spec, version=clock + 1, base_version=clock,
                    base_digest=digest, cohort=tuple(cohort), active_sites=SITES,
                )
            )  # fmt: skip
            assert isinstance(folded, Folded)
            assert not folded.facts.problem
            assert not folded.fault
            digest = folded.facts.digest
            for site in sites:
                site.settle(ipc.Settle(epoch=1, clock=clock, attempt=1, verdict="counted"))
                shutil.rmtree(site.folder / update_name(1, clock, 1), ignore_errors=True)
            made = folder / "job" / "versions" / f"{clock + 1}.body"
            sites[0].load_base(
                ipc.EvaluateBase(base_path=str(made), base_version=clock + 1, base_digest=digest)
            )
            accuracy = sites[0].evaluate_base()[1]["accuracy"].value
            assert isinstance(accuracy, float)
            accuracies.append(accuracy)
            base.unlink()
        return accuracies


def run(*, quick: bool) -> dict[str, Any]:
    """Accuracy at rounds 10 and 100, means over data seeds (quick: one seed, 20 rounds)."""
    seeds = [0] if quick else [0, 1, 2, 3, 4]
    rounds = 20 if quick else 100
    with ProcessPoolExecutor(2) as pool:
        futures = {
            (rule, seed): pool.submit(train, rule, seed, 0.1, rounds)
            for seed in seeds
            for rule in RULES
        }
        curves = {key: future.result() for key, future in futures.items()}
    at = {"round_10": 9, "last_round": rounds - 1}
    table = {
        rule: {
            name: round(statistics.fmean(curves[rule, seed][index] for seed in seeds), 4)
            for name, index in at.items()
        }
        for rule in RULES
    }
    ahead = sum(curves["scaffold", seed][9] > curves["fedavg", seed][9] for seed in seeds)
    return {
        "seeds": len(seeds),
        "rounds": rounds,
        "accuracy": table,
        "scaffold_gain_round_10": round(
            table["scaffold"]["round_10"] - table["fedavg"]["round_10"], 4
        ),
        "seeds_scaffold_ahead_round_10": ahead,
    }


BARS: Final = {"scaffold_gain_round_10": ">= 0.0"}
