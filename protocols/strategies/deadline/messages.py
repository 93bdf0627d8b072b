"""The messages of `deadline`, numbered from 100. Times travel as seconds from now: no clocks are
compared."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import Message, Natural, Needs, Seconds, Text, Word, numbered


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
    """Slots for all tasks of a sequence; or none, and when it could end here at the earliest."""

    held: Annotated[tuple[HeldTask, ...], Field(max_length=1000)] = ()
    why: Text = ""
    earliest_in_s: Seconds | None = None  # None: never


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
