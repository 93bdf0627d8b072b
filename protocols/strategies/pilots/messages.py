"""Messages of pilots: 79 to 86."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import ID_BYTES, Message, Natural, Needs, PeerId, Seconds, Ticket, numbered

Rank = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]

#: files that are worth a way to who holds them: a part of the hash, and bytes
Reads = Annotated[
    tuple[tuple[Annotated[bytes, Field(min_length=8, max_length=8)], Natural], ...],
    Field(max_length=16),
]


class Wanting(NamedTuple):
    """Units of a home that are alike, and read the same files. `wanted` counts from the first on:
    those that are `settled` (room came for them, or could not be given after all) among them."""

    id: Natural  # the home's own number for them
    needs: Needs
    wanted: Natural
    settled: Natural = 0
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    waited_s: Seconds = 0.0
    hangs_s: Seconds = 0.0  # seconds of work that hang on the first of them
    reads: Reads = ()
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # it failed at these
    rank: Annotated[str, Field(max_length=200)] = ""  # an expression; empty: as always
    owner: Annotated[str, Field(max_length=64)] = ""  # of the first of them


class Line(NamedTuple):
    """The same, on a site's list of tasks, as far as a pilot needs it to rank them."""

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
    """What a pilot has free, and the tasks it would like most."""

    pilot: PeerId
    ticket: Ticket
    ranks: Annotated[tuple[tuple[Natural, Rank], ...], Field(max_length=512)] = ()


class Landing(NamedTuple):
    """Units that are to run at a pilot: it offers room for them to their home."""

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
    """From a home to a site's master pilot: what has changed. One that wants nothing more is
    withdrawn. `lines`: how many there are with these; if that is not so, all is said again."""

    units: Annotated[tuple[Wanting, ...], Field(max_length=2000)]
    lines: Natural
    anew: bool = False  # forget what was said before


@numbered(80)
class UnitsPosted(Message):
    """`again`: this peer has not heard all of it."""

    again: bool = False
    pilots: Natural = 0  # of its site


@numbered(81)
class TaskList(Message):
    """A site's list, as far as it has changed since `base`; to be passed on to all between `low`
    and `high`, or to those of `among`, who are to bid within `wait_s`."""

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
    above: Annotated[tuple[PeerId, ...], Field(max_length=32)] = ()  # whom it came by
    excerpt: bool = False  # some lines to be ranked now, whatever list there is
    # lines that are so young that only who holds files of theirs is to bid for them
    young: Annotated[tuple[Natural, ...], Field(max_length=20_000)] = ()


@numbered(82)
class TaskListed(Message):
    """`behind`: this peer lacks what the changes follow on; send all of it."""

    behind: bool = False


@numbered(83)
class Bids(Message):
    """Of a region, on their way back to the master; of nobody, if nobody in it has room."""

    master: PeerId
    round: Natural
    bids: Annotated[tuple[Bid, ...], Field(max_length=5000)]


@numbered(84)
class Assign(Message):
    """Down the way that the bids came."""

    master: PeerId
    round: Natural
    landings: Annotated[tuple[Landing, ...], Field(max_length=20_000)]


@numbered(85)
class Seats(Message):
    """From a pilot to a home: leases for units of that number. May be lost: they expire."""

    id: Natural
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)]
    short: Natural = 0  # units that there was no room for after all
    rank: Rank = 0.0
    master: PeerId = bytes(ID_BYTES)
    round: Natural = 0


@numbered(86)
class Idle(Message):
    """From a pilot to its master: there is room; and files it holds, by a part of their hashes.
    `settling`: it has just made some of them, and for now has room only for what reads them."""

    ticket: Ticket
    held: Annotated[
        tuple[Annotated[bytes, Field(min_length=8, max_length=8)], ...], Field(max_length=256)
    ] = ()
    settling: bool = False
