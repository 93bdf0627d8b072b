"""The messages of `tickets`, numbered 50 to 56, and 60."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import Key, Message, Natural, Needs, PeerId, Seconds, Ticket, numbered


class Claim(NamedTuple):
    """What a home wants from one cell: capacity for units of the same needs."""

    id: Natural  # the home's own number for it
    cell: Key
    needs: Needs
    wanted: Natural  # units, counted from the first one, including those that were offered
    offered: Natural = 0  # the units among them for which offers of this cell reached the home
    rank_s: Seconds = 0.0  # seconds of work that depend on the first of them
    waited_s: Seconds = 0.0
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # it failed at these
    near: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # these hold its inputs
    owner: Annotated[str, Field(max_length=64)] = ""  # of its first unit


class Prospect(NamedTuple):
    """A cell's answer to a claim: how many units it has promised in all, and its capacity left."""

    promised: Natural
    free: Natural = 0  # units that it has capacity for now
    others: Natural = 0  # units of other claims that wait there, too


class Redemption(NamedTuple):
    """A claim that met a ticket: leases for so many units are to be offered to that home."""

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
    """To the owner of these claims' cells. A claim that wants nothing more is withdrawn."""

    claims: Annotated[tuple[Claim, ...], Field(max_length=1000)]


@numbered(51)
class ClaimsPosted(Message):
    """One prospect for each claim."""

    prospects: Annotated[tuple[Prospect, ...], Field(max_length=1000)]


@numbered(52)
class PostTicket(Message):
    cells: Annotated[tuple[Key, ...], Field(min_length=1, max_length=2)]
    ticket: Ticket
    # redemptions for which there was no capacity: cell, home, claim, units
    short: Annotated[tuple[tuple[Key, PeerId, Natural, Natural], ...], Field(max_length=1000)] = ()


@numbered(53)
class TicketPosted(Message):
    """Redeem these. `wanted_s`: how long to announce it when there is capacity again."""

    redemptions: Annotated[tuple[Redemption, ...], Field(max_length=1000)] = ()
    wanted_s: Seconds = 0.0
    taken: bool = True  # False: an answer of this peer is on its way; post the ticket again


@numbered(54)
class Redeem(Message):
    """From a cell's owner to a peer that it believes to have capacity: offer leases to these homes.
    If a claim waits, or this is more than there is capacity for: announce it for `wanted_s` when
    there is more."""

    redemptions: Annotated[tuple[Redemption, ...], Field(max_length=1000)]
    wanted_s: Seconds
    waits: bool = True


@numbered(55)
class Redeemed(Message):
    """The units that were offered leases, one number for each redemption; and what is left."""

    offered: tuple[Natural, ...]
    ticket: Ticket


@numbered(56)
class Offer(Message):
    """To a home whose claim met this peer's ticket: leases for its units. May be lost: leases
    expire, and the home posts its claim again."""

    claim: Natural
    cell: Key
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)]
    queued: Natural = 0  # how many of them wait in the queue: the last ones


@numbered(60)
class Shortfall(Message):
    """To a home: peers that were assumed to be idle were not, so this cell has capacity for fewer
    units of its claim than were promised. May be lost: the home posts its claim again."""

    claim: Natural
    cell: Key
    promised: Natural
