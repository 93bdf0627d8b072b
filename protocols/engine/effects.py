"""The effects of a decision: what it asks its home to do, in order.

Beside changing its run, a decision does nothing else. An entry is appended before anything that
follows from it: that may lead to the next decision, and the journal must have the entries in the
order in which they changed the run. (Named tuples: some ten are made for each task.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..strategies.base import Placed, Unit
from ..wire.entries import Journaled
from ..wire.messages import AttemptKey


class Effect(Protocol):
    """Any of the classes below."""


class Append(NamedTuple):
    """Appends an entry to the journal. `then` is decided about when a majority has the entry."""

    said: Journaled
    at: float
    soon: bool = False  # nothing waits for the entry: it may share the next sync
    then: WhenCommitted | None = None


class Place(NamedTuple):
    """Finds capacity for units that are ready."""

    units: tuple[Unit, ...]
    gangs: tuple[Unit, ...] = ()


class PlaceRest(NamedTuple):
    """Places these tasks after other workflows had their turn: they are too many at once."""

    tasks: tuple[str, ...]


class Start(NamedTuple):
    """Sends leased units to their peers, once the entry appended before is committed."""

    placed: tuple[Placed, ...]


class Withdraw(NamedTuple):
    """Stops looking for capacity for these attempts."""

    keys: tuple[AttemptKey, ...]


class AbortAttempts(NamedTuple):
    """Aborts attempts at a peer that are not needed any more."""

    peer: bytes
    keys: tuple[AttemptKey, ...]


class Retry(NamedTuple):
    """Places a task again after a delay."""

    task: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class BringInputs:
    """Fetches the inputs that are not there yet."""


@dataclass(frozen=True, slots=True)
class BookMissing:
    """Books slots for tasks that were promised one and have none."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Delivers the results that are made to where the document wants them."""


class KeepTwice(NamedTuple):
    """Copies the files of these tasks to a second peer."""

    tasks: tuple[str, ...]


class Observe(NamedTuple):
    """Notes how long a task took whose document says how long it takes."""

    said_s: float
    took_s: float


class Count(NamedTuple):
    """Adds to a metric."""

    name: str
    by: int = 1


class Conclude(NamedTuple):
    """Ends the workflow in this state."""

    state: str


# --------------------------------------------------------------------------- committed entries


class WhenCommitted(Protocol):
    """What to decide about once an entry is committed; any of the classes below."""


class ResultsCount(NamedTuple):
    """Tasks that depend on these results may begin."""

    said: Journaled
    won: tuple[tuple[str, int], ...]  # task, attempt
    rivals: frozenset[str]  # tasks that may have other attempts under way


class InputsCount(NamedTuple):
    """Tasks that read these inputs may begin."""

    said: Journaled


class CancelCounts(NamedTuple):
    """The running attempts of the cancelled workflow may be aborted."""

    aborts: tuple[AbortAttempts, ...]
