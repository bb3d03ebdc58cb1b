"""Measured and assumed figures of wide-area links between regions, as data.

`A`  ten AWS regions, round trips and bandwidth between pairs as measured for decentralised training
     (Yuan et al., NeurIPS 2022)
`B`  ten EC2 regions of 2017, round trips only; bandwidth is not limited
`C`  scarce: round trips of B; near, middling and far pairs have 250, 70 and 17 Mb/s, in the way of
     Gaia (Hsieh et al., NSDI 2017): 15 times less than a local network on average, 60 times less at
     the far end
`D`  edge boxes, without regions: 20 Mb/s down, 5 up, 60 ms, 0.5 % loss, 10 % of the time offline
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from simulation.wan import LinkSpec

Profile = Literal["", "A", "B", "C", "D"]
PROFILES: Final[tuple[Profile, ...]] = get_args(Profile)

LOCAL: Final = LinkSpec(up_mbps=1000.0, down_mbps=1000.0, rtt_ms=1.0)
EDGE: Final = LinkSpec(up_mbps=5.0, down_mbps=20.0, rtt_ms=60.0, rtt_spread_ms=20.0, loss=0.005)
EDGE_OFFLINE_SHARE: Final = 0.1
JITTER: Final = 0.1  # of bandwidth, in A to C

REGIONS: Final = {
    "A": (
        "oregon", "virginia", "ohio", "tokyo", "seoul", "singapore", "sydney", "london",
        "frankfurt", "ireland",
    ),
    "B": (
        "virginia", "california", "oregon", "ireland", "frankfurt", "tokyo", "seoul", "singapore",
        "sydney", "saopaulo",
    ),
}  # fmt: skip

# Row by row below the diagonal: milliseconds of a round trip / Gb/s, to the regions before it.
_A: Final = """
67/.79
49/1.10 11/1.12
96/.523 143/.524 130/.694
124/.46 172/.50 159/.529 34/1.10
163/.341 230/.364 197/.452 73/1.01 74/1.14
139/.36 197/.383 185/.484 100/.761 148/.58 92/.816
136/.42 76/1.16 86/1.05 210/.366 238/.342 169/.50 262/.326
143/.404 90/1.02 99/.799 223/.36 235/.358 155/.535 265/.328 14/1.14
124/.482 67/1.05 77/1.14 199/.465 228/.335 179/.492 254/.344 12/1.09 24/1.08
"""

_B_MS: Final = {
    "virginia": {
        "california": 72, "oregon": 87, "ireland": 81, "frankfurt": 89, "tokyo": 145, "seoul": 178,
        "singapore": 217, "sydney": 230, "saopaulo": 120,
    },
    "oregon": {"tokyo": 89, "singapore": 161, "sydney": 162, "saopaulo": 183},
    "ireland": {
        "frankfurt": 20, "tokyo": 212, "singapore": 239, "sydney": 310, "saopaulo": 191,
    },
    "frankfurt": {"singapore": 326},
    "tokyo": {"seoul": 31, "singapore": 74, "sydney": 104, "saopaulo": 257},
    "seoul": {"saopaulo": 286},
    "singapore": {"sydney": 175, "saopaulo": 328},
    "sydney": {"saopaulo": 323},
}  # fmt: skip
_MUMBAI_MS: Final = {"singapore": 60, "frankfurt": 115, "virginia": 190}  # an assumption, in C

NEAR_MS_MAX: Final = 110.0
FAR_MS_MIN: Final = 280.0
NEAR_MBPS: Final = 250.0
MIDDLE_MBPS: Final = 70.0
FAR_MBPS: Final = 17.0


def regions(profile: Profile) -> tuple[str, ...]:
    """The regions of a profile; D and none have none."""
    if profile == "C":
        return (*REGIONS["B"], "mumbai")
    return REGIONS.get(profile, ())


def between(profile: Profile, here: str, there: str) -> LinkSpec | None:
    """The link between two regions; None when the profile has no figures for the pair."""
    if profile == "":
        return LinkSpec()
    if profile == "D":
        return EDGE
    if here == there:
        return LOCAL
    if profile == "A":
        found = _TABLE_A.get(frozenset((here, there)))
        return found and LinkSpec(
            up_mbps=1000.0 * found[1], down_mbps=1000.0 * found[1], rtt_ms=found[0], jitter=JITTER
        )
    rtt = _rtt(profile, here, there)
    if rtt is None:
        return None
    mbps = _scarce_mbps(rtt) if profile == "C" else 0.0
    return LinkSpec(up_mbps=mbps, down_mbps=mbps, rtt_ms=rtt, jitter=JITTER)


def known_from(profile: Profile, here: str) -> tuple[str, ...]:
    """The regions that a profile has figures for, seen from one of them."""
    return tuple(one for one in regions(profile) if between(profile, here, one) is not None)


def _rtt(profile: Profile, here: str, there: str) -> float | None:
    for one, other in ((here, there), (there, here)):
        if profile == "C" and one == "mumbai":
            return _MUMBAI_MS.get(other)
        if (found := _B_MS.get(one, {}).get(other)) is not None:
            return found
    return None


def _scarce_mbps(rtt_ms: float) -> float:
    if rtt_ms <= NEAR_MS_MAX:
        return NEAR_MBPS
    return FAR_MBPS if rtt_ms >= FAR_MS_MIN else MIDDLE_MBPS


def _table_a() -> dict[frozenset[str], tuple[float, float]]:
    table: dict[frozenset[str], tuple[float, float]] = {}
    for row, line in enumerate(_A.split("\n")[1:-1], start=1):
        for column, cell in enumerate(line.split()):
            rtt, gbps = cell.split("/")
            table[frozenset((REGIONS["A"][row], REGIONS["A"][column]))] = (float(rtt), float(gbps))
    return table


_TABLE_A: Final = _table_a()
