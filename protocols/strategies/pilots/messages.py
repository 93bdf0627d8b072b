"""The messages of `pilots`, numbered 79 to 86."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import ID_BYTES, Message, Natural, Needs, PeerId, Seconds, Ticket, numbered

Rank = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]

#: files large enough that a task should run where they are: a prefix of the hash, and bytes
Reads = Annotated[
    tuple[tuple[Annotated[bytes, Field(min_length=8, max_length=8)], Natural], ...],
    Field(max_length=16),
]


class Wanting(NamedTuple):
    """Similar units of a home that read the same files. `wanted` counts from the first unit on, and
    includes those that are `settled`: a lease came for them, or could not be granted after all."""

    id: Natural  # the home's own number for them
    needs: Needs
    wanted: Natural
    settled: Natural = 0
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    waited_s: Seconds = 0.0
    hangs_s: Seconds = 0.0  # seconds of work that depend on the first of them
    reads: Reads = ()
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # it failed at these
    rank: Annotated[str, Field(max_length=200)] = ""  # an expression; empty: the default one
    owner: Annotated[str, Field(max_length=64)] = ""  # of the first of them


class Line(NamedTuple):
    """A line on a site's list of tasks: the parts of a `Wanting` that a pilot ranks it by."""

    number: Natural
    needs: Needs
    waited_s: Seconds = 0.0
    hangs_s: Seconds = 0.0
    reads: Reads = ()
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()
    rank: Annotated[str, Field(max_length=200)] = ""
    dated: bool = False  # the first of them has a deadline
    owner: Annotated[str, Field(max_length=64)] = ""  # of the first of them


class Bid(NamedTuple):
    """The free capacity of a pilot, and the lines it ranks highest."""

    pilot: PeerId
    ticket: Ticket
    ranks: Annotated[tuple[tuple[Natural, Rank], ...], Field(max_length=512)] = ()


class Landing(NamedTuple):
    """Units that are assigned to a pilot: it offers leases for them to their home."""

    pilot: PeerId
    home: PeerId
    id: Natural
    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]  # type: ignore[assignment]
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    rank: Rank = 0.0
    hold: bool = False


@numbered(79)
class PostUnits(Message):
    """From a home to a site's master pilot: the lines that changed. A line that wants nothing more
    is withdrawn. `lines`: how many there should be now; if the master has another number of them,
    the home posts all of them again."""

    units: Annotated[tuple[Wanting, ...], Field(max_length=2000)]
    lines: Natural
    anew: bool = False  # forget all earlier lines


@numbered(80)
class UnitsPosted(Message):
    """`again`: this peer does not have all lines."""

    again: bool = False
    pilots: Natural = 0  # of its site


@numbered(81)
class TaskList(Message):
    """The changes of a site's list since `base`; to be passed on to all pilots between `low` and
    `high`, or to those in `among`, which are to bid within `wait_s`."""

    master: PeerId
    round: Natural
    base: Natural
    version: Natural
    came: Annotated[tuple[Line, ...], Field(max_length=20_000)]
    went: Annotated[tuple[Natural, ...], Field(max_length=20_000)]
    low: PeerId
    high: PeerId
    among: Annotated[tuple[PeerId, ...], Field(max_length=5000)] = ()
    wait_s: Seconds = 0.0
    above: Annotated[tuple[PeerId, ...], Field(max_length=32)] = ()  # the peers it came by
    excerpt: bool = False  # some lines to be ranked now, whatever copy of the list a pilot has
    # lines so young that only pilots that hold files of theirs are to bid for them
    young: Annotated[tuple[Natural, ...], Field(max_length=20_000)] = ()


@numbered(82)
class TaskListed(Message):
    """`behind`: this peer's copy is older than the base of the changes; send the whole list."""

    behind: bool = False


@numbered(83)
class Bids(Message):
    """The bids of a region, on their way back to the master; none if it has no free capacity."""

    master: PeerId
    round: Natural
    bids: Annotated[tuple[Bid, ...], Field(max_length=5000)]


@numbered(84)
class Assign(Message):
    """The assignments of a round, down the way that the bids came."""

    master: PeerId
    round: Natural
    landings: Annotated[tuple[Landing, ...], Field(max_length=20_000)]


@numbered(85)
class Seats(Message):
    """From a pilot to a home: leases for units of that line. May be lost: leases expire."""

    id: Natural
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)]
    short: Natural = 0  # units that there was no capacity for after all
    rank: Rank = 0.0
    master: PeerId = bytes(ID_BYTES)
    round: Natural = 0


@numbered(86)
class Idle(Message):
    """From a pilot to its master: its free capacity, and files it holds, by prefixes of their
    hashes. `settling`: it has just made some of them, and takes only tasks that read them now."""

    ticket: Ticket
    held: Annotated[
        tuple[Annotated[bytes, Field(min_length=8, max_length=8)], ...], Field(max_length=256)
    ] = ()
    settling: bool = False
