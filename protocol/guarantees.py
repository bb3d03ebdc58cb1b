"""What a job's pacing promises, and under which condition: for `validate` and for people."""

from __future__ import annotations

from protocol.jobspec import JobSpec


def guarantees(spec: JobSpec) -> tuple[str, ...]:
    """Sentences that hold for this job as it stands. Updates are sent dense, so none of them has
    to be weakened by what a filter holds back.
    """
    return {"bsp": _bsp, "ssp": _ssp, "async": _async, "buffered": _buffered}[spec.pacing.rule](
        spec
    )


def _bsp(spec: JobSpec) -> tuple[str, ...]:
    pacing, sites = spec.pacing, spec.sites
    most = pacing.first or (sites.select if sites.over_select else 0)
    found = ["every update of a version started from the version before it"]
    if pacing.late == "fold":
        found = [
            (
                "every update of a version started from the version before it, or came late from "
                "an earlier round, and then its staleness is in the journal"
            )
        ]
    if pacing.partial:
        found.append(
            "how many steps a site did depends on its clock: runs do not repeat bit for bit"
        )
    else:
        found.append("the same seed and the same sites in each round give the same bits")
    if most:
        found.append(
            f"a round closes with the first {most} updates: which ones depends on time, and a site "
            "that is always slower is left out, as `skerry job show` tells by its share of the data"
        )
    late = {
        "drop": "an update that comes after its round closed is lost",
        "return": "an update that comes after its round closed stays in its site's residual and is "
        "in its next update",
        "fold": "an update that comes after its round closed counts in the next version",
    }
    found.append(late[pacing.late])
    return tuple(found)


def _ssp(spec: JobSpec) -> tuple[str, ...]:
    pacing = spec.pacing
    dead = "a site that dies stops holding the others back when its lease ends"
    late = f"a period that is not in after {pacing.deadline_seconds:g} s is given up"
    if pacing.unseen_mass:
        return (
            (
                "a site goes on only if no site at work would have more unseen than "
                f"{pacing.unseen_mass:g} of the model's norm: the sum of the norms of what was "
                "made, waits, and is under way since it started, without its own"
            ),
            (
                "what is under way is taken to weigh what its site's last update did: that part is "
                "a forecast, all others are exact"
            ),
            dead,
            late,
        )
    s = pacing.staleness
    reads = (
        "reads are pinned to the oldest version for which that is true"
        if pacing.reads == "pinned"
        else "they may see newer updates"
    )
    return (
        (
            "a site at clock c starts only from a version that holds every active site's updates "
            f"of clocks up to c - {s + 1}, and its own latest; {reads}"
        ),
        f"no site is more than {s} clocks ahead of the slowest active one",
        dead,
        late,
    )


def _async(spec: JobSpec) -> tuple[str, ...]:
    cap = spec.pacing.staleness
    return (
        "nobody ever waits for another site",
        (
            f"every update of a version started from a version at most {cap} before the one it was "
            "applied to; an older one is refused, and its site starts again from the newest"
        ),
        "a site that is always slower than that is never counted",
        *_compensated(spec),
    )


def _buffered(spec: JobSpec) -> tuple[str, ...]:
    pacing = spec.pacing
    wait = (
        "a site has at most one update in a version, and waits for it"
        if pacing.one_per_site
        else "a site may have several updates in a version; nobody waits for another site"
    )
    return (
        (
            f"a version is made of {pacing.buffer} updates, divided by {pacing.buffer}, whoever "
            "sent them; with fewer only when one has waited for "
            f"{pacing.deadline_seconds:g} s"
        ),
        wait,
        "staleness is not bounded but weighed",
        "who is in a version is known and journalled before it is made",
        *_compensated(spec),
    )


def _compensated(spec: JobSpec) -> tuple[str, ...]:
    if spec.pacing.compensation == "none":
        return ()
    return (
        (
            "an update is changed by an estimate of what its gradients would be where the model is "
            "now, first order and diagonal; one that started from the version before its own is "
            "applied as it is"
        ),
    )
