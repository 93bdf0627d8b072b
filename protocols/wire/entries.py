"""The entries of journals: every kind, and the only code that packs or reads one.

On the disk and on the wire an entry is its kind and its fields by name, as msgpack; a row in it is
a list. The rules are those of messages: a field may be added with a default, a column at the end of
a row; no kind, field or column is ever removed, renamed, moved, or given another meaning, because a
journal written years ago must still lead to the same state. A field that is None is not written.

An entry says what was decided, and applying it needs no further decision: everybody who reads a
journal, today or after a crash, comes to the same state. Entries are checked by their types when
they are made, and by pydantic when they are read; all other code may rely on them.
"""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple, NotRequired, TypeVar, get_type_hints

import msgpack
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from .messages import Hash, Natural, Outcome, PeerId

KEEPERS_MAX = 9
KEEPERS_CACHED_MAX = 1000
Keepers = Annotated[tuple[PeerId, ...], Field(max_length=KEEPERS_MAX)]
#: the state of a journal with only a part of its submission, which was never acknowledged
VOID = "void"


class EntryError(ValueError):
    """An entry that this version cannot read."""


class Journaled:
    """The content of one entry."""

    kind: ClassVar[str] = ""

    def packed(self) -> bytes:
        set_fields = {name: value for name, value in self.__dict__.items() if value is not None}
        packed: bytes = msgpack.packb(set_fields)
        return packed


J = TypeVar("J", bound=Journaled)


# --------------------------------------------------------------------------- rows


class StagedFile(NamedTuple):
    name: str
    hash: Hash
    size: Natural
    holders: tuple[PeerId, ...]


class InputReason(NamedTuple):
    """An input, and why it is lost or could not be brought."""

    name: str
    reason: str


class StartedAttempt(NamedTuple):
    task: str
    number: Natural
    peer: PeerId  # the one that it was given to
    boot: Natural  # of that peer


class FinishedAttempt(NamedTuple):
    outcome: Outcome
    peer: PeerId  # the one that reported it
    verdict: str  # what it means for its task: succeeded, failed, retrying or returned


class LostAttempt(NamedTuple):
    """An attempt that will not report."""

    task: str
    number: Natural
    reason: str
    verdict: str  # failed or retrying
    begun: bool  # as far as its home knows; if not, the loss does not count against its task


class SkippedTask(NamedTuple):
    task: str
    state: str  # skipped or failed
    reason: str


class ReopenedTask(NamedTuple):
    task: str
    reason: str


class CopiedFile(NamedTuple):
    hash: Hash
    peer: PeerId


class DeliveredFile(NamedTuple):
    name: str
    reason: str  # why it could not be delivered; empty if it was


class BookedTask(NamedTuple):
    """A task's slot at a peer. Times are of the home's wall clock."""

    task: str
    peer: PeerId
    lease: Natural
    start_at: float
    end_at: float
    length_s: float = 0.0  # as it was said to take on a peer of speed 1


# --------------------------------------------------------------------------- the journal's own


@dataclass(frozen=True, kw_only=True)
class KeepersChosen(Journaled):
    """The keepers of this journal from here on. The first entry of every journal."""

    kind: ClassVar[str] = "keepers"

    keepers: Keepers


@dataclass(frozen=True, kw_only=True)
class HomeElected(Journaled):
    """A majority of the keepers has elected another home."""

    kind: ClassVar[str] = "home"

    home: PeerId
    epoch: Natural  # as it is shown to users
    why: str


@dataclass(frozen=True, kw_only=True)
class HomeForced(Journaled):
    """A home goes on from its own copy, with other keepers, because a majority is lost."""

    kind: ClassVar[str] = "forced"

    home: PeerId
    epoch: Natural
    why: str
    keepers: Keepers
    committed: Natural  # entries that were committed by then, as far as it knows


# --------------------------------------------------------------------------- the submission


@dataclass(frozen=True, kw_only=True)
class Submitted(Journaled):
    kind: ClassVar[str] = "submitted"

    name: str
    owner: str
    tasks: Natural
    options: str  # JSON
    parts: Annotated[int, Field(ge=1)] = 1  # entries that hold the document, this one included
    zipped: bool
    document: bytes  # or its first part


@dataclass(frozen=True, kw_only=True)
class DocumentPart(Journaled):
    kind: ClassVar[str] = "document"

    part: bytes


# --------------------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True)
class InputsStaged(Journaled):
    """Inputs were brought to the home; some may have failed."""

    kind: ClassVar[str] = "staged"

    files: tuple[StagedFile, ...]
    failed: tuple[InputReason, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InputsLost(Journaled):
    """Every peer that held these inputs is gone: they are brought in again."""

    kind: ClassVar[str] = "unstaged"

    files: tuple[InputReason, ...]


@dataclass(frozen=True, kw_only=True)
class FilesCopied(Journaled):
    """Files that have one more holder."""

    kind: ClassVar[str] = "copied"

    files: tuple[CopiedFile, ...]


@dataclass(frozen=True, kw_only=True)
class FilesDelivered(Journaled):
    """Results were written to where their document wants them, or cannot be."""

    kind: ClassVar[str] = "delivered"

    files: tuple[DeliveredFile, ...]


# --------------------------------------------------------------------------- attempts and tasks


@dataclass(frozen=True, kw_only=True)
class AttemptsStarted(Journaled):
    """Attempts were given to peers, all by the same placement."""

    kind: ClassVar[str] = "started"

    placement: dict[str, Any]  # see `protocols.strategies.base.Placement`
    attempts: tuple[StartedAttempt, ...]


@dataclass(frozen=True, kw_only=True)
class AttemptsFinished(Journaled):
    """Outcomes that are accepted, and what they mean for their tasks."""

    kind: ClassVar[str] = "finished"

    outcomes: tuple[FinishedAttempt, ...]
    memory: dict[str, Natural] | None = None  # task → bytes that a policy gives it from now on
    instead: tuple[str, ...] | None = None  # tasks that go on in their next alternative


@dataclass(frozen=True, kw_only=True)
class AttemptsLost(Journaled):
    kind: ClassVar[str] = "lost"

    attempts: tuple[LostAttempt, ...]


@dataclass(frozen=True, kw_only=True)
class TasksSkipped(Journaled):
    """Tasks that will not run, or not again."""

    kind: ClassVar[str] = "skipped"

    tasks: tuple[SkippedTask, ...]


@dataclass(frozen=True, kw_only=True)
class TasksReopened(Journaled):
    """Succeeded tasks that run once more: their results are gone, and are needed."""

    kind: ClassVar[str] = "reopened"

    tasks: tuple[ReopenedTask, ...]
    gang: bool | None = None  # True: another task of their gang failed; their failures still count


# --------------------------------------------------------------------------- promises


@dataclass(frozen=True, kw_only=True)
class Promised(Journaled):
    """The workflow will be done by then: each of its tasks has a slot."""

    kind: ClassVar[str] = "promised"

    deadline_at: float
    survives: Natural  # how many deaths of peers the plan leaves time for
    booked: tuple[BookedTask, ...]


@dataclass(frozen=True, kw_only=True)
class TasksBooked(Journaled):
    """Tasks that had lost their slots, or would have come too late, have others."""

    kind: ClassVar[str] = "booked"

    booked: tuple[BookedTask, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class PromiseAtRisk(Journaled):
    """As things are now it will be late; or, with no reason, it will not be any more."""

    kind: ClassVar[str] = "at-risk"

    ends_at: float
    why: str


@dataclass(frozen=True, kw_only=True)
class PromiseEnded(Journaled):
    """The promise was kept, or it is broken: with its cause, in a word and in words."""

    kind: ClassVar[str] = "promise-ended"

    kept: bool
    cause: str
    why: str


# --------------------------------------------------------------------------- the end


@dataclass(frozen=True, kw_only=True)
class CancelAsked(Journaled):
    kind: ClassVar[str] = "cancelled"

    reason: str


@dataclass(frozen=True, kw_only=True)
class Ended(Journaled):
    kind: ClassVar[str] = "ended"

    state: str
    reason: str


# --------------------------------------------------------------------------- reading


BY_KIND: dict[str, type[Journaled]] = {cls.kind: cls for cls in Journaled.__subclasses__()}


def read(kind: str, body: bytes) -> Journaled:
    cls = BY_KIND.get(kind)
    if cls is None:
        raise EntryError(f"this version does not know entries of kind {kind[:40]!r}")
    return read_as(cls, body)


def read_as(cls: type[J], body: bytes) -> J:
    """Read and check: the disk may be corrupt, or the writer a peer of another version."""
    try:
        by_name = msgpack.unpackb(body, use_list=False, strict_map_key=False)
        checked = _checked(cls).validate_python(by_name)  # type: ignore[arg-type]
        return cls(**checked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise EntryError(f"a bad entry of kind {cls.kind}: {place}: {first['msg']}") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise EntryError(f"a bad entry of kind {cls.kind}: {error}") from None


@functools.cache
def _checked(cls: type[Journaled]) -> TypeAdapter[dict[str, Any]]:
    """Checks the same fields. (Entries made here are not checked by it.)"""
    hints = get_type_hints(cls, include_extras=True)
    typed: dict[str, Any] = {
        field.name: hints[field.name]
        if field.default is MISSING
        else NotRequired[hints[field.name]]
        for field in fields(cls)  # type: ignore[arg-type]
    }
    checks = TypedDict(cls.__name__, typed)  # type: ignore[misc]
    checks.__pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[attr-defined]
    return TypeAdapter(checks)  # type: ignore[arg-type]


@functools.lru_cache(KEEPERS_CACHED_MAX)  # a peer's workflows mostly have the same ones
def keepers_in(body: bytes | None) -> tuple[bytes, ...]:
    """The keepers that an entry names; none if it is of another kind."""
    try:
        return read_as(KeepersChosen, body or b"").keepers
    except EntryError:
        return ()


def parts_in(body: bytes) -> int:
    """How many entries a submission takes, without reading its document."""
    try:
        parts = msgpack.unpackb(body, strict_map_key=False)["parts"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return 1
    return parts if type(parts) is int and parts > 0 else 1
