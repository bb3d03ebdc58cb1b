"""Numbers that sites report, and how they are combined.

The rule, in full:

- A metric is combined by the reduction that the task declares (`mean` when it says nothing), never
  by a guess from its name. `mean` weighs by the number of examples behind each value.
- Numbers are combined over the sites that have them; `sites` counts those.
- Text stays with its site and is not combined. A missing value (None) is left out.
- NaN and infinity are left out of the combination, flagged in `nonfinite`, and shown at their site.
- A value backed by zero examples is left out ("not available"); so is a sum beyond float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from protocol import limits
from protocol.errors import MalformedError, UsageError

Reduction = Literal["mean", "sum", "min", "max"]


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value of one site. JSON has no NaN or infinity: `nonfinite` carries those, tagged."""

    value: float | str | None = None
    examples: float = 0.0
    reduction: Reduction = "mean"
    nonfinite: Literal["", "nan", "inf", "-inf"] = ""


class Combined(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metric over all sites of a version.

    `worst` is the site with the lowest value, or the highest when the name is in `lower_is_better`
    of the caller; `nonfinite` lists the sites whose value was NaN or infinite.
    """

    value: float | None
    reduction: Reduction = "mean"
    examples: float = 0.0
    sites: int = 0
    of_sites: int = 0
    worst_site: str = ""
    worst_value: float | None = None
    nonfinite: tuple[str, ...] = ()


def metric(value: float | str | None, examples: float, reduction: Reduction = "mean") -> Metric:
    """A `Metric` from a plain Python value; NaN and infinity become tags, text is cut to size."""
    if isinstance(value, str):
        text = value[: limits.METRIC_TEXT_CHARS_MAX]
        return Metric(value=text, examples=examples, reduction=reduction)
    if value is None:
        return Metric(examples=examples, reduction=reduction)
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond float64
        number = math.inf if value > 0 else -math.inf
    if math.isfinite(number):
        return Metric(value=number, examples=examples, reduction=reduction)
    tag: Literal["nan", "inf", "-inf"] = (
        "nan" if math.isnan(number) else ("inf" if number > 0 else "-inf")
    )
    return Metric(examples=examples, reduction=reduction, nonfinite=tag)


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Refuse metrics that are out of bounds.

    Raises:
        MalformedError: too many, a name or text too long, a negative or non-finite number.
        UsageError: a name that is not text; JSON would silently turn the number 0 into "0".
    """
    if len(metrics) > limits.METRICS_MAX:
        raise MalformedError(f"{len(metrics)} metrics; at most {limits.METRICS_MAX} are taken.")
    for name, item in metrics.items():
        if not isinstance(name, str):
            raise UsageError(
                f"metric name {name!r} is {type(name).__name__}; names are text.",
                f"Report it as {str(name)!r}, for example 'class {name}'.",
            )
        if not name or len(name) > limits.METRIC_NAME_CHARS_MAX:
            raise MalformedError(f"metric name {name[:60]!r} is empty or too long.")
        if not (math.isfinite(item.examples) and 0 <= item.examples <= limits.EXAMPLES_MAX):
            raise MalformedError(f"metric {name!r} has the impossible count {item.examples}.")
        value = item.value
        if isinstance(value, str) and len(value) > limits.METRIC_TEXT_CHARS_MAX:
            raise MalformedError(
                f"metric {name!r} has {len(value)} characters of text; at most "
                f"{limits.METRIC_TEXT_CHARS_MAX} are taken."
            )
        if isinstance(value, (int, float)) and not math.isfinite(value):
            raise MalformedError(f"metric {name!r} is {value}, which must travel as a tag.")


def combine(
    per_site: Mapping[str, Mapping[str, Metric]], lower_is_better: frozenset[str] = frozenset()
) -> dict[str, Combined]:
    """Combine site -> name -> metric into name -> combined, by the rule at the top."""
    names = sorted({name for metrics in per_site.values() for name in metrics})
    return {name: _combine_one(name, per_site, name in lower_is_better) for name in names}


def _combine_one(
    name: str, per_site: Mapping[str, Mapping[str, Metric]], lower_is_better: bool
) -> Combined:
    having = {site: metrics[name] for site, metrics in sorted(per_site.items()) if name in metrics}
    nonfinite = tuple(site for site, item in having.items() if item.nonfinite)
    values = {
        site: (float(item.value), item.examples)
        for site, item in having.items()
        if isinstance(item.value, (int, float)) and item.examples > 0 and not item.nonfinite
    }
    reduction = next(iter(having.values())).reduction
    if not values:
        return Combined(
            value=None, reduction=reduction, of_sites=len(per_site), nonfinite=nonfinite
        )
    examples = sum(count for _, count in values.values())
    pick = max if lower_is_better else min
    worst = pick(values, key=lambda site: values[site][0])
    return Combined(
        value=_reduce(reduction, list(values.values())),
        reduction=reduction,
        examples=examples,
        sites=len(values),
        of_sites=len(per_site),
        worst_site=worst,
        worst_value=values[worst][0],
        nonfinite=nonfinite,
    )


def _reduce(reduction: Reduction, values: list[tuple[float, float]]) -> float | None:
    numbers = [number for number, _ in values]
    match reduction:
        case "mean":
            # Shares first: number x count may be infinite where the mean is not.
            examples = math.fsum(count for _, count in values)
            return math.fsum(number * (count / examples) for number, count in values)
        case "sum":
            try:
                return math.fsum(numbers)
            except OverflowError:
                return None
        case "min":
            return min(numbers)
        case "max":
            return max(numbers)
