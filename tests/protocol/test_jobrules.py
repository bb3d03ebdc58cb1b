from typing import Any

import pytest

from protocol.errors import InvalidFileError
from protocol.jobfile import from_mapping, job_type
from protocol.jobrules import RULES, warnings
from protocol.schema import leaves


def job(**sections: Any) -> dict[str, Any]:
    plain = {"name": "n", "task": {"name": "t"}, "period": {"steps": 5}, "stop": {"versions": 3}}
    return plain | sections


@pytest.mark.parametrize(
    "sections",
    [
        {"period": {"steps": 1}},
        {"period": {"epochs": 2}},
        {"period": {"epochs": 0}, "stop": {}},
        {"period": {"steps": 0}, "stop": {}},
        {"stop": {"seconds": 5}},
        {"stop": {"metric": "accuracy", "target": 0.9}},
        {"sites": {"wanted": 2, "names": ["a", "b", "c"], "select": 3}},
        {"sites": {"wanted": 4}, "pacing": {"quorum": 4}},
        {"sites": {"wanted": 4, "select": 2}, "pacing": {"quorum": 2}},
        {"optimizer": {"momentum": 0.9, "nesterov": True}},
        {"local": {"scaffold": True}},
        {"local": {"prox": 0.1}, "optimizer": {"name": "adamw"}},
        {"weights": {"by": "steps"}, "local": {"prox": 0.1}, "optimizer": {"momentum": 0.9}},
        {"weights": {"by": "equal"}, "optimizer": {"name": "adam"}},
        {
            "pacing": {"rule": "async", "periods": "dylu"},
            "server": {"optimizer": "delayed_nesterov", "delay": 3, "momentum": 0.8},
        },
        {
            "pacing": {"rule": "buffered", "buffer": 2, "periods": "dylu"},
            "server": {"optimizer": "delayed_nesterov"},
        },
    ],
)
def test_what_works_is_taken(sections: dict[str, Any]):
    assert warnings(from_mapping(job(**sections))) == ()


@pytest.mark.parametrize(
    ("pacing", "says"),
    [
        ({"staleness": 9}, "pacing.staleness has no effect with rule 'bsp'."),
        ({"deadline_mads": 3.0}, "pacing.deadline_mads has no effect with a fixed deadline."),
        (
            {"rule": "ssp", "unseen_mass": 0.1, "staleness": 9},
            "pacing.staleness has no effect with pacing.unseen_mass, which replaces it.",
        ),
        (
            {"rule": "ssp", "staleness_weight": "hinge"},
            "pacing.staleness_weight has no effect with rule 'ssp'.",
        ),
        (
            {"rule": "async", "staleness_weight": "constant", "staleness_a": 2.0},
            "pacing.staleness_a has no effect with weight 'constant'.",
        ),
        (
            {"rule": "buffered", "buffer": 2, "staleness_b": 2.0},
            "pacing.staleness_b has no effect with weight 'polynomial'.",
        ),
        (
            {"rule": "async", "compensation_lambda": 0.1},
            "pacing.compensation_lambda has no effect with pacing.compensation = 'none'.",
        ),
    ],
)
def test_keys_of_the_pacing_that_have_no_say_are_named(pacing: dict[str, Any], says: str):
    assert warnings(from_mapping(job(pacing=pacing))) == (says,)


def test_uneven_periods_without_fednova_are_warned_about():
    for pacing in ({"periods": "esync"}, {"periods": "dylu"}, {"partial": True}):
        (said,) = warnings(from_mapping(job(pacing=pacing)))
        assert "weights.by = 'steps' (FedNova)" in said
        assert not warnings(from_mapping(job(pacing=pacing, weights={"by": "steps"})))


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"period": {}}, "period", "neither"),
        ({"period": {"steps": 1, "epochs": 1}}, "period", "both"),
        ({"period": {"steps": 0, "epochs": 0}}, "period", "both"),
        ({"stop": {}}, "stop", "at least one"),
        ({"stop": {"target": 0.5}}, "stop.metric", "the metric that"),
        ({"stop": {"versions": 1, "metric": "acc"}}, "stop.target", "'acc' must reach"),
        ({"stop": {"metric": "x" * 129, "target": 1}}, "stop.metric", "at most 128"),
        (
            {"stop": {"metric": "a", "target": 1}, "evaluation": {"every": 0}},
            "evaluation.every",
            "was evaluated",
        ),
        ({"sites": {"names": ["a", "a"]}}, "sites.names", "every name once"),
        ({"sites": {"wanted": 3, "names": ["a", "b"]}}, "sites.wanted", "at most 2"),
        ({"sites": {"select": 3, "names": ["a", "b"]}}, "sites.select", "at most 2"),
        ({"sites": {"names": ["a\nb"]}}, "sites.names[0]", "control character"),
        ({"sites": {"names": [""]}}, "sites.names[0]", "1 to 255"),
        ({"name": "a\x00"}, "name", "control character"),
        ({"task": {"name": "a\x1b"}}, "task.name", "control character"),
        ({"pacing": {"quorum": 2}}, "pacing.quorum", "sites.wanted = 1"),
        (
            {"sites": {"wanted": 9, "select": 3}, "pacing": {"quorum": 4}},
            "pacing.quorum",
            "sites.select = 3",
        ),
        ({"optimizer": {"nesterov": True}}, "optimizer.nesterov", "momentum > 0"),
        (
            {"optimizer": {"nesterov": True, "momentum": 0.9, "name": "adam"}},
            "optimizer.nesterov",
            "'sgd'",
        ),
        (
            {"local": {"scaffold": True}, "optimizer": {"name": "adam"}},
            "local.scaffold",
            "use local.prox",
        ),
        (
            {"local": {"scaffold": True}, "optimizer": {"momentum": 0.9}},
            "local.scaffold",
            "momentum = 0",
        ),
        ({"local": {"scaffold": True, "prox": 0.1}}, "local.prox", "as drift"),
        (
            {"weights": {"by": "steps"}, "optimizer": {"name": "adamw"}},
            "weights.by",
            "'examples' or 'equal'",
        ),
        (
            {"pacing": {"rule": "ssp"}, "server": {"optimizer": "nesterov"}},
            "server.optimizer",
            "pacing.rule = 'buffered'",
        ),
        (
            {"pacing": {"rule": "ssp"}, "server": {"optimizer": "delayed_nesterov"}},
            "server.optimizer",
            "'average': server momentum",
        ),
        (
            {"pacing": {"rule": "async"}, "server": {"optimizer": "nesterov"}},
            "server.optimizer",
            "'average' or 'delayed_nesterov'",
        ),
        ({"server": {"optimizer": "delayed_nesterov"}}, "server.optimizer", "'nesterov'"),
        (
            {"pacing": {"rule": "ssp", "compensation": "constant"}},
            "pacing.compensation",
            "pacing.rule = 'async' or 'buffered'",
        ),
        (
            {
                "pacing": {"rule": "async", "compensation": "adaptive"},
                "optimizer": {"name": "adamw"},
            },
            "pacing.compensation",
            "use pacing.staleness_weight",
        ),
        (
            {
                "pacing": {"rule": "async", "compensation": "adaptive"},
                "optimizer": {"momentum": 0.9},
            },
            "pacing.compensation",
            "momentum = 0",
        ),
        (
            {"pacing": {"rule": "async"}, "local": {"scaffold": True}},
            "local.scaffold",
            "pacing.rule = 'bsp'",
        ),
        (
            {"pacing": {"rule": "async"}, "weights": {"by": "steps"}},
            "weights.by",
            "'examples' or 'equal'",
        ),
        (
            {"pacing": {"rule": "ssp"}, "sites": {"wanted": 3, "select": 2}},
            "sites.select",
            "pacing.concurrency",
        ),
        ({"pacing": {"reads": "pinned"}}, "pacing.reads", "pacing.rule = 'ssp'"),
        ({"pacing": {"rule": "async", "unseen_mass": 0.1}}, "pacing.unseen_mass", "'ssp'"),
        (
            {"pacing": {"rule": "ssp", "unseen_mass": 0.1, "reads": "pinned"}},
            "pacing.reads",
            "'eager'",
        ),
        (
            {"pacing": {"rule": "ssp", "first": 2}, "sites": {"wanted": 3}},
            "pacing.first",
            "no rounds",
        ),
        ({"pacing": {"rule": "ssp", "partial": True}}, "pacing.partial", "no rounds"),
        ({"pacing": {"first": 5}, "sites": {"wanted": 3}}, "pacing.first", "at most"),
        ({"pacing": {"first": 1, "quorum": 2}, "sites": {"wanted": 3}}, "pacing.quorum", "at most"),
        ({"sites": {"over_select": 0.5}}, "sites.over_select", "sites.select"),
        ({"pacing": {"late": "fold"}, "local": {"scaffold": True}}, "pacing.late", "'drop'"),
        ({"pacing": {"steps_max": 9}}, "pacing.steps_max", "'esync'"),
        (
            {"pacing": {"rule": "ssp", "reads": "pinned", "staleness": 65}},
            "pacing.staleness",
            "at most 64",
        ),
        (
            {"pacing": {"periods": "esync"}, "period": {"epochs": 1}},
            "pacing.periods",
            "a period in steps",
        ),
        ({"pacing": {"periods": "esync", "partial": True}}, "pacing.partial", "one of the two"),
        ({"pacing": {"periods": "esync", "steps_max": 4}}, "pacing.steps_max", "at least 5"),
        ({"pacing": {"periods": "dylu", "steps_max": 9}}, "pacing.steps_max", "under 'dylu'"),
        ({"pacing": {"rule": "buffered"}}, "pacing.buffer", "at least 1"),
        ({"pacing": {"rule": "ssp", "buffer": 3}}, "pacing.buffer", "'buffered'"),
        ({"pacing": {"concurrency": 3}}, "pacing.concurrency", "'buffered'"),
        (
            {
                "pacing": {"rule": "buffered", "buffer": 4, "one_per_site": True},
                "sites": {"wanted": 3},
            },
            "pacing.buffer",
            "could never fill",
        ),
        (
            {"pacing": {"rule": "buffered", "buffer": 2, "quorum": 3}},
            "pacing.quorum",
            "at most 2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_use(
    sections: dict[str, Any], key: str, says: str
):
    with pytest.raises(InvalidFileError) as caught:
        from_mapping(job(**sections))
    (problem,) = caught.value.problems
    assert problem.key == key
    assert says in f"{problem.found} {problem.allowed}"


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"optimizer": {"name": "adam", "momentum": 0.9}}, "optimizer.momentum"),
        ({"optimizer": {"betas": [0.5, 0.5]}}, "optimizer.betas"),
        ({"server": {"momentum": 0.5}}, "server.momentum"),
        ({"server": {"delay": 7}}, "server.delay has no effect with 'average'"),
        (
            {"pacing": {"rule": "async"}, "server": {"optimizer": "delayed_nesterov"}},
            "pacing.periods = 'dylu'",
        ),
        (
            {"pacing": {"rule": "async", "compensation": "adaptive"}},
            "an `optimizer` method of its own",
        ),
        ({"server": {"betas": [0.5, 0.5], "optimizer": "momentum"}}, "server.betas"),
        ({"server": {"tau": 0.5}}, "server.tau"),
        ({"weights": {"by": "equal", "examples_max": 5}}, "weights.examples_max"),
        (
            {"stop": {"metric": "a", "target": 1}, "evaluation": {"sites": False}},
            "needs an evaluator",
        ),
        ({"period": {"steps": 0}, "local": {"scaffold": True}}, "nothing is trained"),
        (
            {"pacing": {"rule": "ssp"}, "stop": {"metric": "a", "target": 1}},
            "no two sites report",
        ),
        ({"pacing": {"rule": "async", "quorum": 1}}, "pacing.quorum has no effect"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(sections: dict[str, Any], says: str):
    (warning,) = warnings(from_mapping(job(**sections)))
    assert says in warning


def test_every_rule_looks_at_keys_that_exist():
    known = {key for key, _ in leaves(job_type())}
    assert {key for rule in RULES for key in rule.keys} <= known
