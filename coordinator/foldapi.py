"""What the engine and the fold process say to each other.

One JSON message per line over pipes: a request with an `id` on the fold process's stdin, one
answer with the same `id` on its stdout (its logs go to stderr). Only file paths cross, never
tensors. Every request is idempotent: after a death of the fold process the engine starts a new one
and asks again.

A job's folder:

    versions/<v>.body           snapshot body of version v (frames; what sites download)
    spools/<name>.body          uploads
    checkpoints/<v>/            model.safetensors, server.safetensors, meta.json
    init.body                   version 0 on its way in
"""

from __future__ import annotations

from typing import Final

import msgspec

from coordinator.journal import CohortMember
from coordinator.stimuli import CommitFacts, InitFacts, UpdateFacts
from protocol.jobspec import JobSpec
from protocol.layout import Layout


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Base. `folder` is the absolute path of the job's folder."""

    id: int
    job: str
    folder: str


class TakeInit(Request, frozen=True, kw_only=True, tag="take_init"):
    """Read init.body, check it, write versions/0.body and checkpoints/0. -> InitTaken

    A safetensors file knows names, shapes and values, but not the roles, ties and order of the
    tensors: those come from `layout`, that of the first site's Ready. Without it the roles are
    guessed from names and types in file order, which is enough to check the file and to say how
    large it is; a site's layout will seldom equal such a guess, so ask again with the layout. The
    file stays where it is.
    """

    spec: JobSpec
    safetensors: bool = False  # init.body is a safetensors file of a whole state dict
    layout: Layout | None = None  # with safetensors: the layout that version 0 must have


class Screen(Request, frozen=True, kw_only=True, tag="screen"):
    """Read a whole spool and report facts; changes nothing. -> Screened"""

    spool: str
    layout_version: int = 0


class Fold(Request, frozen=True, kw_only=True, tag="fold"):
    """Make `version` from `base_version` and the cohort, in the order given. -> Folded

    `additive`: see `journal.RoundClosed`. Delay compensation reads versions/<v>.body of the
    versions that the cohort started from.
    """

    spec: JobSpec
    version: int
    base_version: int
    base_digest: str
    cohort: tuple[CohortMember, ...]
    active_sites: int
    additive: bool = False


class SaveCheckpoint(Request, frozen=True, kw_only=True, tag="save_checkpoint"):
    """Write checkpoints/<version>/ atomically and remove older ones. -> Saved"""

    version: int
    fsync: bool = False


class Recover(Request, frozen=True, kw_only=True, tag="recover"):
    """Load checkpoint `checkpoint`, then fold `folds` again in order; each must give its digest.
    -> Folded with the facts of the last version.
    """

    spec: JobSpec
    checkpoint: int
    folds: tuple[Refold, ...]


class Refold(msgspec.Struct, frozen=True, kw_only=True):
    """One commit of the past."""

    version: int
    digest: str
    cohort: tuple[CohortMember, ...]
    active_sites: int
    additive: bool = False


class Export(Request, frozen=True, kw_only=True, tag="export"):
    """Write a safetensors file with every name of the state dict. -> Exported

    Tensors that never left the sites (frozen, local) are listed as missing; whoever holds the base
    model merges them in.
    """

    version: int
    target: str


class DropJob(Request, frozen=True, kw_only=True, tag="drop_job"):
    """Free the job's tensors; what is in no checkpoint is written to one before. -> Done"""


class Wake(Request, frozen=True, kw_only=True, tag="wake"):
    """Answer as soon as everything is loaded; `job` and `folder` are empty. -> Done"""


class Quit(Request, frozen=True, kw_only=True, tag="quit"):
    """End the process. No answer."""


FoldRequest = TakeInit | Screen | Fold | SaveCheckpoint | Recover | Export | DropJob | Wake | Quit


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base. `fault` is set when the request itself could not be carried out (disk full, a file is
    missing): a sentence for people. `disk_full` marks ENOSPC and EDQUOT. `unknown_state` says that
    this process does not hold the base of the request (it is new, or freed the job): Recover first.
    """

    id: int
    fault: str = ""
    disk_full: bool = False
    unknown_state: bool = False


class InitTaken(Answer, frozen=True, kw_only=True, tag="init_taken"):
    """Facts about version 0."""

    facts: InitFacts


class Screened(Answer, frozen=True, kw_only=True, tag="screened"):
    """Facts about an update."""

    facts: UpdateFacts


class Folded(Answer, frozen=True, kw_only=True, tag="folded"):
    """Facts about a commit."""

    facts: CommitFacts


class Saved(Answer, frozen=True, kw_only=True, tag="saved"):
    """The checkpoint is there."""

    version: int


class Exported(Answer, frozen=True, kw_only=True, tag="exported"):
    """The file is there. `missing` lists tensors that it cannot hold (frozen or local)."""

    path: str
    digest: str
    missing: tuple[str, ...] = ()


class Done(Answer, frozen=True, kw_only=True, tag="done"):
    """Carried out."""


FoldAnswer = InitTaken | Screened | Folded | Saved | Exported | Done

request_decoder: Final = msgspec.json.Decoder(FoldRequest)
answer_decoder: Final = msgspec.json.Decoder(FoldAnswer)
