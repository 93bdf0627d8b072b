"""The messages of `deadline`, numbered from 100. Times travel as seconds from now: no clocks are
compared."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import (
    Contact,
    Message,
    Natural,
    Needs,
    PeerId,
    Seconds,
    Text,
    Word,
    Words,
    numbered,
)


class WindowedTask(NamedTuple):
    """A task of a sequence, and its window."""

    needs: Needs
    length_s: Seconds  # on a peer of speed 1, as estimated
    start_in_s: Seconds
    due_in_s: Seconds | None = None  # None: whenever


class TaskSequence(NamedTuple):
    """Tasks that follow each other on one peer."""

    tasks: Annotated[tuple[WindowedTask, ...], Field(min_length=1, max_length=1000)]


class HeldTask(NamedTuple):
    lease: Natural
    start_in_s: Seconds
    end_in_s: Seconds


class SequenceAnswer(NamedTuple):
    """Slots for all tasks of a sequence; or none, and why not."""

    held: Annotated[tuple[HeldTask, ...], Field(max_length=1000)] = ()
    why: Text = ""


class BookedLease(NamedTuple):
    lease: Natural
    due_in_s: Seconds


@numbered(100)
class Hold(Message):
    """Asks a peer to book these sequences. A booking expires unless it is confirmed."""

    workflow: Word
    owner: Annotated[str, Field(max_length=64)]
    sequences: Annotated[tuple[TaskSequence, ...], Field(max_length=64)]


@numbered(101)
class Held(Message):
    """One answer for each of `sequences`, in the same order."""

    answers: Annotated[tuple[SequenceAnswer, ...], Field(max_length=64)]


@numbered(102)
class Confirm(Message):
    """Confirms bookings with their final deadlines, or affirms that they are still wanted."""

    workflow: Word
    epoch: Natural
    booked: Annotated[tuple[BookedLease, ...], Field(max_length=2000)]


@numbered(103)
class Confirmed(Message):
    """All others are on the peer's disk."""

    unknown: Annotated[tuple[Natural, ...], Field(max_length=2000)] = ()


@numbered(104)
class Renew(Message):
    """Keeps bookings for a while longer that are not confirmed yet."""

    workflow: Word
    leases: Annotated[tuple[Natural, ...], Field(max_length=2000)]


class SortRow(NamedTuple):
    """What fits into a hole, see `summary.Sort`."""

    millicores: Natural
    memory_bytes: Natural
    gpus: Natural
    speed: Annotated[float, Field(gt=0, le=1e9)]
    arch: Word = ""
    os: Word = ""
    site: Word = ""
    labels: Words = ()
    software: Words = ()


HalfSeconds = Annotated[int, Field(ge=-(2**40), le=2**40)]


class CellRow(NamedTuple):
    """Holes of one sort. Reference points are half seconds from the message's `base`."""

    sort: Annotated[int, Field(ge=0, le=200)]
    start: HalfSeconds | None  # None: it has begun
    end: HalfSeconds | None  # None: it has no end
    length: Annotated[int, Field(ge=-100, le=100)] | None  # steps of half an octave; None: no end
    count: Natural  # type: ignore[assignment]


@numbered(105, repeatable=True)
class Availability(Message):
    """The summary of a leaf (level 0) or a branch, for the branch above it."""

    level: Annotated[int, Field(ge=0, le=16)]
    child: PeerId  # its head
    parent: PeerId  # the head of the branch above, as the sender sees it
    seq: Natural
    base: Natural  # of its reference points, in seconds of tree time
    sorts: Annotated[tuple[SortRow, ...], Field(max_length=200)]
    cells: Annotated[tuple[CellRow, ...], Field(max_length=1000)]


@numbered(106)
class AvailabilityTaken(Message):
    """The receiver's tree time, for the sender to follow."""

    now: float


class TreePlace(NamedTuple):
    """A leaf or a branch: its level and its head."""

    level: Annotated[int, Field(ge=0, le=16)]
    head: PeerId


@numbered(107)
class Seek(Message):
    """A sequence, or a piece of one, on its way to a peer with a hole for it."""

    id: Natural  # its home's own number
    home: Contact
    workflow: Word
    owner: Annotated[str, Field(max_length=64)]
    first: Natural  # the index of its first task in the sequence
    tasks: Annotated[tuple[WindowedTask, ...], Field(min_length=1, max_length=1000)]
    at: TreePlace
    hops: Annotated[int, Field(ge=0, le=100)] = 0
    tried: Annotated[tuple[TreePlace, ...], Field(max_length=8)] = ()


@numbered(108)
class SlotsFound(Message):
    """From the peer that holds them to the home."""

    id: Natural
    first: Natural
    held: Annotated[tuple[HeldTask, ...], Field(max_length=1000)]


@numbered(109)
class NoneFound(Message):
    id: Natural
    first: Natural
    why: Text
