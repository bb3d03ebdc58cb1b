"""The coordinator's core: stimuli in, ordered actions out; `now` is job time in seconds."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordinator.actions import AnyAction
from coordinator.journal import Entry
from coordinator.sessions import Admitted, Refused
from coordinator.stimuli import Stimulus
from protocol import limits
from protocol.views import JobView


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's operator decides. Spans in seconds, sizes in bytes."""

    lease_seconds: float = limits.LEASE_SECONDS
    grace_seconds: float = limits.CLOSED_CONNECTION_GRACE_SECONDS
    site_jobs_max: int = 1
    init_timeout_seconds: float = 3600.0
    evaluation_timeout_seconds: float = 600.0
    checkpoint_retry_seconds: float = 30.0
    spool_bytes_max: int = limits.SPOOL_BYTES_MAX
    jobs_resident_bytes_max: int = limits.JOBS_RESIDENT_BYTES_MAX


class Core:
    """Membership, assignment and all jobs. Signatures first; the bodies follow at once."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config

    def restore(self, entries: Iterable[Entry]) -> None:
        """Rebuild the state from the whole journal, in order. Call once, before anything else."""
        raise NotImplementedError

    def resume(self, now: float) -> list[AnyAction]:
        """After `restore`: ask again for what was outstanding, and give members fresh leases."""
        raise NotImplementedError

    def handle(self, stimulus: Stimulus, now: float) -> list[AnyAction]:
        """Decide. A refusal (ConflictError, NotFoundError, ...) is raised and changes nothing."""
        raise NotImplementedError

    def wake_at(self) -> float | None:
        """When to send a `Tick` if nothing happens before; None: never."""
        raise NotImplementedError

    def admit(self, site: str, instance: str, now: float) -> Admitted | Refused:
        """Ask before opening a session; after Admitted hand in a `SiteConnected`.

        `SiteConnected` begins a new session with an empty mailbox: the core sends again what is
        outstanding for the site.
        """
        raise NotImplementedError

    def heard(self, site: str, now: float) -> None:
        """Any byte from the site, as `SiteHeard` but without a batch: cheap, for every chunk."""
        raise NotImplementedError

    def last_heard_seconds(self, site: str, now: float) -> float | None:
        """Age of the last byte from a site with a session; None when it has none."""
        raise NotImplementedError

    def job_of(self, site: str) -> str:
        """The job that the site works for now, or an empty string."""
        raise NotImplementedError

    def stalled(self, seconds: float) -> None:
        """The coordinator did not listen for so long; leases are extended by it."""
        raise NotImplementedError

    def forget(self, job: str) -> None:
        """Drop an ended job from memory (its deletion). ConflictError when it has not ended."""
        raise NotImplementedError

    def jobs(self) -> tuple[str, ...]:
        """Ids of all jobs, in the order of their submission."""
        raise NotImplementedError

    def view(self, job: str, now: float) -> JobView:
        """The job as it stands. `created_at` and `ended_at` are job time, and the byte counts of
        the sockets are 0: the shell fills these from its tables.
        """
        raise NotImplementedError
