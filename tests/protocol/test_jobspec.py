import msgspec
import pytest

from protocol.jobfile import job_type
from protocol.jobspec import JobSpec, Period, Server, TaskRef
from protocol.schema import default, describe, leaves, plain

PLAIN = JobSpec(name="n", task=TaskRef(name="t"))


@pytest.mark.parametrize(("key", "field"), list(leaves(job_type())))
def test_every_field_has_words_for_its_bounds_and_a_sentence(
    key: str, field: msgspec.inspect.Field
):
    assert describe(field.type)
    kind = field.type
    assert isinstance(kind, msgspec.inspect.Metadata), key
    assert kind.extra_json_schema is not None
    assert kind.extra_json_schema["description"].rstrip().endswith(".")
    assert field.required or default(field) is not None or "NoneType" in str(plain(kind))


def test_a_job_survives_json():
    assert msgspec.json.decode(msgspec.json.encode(PLAIN), type=JobSpec) == PLAIN


def test_the_largest_seed_is_63_bits():
    raw = msgspec.json.encode(msgspec.structs.replace(PLAIN, seed=2**63 - 1))
    assert msgspec.json.decode(raw, type=JobSpec).seed == 2**63 - 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            raw.replace(b"9223372036854775807", b"9223372036854775808"), type=JobSpec
        )


@pytest.mark.parametrize(
    ("optimizer", "lr"),
    [
        ("average", 1.0),
        ("momentum", 1.0),
        ("nesterov", 0.7),
        ("adagrad", 0.1),
        ("adam", 0.1),
        ("yogi", 0.1),
    ],
)
def test_the_server_learning_rate_has_a_default_per_optimizer(optimizer: str, lr: float):
    server = msgspec.convert({"optimizer": optimizer}, Server)
    assert msgspec.structs.replace(PLAIN, server=server).server_lr == lr
    fixed = msgspec.structs.replace(server, lr=0.3)
    assert msgspec.structs.replace(PLAIN, server=fixed).server_lr == 0.3


@pytest.mark.parametrize(
    ("period", "only"),
    [
        (Period(epochs=0), True),
        (Period(steps=0), True),
        (Period(steps=1), False),
        (Period(epochs=1), False),
    ],
)
def test_zero_steps_or_epochs_train_nothing(period: Period, only: bool):
    assert msgspec.structs.replace(PLAIN, period=period).evaluation_only is only
