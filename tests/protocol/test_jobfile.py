import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import InvalidFileError, LimitError
from protocol.jobfile import examine, from_mapping, job_type, parse, validate
from protocol.jobspec import JobSpec, Optimizer, Period, Stop, TaskRef
from protocol.schema import leaves

SMALLEST = """
name = "digits"
[task]
name = "digits"
[period]
steps = 20
[stop]
versions = 50
"""


def keys(text: str) -> list[str]:
    with pytest.raises(InvalidFileError) as caught:
        parse(text, where="job.toml")
    return [problem.key for problem in caught.value.problems]


def test_the_smallest_job_is_read_with_every_default():
    assert parse(SMALLEST, where="job.toml") == JobSpec(
        name="digits",
        task=TaskRef(name="digits"),
        period=Period(steps=20),
        stop=Stop(versions=50),
    )


def test_every_problem_stands_in_one_answer():
    text = """
seeds = 3
lr = 0.1
durability = "powr"
[task]
nmae = "x"
[sites]
wanted = true
names = ["a", "a"]
[period]
steps = 5
epochs = 1
[optimizer]
name = "adam"
lr = nan
nesterov = true
[local]
scaffold = true
[stop]
target = 0.5
[evaluation]
every = 0
[pacing]
deadline_seconds = 0
"""
    assert keys(text) == [
        "seeds", "lr", "name", "task.nmae", "task.name", "durability", "sites.wanted",
        "optimizer.lr", "pacing.deadline_seconds",
        "period", "stop.metric", "evaluation.every", "optimizer.nesterov", "local.scaffold",
    ]  # fmt: skip


def test_the_error_names_the_file_and_counts_its_problems():
    with pytest.raises(InvalidFileError, match=r"^jobs/x.toml has 1 problem:") as caught:
        parse(SMALLEST.replace("steps", "stepz"), where="jobs/x.toml")
    assert "did you mean period.steps?" in str(caught.value)
    assert "docs/job.md" in caught.value.hint


def test_a_misspelt_key_is_not_reported_as_missing_too():
    assert keys(SMALLEST.replace("versions", "version")) == ["stop.version"]
    assert keys(SMALLEST.replace("steps = 20", "step = 20")) == ["period.step"]


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("name = ", "end of document", "Invalid value"),
        ("a = 1\nb = [1,\n]]", "line 3", "Expected"),
        ("a = 1\na = 2", "end of document", "Cannot overwrite"),
        ("a = " + "[" * 5000, "(the whole file)", "nested too deeply"),
        ("a = " + "1" * 6000, "(the whole file)", "thousands of digits"),
        ("a = '\\ud800", "end of document", "Expected"),
        ("\x00", "line 1", "Invalid"),
    ],
)
def test_broken_toml_is_one_problem_with_its_line(text: str, key: str, says: str):
    with pytest.raises(InvalidFileError) as caught:
        parse(text, where="job.toml")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert says in problem.found


def test_a_file_above_the_limit_is_refused_unread():
    filler = "#" * limits.JOB_FILE_BYTES_MAX
    with pytest.raises(LimitError, match=str(limits.JOB_FILE_BYTES_MAX)):
        parse(SMALLEST + filler, where="job.toml")
    room = limits.JOB_FILE_BYTES_MAX - len(SMALLEST)
    assert parse(SMALLEST + filler[:room], where="job.toml").name == "digits"


def test_names_are_brought_into_their_canonical_form():
    text = SMALLEST.replace('"digits"', '" Zu\u0308rich "') + '[sites]\nnames = ["Zu\u0308rich"]'
    spec = parse(text, where="job.toml")
    assert (spec.name, spec.task.name, spec.sites.names) == ("Zürich", "Zürich", ("Zürich",))
    assert validate(spec) == ((), ())


def test_names_that_differ_in_spelling_alone_are_one_name():
    text = SMALLEST + '[sites]\nwanted = 2\nnames = ["Z\u00fcrich", "Zu\u0308rich"]'
    assert keys(text) == ["sites.names", "sites.wanted"]


def test_a_value_that_came_as_json_is_checked_by_the_same_rules():
    spec = JobSpec(
        name=" x",
        task=TaskRef(name="t"),
        seed=-1,
        optimizer=Optimizer(lr=float("inf")),
        period=Period(steps=1),
    )
    problems, warnings = validate(spec)
    assert [problem.key for problem in problems] == ["seed", "optimizer.lr", "name", "stop"]
    assert warnings == ()


def test_plain_values_are_read_like_a_file():
    spec = from_mapping({"name": "a", "task": {"name": "t"}, "period": {"epochs": 0}})
    assert spec.evaluation_only
    with pytest.raises(InvalidFileError, match="the job has 4 problems"):
        from_mapping({})


@pytest.mark.parametrize("key", [key for key, _ in leaves(job_type())])
def test_every_key_refuses_a_table_and_a_date(key: str):
    section, _, name = key.rpartition(".")
    head = f"[{section}]\n" if section else ""
    for value in ("{ x = { y = [] } }", "2026-01-01"):
        problems = keys(f"{head}{name} = {value}")
        assert any(problem.startswith(key) for problem in problems)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = sorted(key for key, _ in leaves(job_type()))


@given(st.dictionaries(st.sampled_from(KEYS), anything, max_size=6))
def test_random_values_give_a_good_job_or_problems(values: dict[str, object]):
    data: dict[str, object] = {
        "name": "n",
        "task": {"name": "t"},
        "period": {"steps": 1},
        "stop": {"versions": 1},
    }
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        inner = data.setdefault(section, {}) if section else data
        assert isinstance(inner, dict)
        inner[name] = value
    spec, problems = examine(data)
    if not problems:
        assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec
        assert validate(spec)[0] == ()


@given(st.text(max_size=200))
def test_random_text_is_refused_with_problems(text: str):
    with pytest.raises(InvalidFileError) as caught:
        parse(text, where="job.toml")
    assert caught.value.problems
