"""The rules between the fields of a job, and what is worth a warning.

A combination of switches either works, with its guarantee stated, or is refused here with a
sentence that says why and what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from protocol import limits
from protocol.errors import Problem, UsageError
from protocol.jobspec import JobSpec, Optimizer, Server
from protocol.names import clean_name
from protocol.schema import show

_DEFAULTS: Final = (Optimizer(), Server())


class Rule(NamedTuple):
    """A rule and the keys it looks at; it is not asked while one of those has a problem itself."""

    keys: tuple[str, ...]
    check: Callable[[JobSpec], Iterator[Problem]]


def _names(spec: JobSpec) -> Iterator[Problem]:
    named = [
        ("name", "the job's name", spec.name),
        ("task.name", "the task's name", spec.task.name),
    ]
    named += [(f"sites.names[{i}]", "a site's name", n) for i, n in enumerate(spec.sites.names)]
    for key, what, name in named:
        try:
            canonical = clean_name(name, what)
        except UsageError as error:
            yield Problem(key=key, found=show(name), allowed=error.message)
            continue
        if canonical != name:
            yield Problem(key=key, found=show(name), allowed=f"its canonical form {canonical!r}")


def _period(spec: JobSpec) -> Iterator[Problem]:
    given = [spec.period.steps is not None, spec.period.epochs is not None]
    if sum(given) != 1:
        yield Problem(
            key="period",
            found="both steps and epochs" if all(given) else "neither steps nor epochs",
            allowed="exactly one of period.steps and period.epochs",
        )


def _stop(spec: JobSpec) -> Iterator[Problem]:
    stop = spec.stop
    trains = 0 not in (spec.period.steps, spec.period.epochs)
    if trains and stop.versions is None and stop.seconds is None and stop.target is None:
        yield Problem(
            key="stop",
            found="no rule",
            allowed="at least one of stop.versions, stop.seconds and stop.target",
        )


def _target(spec: JobSpec) -> Iterator[Problem]:
    stop = spec.stop
    if len(stop.metric) > limits.METRIC_NAME_CHARS_MAX:
        yield Problem(
            key="stop.metric",
            found=f"{len(stop.metric)} characters",
            allowed=f"at most {limits.METRIC_NAME_CHARS_MAX} characters",
        )
    if stop.target is not None and not stop.metric:
        yield Problem(
            key="stop.metric", found="nothing", allowed="the metric that stop.target is about"
        )
    if stop.metric and stop.target is None:
        yield Problem(
            key="stop.target", found="nothing", allowed=f"the value that {stop.metric!r} must reach"
        )
    if stop.target is not None and spec.evaluation.every == 0:
        yield Problem(
            key="evaluation.every",
            found="0 together with stop.target",
            allowed="at least 1: a target can only be met by a version that was evaluated",
        )


def _sites(spec: JobSpec) -> Iterator[Problem]:
    sites = spec.sites
    twice = sorted({name for name in sites.names if sites.names.count(name) > 1})
    if twice:
        yield Problem(
            key="sites.names",
            found=f"{', '.join(map(repr, twice[:5]))} more than once",
            allowed="every name once",
        )
    named = len(set(sites.names))
    if sites.names and named < sites.wanted:
        yield Problem(
            key="sites.wanted",
            found=f"{sites.wanted}, with {named} names in sites.names",
            allowed=f"at most {named}, or more names",
        )
    if sites.names and named < sites.select:
        yield Problem(
            key="sites.select",
            found=f"{sites.select}, with {named} names in sites.names",
            allowed=f"at most {named}, or 0 for all",
        )


def _quorum(spec: JobSpec) -> Iterator[Problem]:
    key = "sites.select" if spec.sites.select else "sites.wanted"
    most = spec.sites.select or spec.sites.wanted
    if spec.pacing.quorum > most:
        yield Problem(
            key="pacing.quorum",
            found=str(spec.pacing.quorum),
            allowed=f"at most {key} = {most}: a round of {most} sites could never close",
        )


def _nesterov(spec: JobSpec) -> Iterator[Problem]:
    optimizer = spec.optimizer
    if optimizer.nesterov and (optimizer.name != "sgd" or optimizer.momentum == 0.0):
        yield Problem(
            key="optimizer.nesterov",
            found=f"true with name {optimizer.name!r} and momentum {optimizer.momentum:g}",
            allowed="true only with name 'sgd' and momentum > 0",
        )


def _scaffold(spec: JobSpec) -> Iterator[Problem]:
    """Option II takes (start - end) / (steps x lr) for the site's mean gradient (Karimireddy et
    al., ICML 2020, equation 4): true for plain SGD alone. Momentum and Adam scale the steps, and a
    proximal pull would be learned as if it were drift.
    """
    if not spec.local.scaffold:
        return
    optimizer = spec.optimizer
    if optimizer.name != "sgd" or optimizer.momentum > 0.0:
        with_ = optimizer.name if optimizer.name != "sgd" else f"momentum {optimizer.momentum:g}"
        yield Problem(
            key="local.scaffold",
            found=f"true with {with_}",
            allowed="true only with optimizer.name = 'sgd' and momentum = 0, because the control "
            "variate takes the update for a mean gradient; for other optimizers use local.prox",
        )
    if spec.local.prox > 0.0:
        yield Problem(
            key="local.prox",
            found=f"{spec.local.prox:g} together with local.scaffold",
            allowed="one of the two: the control variate would learn the proximal pull as drift",
        )


def _fednova(spec: JobSpec) -> Iterator[Problem]:
    """FedNova normalises by the L1 norm of a_k, which exists for SGD, momentum and prox only (Wang
    et al., NeurIPS 2020, section 4).
    """
    if spec.weights.by == "steps" and spec.optimizer.name != "sgd":
        yield Problem(
            key="weights.by",
            found=f"'steps' with optimizer.name = {spec.optimizer.name!r}",
            allowed="'examples' or 'equal' with this optimizer, or optimizer.name = 'sgd': "
            "FedNova's normalisation is not defined for Adam",
        )


RULES: Final[tuple[Rule, ...]] = (
    Rule(("name", "task.name", "sites.names"), _names),
    Rule(("period.steps", "period.epochs"), _period),
    Rule(("stop.versions", "stop.seconds", "stop.target"), _stop),
    Rule(("stop.metric", "stop.target", "evaluation.every"), _target),
    Rule(("sites.names", "sites.wanted", "sites.select"), _sites),
    Rule(("pacing.quorum", "sites.wanted", "sites.select"), _quorum),
    Rule(("optimizer.nesterov", "optimizer.name", "optimizer.momentum"), _nesterov),
    Rule(("local.scaffold", "local.prox", "optimizer.name", "optimizer.momentum"), _scaffold),
    Rule(("weights.by", "optimizer.name"), _fednova),
)


def warnings(spec: JobSpec) -> tuple[str, ...]:
    """What is allowed and probably not meant, in sentences."""
    return tuple(_warnings(spec))


def _warnings(spec: JobSpec) -> Iterator[str]:
    optimizer, server = spec.optimizer, spec.server
    plain_optimizer, plain_server = _DEFAULTS
    if optimizer.name != "sgd" and optimizer.momentum:
        yield f"optimizer.momentum has no effect with {optimizer.name!r}."
    if optimizer.name == "sgd" and optimizer.betas != plain_optimizer.betas:
        yield "optimizer.betas has no effect with 'sgd'."
    if server.optimizer not in ("momentum", "nesterov") and (
        server.momentum != plain_server.momentum
    ):
        yield f"server.momentum has no effect with {server.optimizer!r}."
    if server.optimizer not in ("adam", "yogi") and server.betas != plain_server.betas:
        yield f"server.betas has no effect with {server.optimizer!r}."
    if server.optimizer not in ("adagrad", "adam", "yogi") and server.tau != plain_server.tau:
        yield f"server.tau has no effect with {server.optimizer!r}."
    if spec.weights.by == "equal" and spec.weights.examples_max is not None:
        yield "weights.examples_max has no effect when every site counts the same."
    if spec.stop.target is not None and not spec.evaluation.sites:
        yield "stop.target needs an evaluator, because evaluation.sites is false."
    if spec.evaluation_only and spec.local.scaffold:
        yield "nothing is trained in this job: local.scaffold has no effect."
