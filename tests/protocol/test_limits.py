from protocol import limits
from protocol.layout import ELEMENT_BYTES


def test_every_limit_is_positive_and_says_its_unit():
    bounds = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert all(value > 0 for value in bounds.values())
    unitless = {
        "MIB",
        "TENSORS_MAX",
        "ELEMENTS_MAX",
        "METRICS_MAX",
        "NOTES_MAX",
        "DIMENSIONS_MAX",
        "COUNT_MAX",
    }
    units = ("BYTES", "CHARS", "SECONDS", "EXAMPLES", "STEPS", "DEPTH")
    assert [n for n in bounds if n not in unitless and not any(u in n for u in units)] == []


def test_a_frame_holds_whole_elements_of_every_part():
    """PC-022: no element is cut in two, so a tile can be decoded as it comes."""
    assert all(limits.FRAME_PAYLOAD_BYTES_MAX % width == 0 for width in ELEMENT_BYTES.values())


def test_a_layout_of_the_largest_count_with_ordinary_names_fits_into_metadata():
    line = len('{"name":"model.layers.31.self_attn.q_proj.weight","shape":[4096,4096],')
    line += len('"dtype":"bfloat16","role":"train"},')
    assert limits.TENSORS_MAX * line < limits.META_BYTES_MAX < limits.JSON_BODY_BYTES_MAX


def test_a_lease_outlasts_a_missed_poll_of_progress():
    assert limits.PROGRESS_EVERY_SECONDS * 2 < limits.LEASE_SECONDS
    assert limits.BACKOFF_FIRST_SECONDS < limits.BACKOFF_LAST_SECONDS < limits.LEASE_SECONDS
