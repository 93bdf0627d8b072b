"""Messages of claims and tickets: 50 to 56, and 60."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import Key, Message, Natural, Needs, PeerId, Seconds, Ticket, numbered


class Claim(NamedTuple):
    """What a home wants of one cell: room for units of the same needs. See strategies/tickets."""

    id: Natural  # the home's own number for it
    cell: Key
    needs: Needs
    wanted: Natural  # units, from the first on: those that were offered count among them
    offered: Natural = 0  # of those, units that offers of this cell have reached the home for
    rank_s: Seconds = 0.0  # seconds of work that hang on the first of them
    waited_s: Seconds = 0.0
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # it failed at these
    near: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # these hold its inputs
    owner: Annotated[str, Field(max_length=64)] = ""  # of its first unit


class Prospect(NamedTuple):
    """What a cell says of a claim: how many units it has promised in all, and what it has left."""

    promised: Natural
    free: Natural = 0  # units that would find room there now
    others: Natural = 0  # units of other claims that wait there, too


class Redemption(NamedTuple):
    """A claim that meets a ticket: room for so many units is to be offered to that home."""

    home: PeerId
    claim: Natural
    cell: Key
    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]  # type: ignore[assignment]
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    hold: bool = False


@numbered(50)
class PostClaims(Message):
    """To the owner of these claims' cells. One that wants nothing more is withdrawn."""

    claims: Annotated[tuple[Claim, ...], Field(max_length=1000)]


@numbered(51)
class ClaimsPosted(Message):
    """One for each."""

    prospects: Annotated[tuple[Prospect, ...], Field(max_length=1000)]


@numbered(52)
class PostTicket(Message):
    cells: Annotated[tuple[Key, ...], Field(min_length=1, max_length=2)]
    ticket: Ticket
    # what was to be redeemed and found no room: its cell, home, claim, units
    short: Annotated[tuple[tuple[Key, PeerId, Natural, Natural], ...], Field(max_length=1000)] = ()


@numbered(53)
class TicketPosted(Message):
    """Redeem these. `wanted_s`: for so long, say when there is room again."""

    redemptions: Annotated[tuple[Redemption, ...], Field(max_length=1000)] = ()
    wanted_s: Seconds = 0.0
    taken: bool = True  # False: an answer of this peer's is on its way; say it again


@numbered(54)
class Redeem(Message):
    """From a cell's owner, to whom it believes to have room: offer it to these homes. If somebody
    waits, or this is more than there is room for: for `wanted_s`, say when there is more."""

    redemptions: Annotated[tuple[Redemption, ...], Field(max_length=1000)]
    wanted_s: Seconds
    waits: bool = True


@numbered(55)
class Redeemed(Message):
    """Units that room was offered for, one number for each; and what is left."""

    offered: tuple[Natural, ...]
    ticket: Ticket


@numbered(56)
class Offer(Message):
    """To a home whose claim met this peer's ticket: leases for its units. May be lost: they expire,
    and the home says again what it wants."""

    claim: Natural
    cell: Key
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)]
    queued: Natural = 0  # how many of them, the last ones, wait in the queue


@numbered(60)
class Shortfall(Message):
    """To a home: peers that were thought to be idle were not, so fewer units of its claim than were
    promised have room in this cell. May be lost: it says again what it wants."""

    claim: Natural
    cell: Key
    promised: Natural
