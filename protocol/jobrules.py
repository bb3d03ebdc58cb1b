"""The rules between the fields of a job, and what is worth a warning.

A combination of switches either works, with its guarantee stated, or is refused here with a
sentence that says why and what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from protocol import limits
from protocol.errors import Problem, UsageError
from protocol.jobspec import JobSpec, Optimizer, Pacing, Server
from protocol.names import clean_name
from protocol.schema import show

PINNED_STALENESS_MAX: Final = 64  # versions that pinned reads may keep on the disk

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
    if spec.pacing.rule == "bsp" and spec.pacing.quorum > most:
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


def _streaming(spec: JobSpec) -> Iterator[Problem]:
    """Rules without rounds: what needs a cohort that stands for everybody cannot be had."""
    rule = spec.pacing.rule
    if rule == "bsp":
        if spec.server.optimizer == "delayed_nesterov":
            yield Problem(
                key="server.optimizer",
                found="'delayed_nesterov' with pacing.rule = 'bsp'",
                allowed="'nesterov': a round is a whole cohort, nothing is to be waited for; or "
                "pacing.rule = 'async' or 'buffered'",
            )
        return
    instead = "pacing.rule = 'bsp', where one step is one cohort"
    works = {"ssp": ("average",), "async": ("average", "delayed_nesterov")}
    if rule in works and spec.server.optimizer not in works[rule]:
        yield Problem(
            key="server.optimizer",
            found=f"{spec.server.optimizer!r} with pacing.rule = {rule!r}",
            allowed=f"{' or '.join(map(repr, works[rule]))}: server momentum is unsafe when every "
            f"update is a step of its own; or pacing.rule = 'buffered', or {instead}",
        )
    if spec.local.scaffold:
        yield Problem(
            key="local.scaffold",
            found=f"true with pacing.rule = {rule!r}",
            allowed=f"false: the server's control variate is a mean over one cohort; or {instead}",
        )
    if spec.weights.by == "steps":
        yield Problem(
            key="weights.by",
            found=f"'steps' with pacing.rule = {rule!r}",
            allowed=f"'examples' or 'equal': FedNova normalises within one cohort; or {instead}",
        )
    if spec.sites.select:
        yield Problem(
            key="sites.select",
            found=f"{spec.sites.select} with pacing.rule = {rule!r}",
            allowed="0: every site takes part; pacing.concurrency of 'buffered' bounds how many "
            f"are at work, or {instead}",
        )


def _rounds(spec: JobSpec) -> Iterator[Problem]:
    """What is about rounds has a meaning only where there are rounds."""
    pacing, sites = spec.pacing, spec.sites
    plain = Pacing()
    if pacing.rule != "bsp":
        for key in ("first", "deadline", "late", "partial"):
            if getattr(pacing, key) != getattr(plain, key):
                yield Problem(
                    key=f"pacing.{key}",
                    found=f"{show(getattr(pacing, key))} with pacing.rule = {pacing.rule!r}",
                    allowed="only with pacing.rule = 'bsp': the other rules have no rounds",
                )
    if sites.over_select and not sites.select:
        yield Problem(
            key="sites.over_select",
            found=f"{sites.over_select:g} without sites.select",
            allowed="0, or sites.select: how many updates close the round",
        )
    most = sites.select or sites.wanted
    if pacing.first and pacing.first > most:
        key = "sites.select" if sites.select else "sites.wanted"
        yield Problem(
            key="pacing.first",
            found=str(pacing.first),
            allowed=f"at most {key} = {most}",
        )
    if pacing.first and pacing.quorum > pacing.first:
        yield Problem(
            key="pacing.quorum",
            found=f"{pacing.quorum}, pacing.first = {pacing.first}",
            allowed=f"at most {pacing.first}: a round closes with so many",
        )
    if pacing.late != "drop" and spec.local.scaffold:
        yield Problem(
            key="pacing.late",
            found=f"{pacing.late!r} with local.scaffold",
            allowed="'drop': a late control variate belongs to another server state",
        )


def _sized(spec: JobSpec) -> Iterator[Problem]:
    """Periods that are sized by measured speed: in steps, and none that the rule has to undo."""
    pacing, steps = spec.pacing, spec.period.steps
    if pacing.periods == "equal":
        if pacing.steps_max:
            yield Problem(
                key="pacing.steps_max",
                found=f"{pacing.steps_max} with pacing.periods = 'equal'",
                allowed="0, or pacing.periods = 'esync': with equal periods nobody takes more",
            )
        return
    if not steps:
        yield Problem(
            key="pacing.periods",
            found=f"{pacing.periods!r} without period.steps",
            allowed="'equal', or a period in steps: passes over the data cannot be sized",
        )
    if pacing.partial:
        yield Problem(
            key="pacing.partial",
            found=f"true together with pacing.periods = {pacing.periods!r}",
            allowed="one of the two: both fit a period to the time that a site has",
        )
    if pacing.periods == "dylu" and pacing.steps_max:
        yield Problem(
            key="pacing.steps_max",
            found=f"{pacing.steps_max} with pacing.periods = 'dylu'",
            allowed="0: under 'dylu' nobody takes more than period.steps",
        )
    elif steps and 0 < pacing.steps_max < steps:
        yield Problem(
            key="pacing.steps_max",
            found=f"{pacing.steps_max}, period.steps = {steps}",
            allowed=f"at least {steps}: so many the slowest site takes",
        )


def _ssp(spec: JobSpec) -> Iterator[Problem]:
    pacing = spec.pacing
    if pacing.reads == "pinned" and pacing.rule != "ssp":
        yield Problem(
            key="pacing.reads",
            found=f"'pinned' with pacing.rule = {pacing.rule!r}",
            allowed="'pinned' only with pacing.rule = 'ssp': it names the oldest version that "
            "ssp's bound allows",
        )
    if pacing.reads == "pinned" and pacing.staleness > PINNED_STALENESS_MAX:
        yield Problem(
            key="pacing.staleness",
            found=f"{pacing.staleness} with pacing.reads = 'pinned'",
            allowed=f"at most {PINNED_STALENESS_MAX}: for every clock of it a version is kept as a "
            "file; or pacing.reads = 'eager'",
        )
    if pacing.unseen_mass and pacing.rule != "ssp":
        yield Problem(
            key="pacing.unseen_mass",
            found=f"{pacing.unseen_mass:g} with pacing.rule = {pacing.rule!r}",
            allowed="0, or pacing.rule = 'ssp', whose bound it replaces",
        )
    if pacing.unseen_mass and pacing.reads == "pinned":
        yield Problem(
            key="pacing.reads",
            found="'pinned' together with pacing.unseen_mass",
            allowed="'eager': a pinned read is defined by clocks, which unseen_mass does not bound",
        )


def _compensation(spec: JobSpec) -> Iterator[Problem]:
    """DC-ASGD takes an update for a sum of gradients, which it is for plain SGD alone (Zheng et
    al., ICML 2017).
    """
    pacing, optimizer = spec.pacing, spec.optimizer
    if pacing.compensation == "none":
        return
    if pacing.rule not in ("async", "buffered"):
        yield Problem(
            key="pacing.compensation",
            found=f"{pacing.compensation!r} with pacing.rule = {pacing.rule!r}",
            allowed="'none', or pacing.rule = 'async' or 'buffered': the other rules bound how old "
            "an update is",
        )
    if optimizer.name != "sgd" or optimizer.momentum > 0.0:
        with_ = optimizer.name if optimizer.name != "sgd" else f"momentum {optimizer.momentum:g}"
        yield Problem(
            key="pacing.compensation",
            found=f"{pacing.compensation!r} with {with_}",
            allowed="'none', or optimizer.name = 'sgd' and momentum = 0: it takes the update for a "
            "sum of gradients; with other optimizers use pacing.staleness_weight",
        )


def _buffered(spec: JobSpec) -> Iterator[Problem]:
    pacing = spec.pacing
    if pacing.rule == "buffered" and not pacing.buffer:
        yield Problem(
            key="pacing.buffer",
            found="0",
            allowed="at least 1: how many updates make a version under pacing.rule = 'buffered'",
        )
    if pacing.rule != "buffered":
        for key in ("buffer", "concurrency", "one_per_site"):
            if getattr(pacing, key):
                yield Problem(
                    key=f"pacing.{key}",
                    found=f"{show(getattr(pacing, key))} with pacing.rule = {pacing.rule!r}",
                    allowed="only with pacing.rule = 'buffered'",
                )
    elif pacing.one_per_site and pacing.buffer > spec.sites.wanted:
        yield Problem(
            key="pacing.buffer",
            found=f"{pacing.buffer}, one update per site, sites.wanted = {spec.sites.wanted}",
            allowed=f"at most {spec.sites.wanted}: such a buffer could never fill",
        )
    if pacing.rule == "buffered" and pacing.quorum > pacing.buffer:
        yield Problem(
            key="pacing.quorum",
            found=f"{pacing.quorum}, pacing.buffer = {pacing.buffer}",
            allowed=f"at most {pacing.buffer}",
        )


RULES: Final[tuple[Rule, ...]] = (
    Rule(("name", "task.name", "sites.names"), _names),
    Rule(("period.steps", "period.epochs"), _period),
    Rule(("stop.versions", "stop.seconds", "stop.target"), _stop),
    Rule(("stop.metric", "stop.target", "evaluation.every"), _target),
    Rule(("sites.names", "sites.wanted", "sites.select"), _sites),
    Rule(("pacing.quorum", "pacing.rule", "sites.wanted", "sites.select"), _quorum),
    Rule(
        ("pacing.rule", "server.optimizer", "local.scaffold", "weights.by", "sites.select"),
        _streaming,
    ),
    Rule(
        ("pacing.rule", "pacing.first", "pacing.quorum", "sites.select", "sites.over_select"),
        _rounds,
    ),
    Rule(("period.steps", "pacing.periods", "pacing.steps_max", "pacing.partial"), _sized),
    Rule(("pacing.rule", "pacing.reads", "pacing.unseen_mass"), _ssp),
    Rule(("pacing.rule", "pacing.buffer", "pacing.quorum", "sites.wanted"), _buffered),
    Rule(
        ("pacing.compensation", "pacing.rule", "optimizer.name", "optimizer.momentum"),
        _compensation,
    ),
    Rule(("optimizer.nesterov", "optimizer.name", "optimizer.momentum"), _nesterov),
    Rule(("local.scaffold", "local.prox", "optimizer.name", "optimizer.momentum"), _scaffold),
    Rule(("weights.by", "optimizer.name"), _fednova),
)


def _unused(pacing: Pacing) -> Iterator[str]:
    """Keys of the pacing that were set and have no say under its rule."""
    plain, rule = Pacing(), pacing.rule
    weighs = rule in ("async", "buffered")
    by = pacing.staleness_weight
    heard = {
        "deadline_mads": pacing.deadline == "measured",
        "staleness": rule == "async" or (rule == "ssp" and not pacing.unseen_mass),
        "staleness_weight": weighs,
        "staleness_a": weighs and by != "constant",
        "staleness_b": weighs and by == "hinge",
        "compensation_lambda": pacing.compensation != "none",
    }
    why = {
        "deadline_mads": "a fixed deadline",
        "staleness": f"rule {rule!r}",
        "compensation_lambda": "pacing.compensation = 'none'",
    }
    if pacing.unseen_mass:
        why["staleness"] = "pacing.unseen_mass, which replaces it"
    for key, used in heard.items():
        if not used and getattr(pacing, key) != getattr(plain, key):
            where = why.get(key, f"weight {by!r}" if weighs else f"rule {rule!r}")
            yield f"pacing.{key} has no effect with {where}."


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
    if server.optimizer not in ("momentum", "nesterov", "delayed_nesterov") and (
        server.momentum != plain_server.momentum
    ):
        yield f"server.momentum has no effect with {server.optimizer!r}."
    if server.optimizer != "delayed_nesterov" and server.delay != plain_server.delay:
        yield f"server.delay has no effect with {server.optimizer!r}."
    if server.optimizer == "delayed_nesterov" and spec.pacing.periods != "dylu":
        yield (
            "delayed_nesterov counts versions, so sites that are slower get old: pacing.periods = "
            "'dylu' sizes periods by speed, so that all updates are about equally old."
        )
    if spec.pacing.compensation != "none":
        yield (
            "pacing.compensation is right only for plain SGD: a task with an `optimizer` method of "
            "its own must use that."
        )
    if server.optimizer not in ("adam", "yogi") and server.betas != plain_server.betas:
        yield f"server.betas has no effect with {server.optimizer!r}."
    if server.optimizer not in ("adagrad", "adam", "yogi") and server.tau != plain_server.tau:
        yield f"server.tau has no effect with {server.optimizer!r}."
    yield from _unused(spec.pacing)
    rule = spec.pacing.rule
    uneven = "partial" if spec.pacing.partial else "periods"
    if (spec.pacing.partial or spec.pacing.periods != "equal") and (
        rule == "bsp" and optimizer.name == "sgd" and spec.weights.by != "steps"
    ):
        yield (
            f"with pacing.{uneven} = {show(getattr(spec.pacing, uneven))} sites take different "
            "numbers of steps, and those that take more pull the model further: weights.by = "
            "'steps' (FedNova) evens that out."
        )
    if rule in ("ssp", "async") and spec.stop.target is not None:
        yield f"stop.target needs an evaluator under {rule!r}: no two sites report on one version."
    if rule in ("ssp", "async") and spec.pacing.quorum:
        yield f"pacing.quorum has no effect under {rule!r}: every update makes a version."
    if spec.weights.by == "equal" and spec.weights.examples_max is not None:
        yield "weights.examples_max has no effect when every site counts the same."
    if spec.stop.target is not None and not spec.evaluation.sites:
        yield "stop.target needs an evaluator, because evaluation.sites is false."
    if spec.evaluation_only and spec.local.scaffold:
        yield "nothing is trained in this job: local.scaffold has no effect."
