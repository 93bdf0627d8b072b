"""Requests for a peer's capacity: reserve, commit and return, as messages over `Admission`.

The daemon, the simulator, the tests and the papers' experiments all use this one door. Its
`Occupant` runs the units that are let in, and reports when they have ended. A strategy that needs
more from these messages looks at them itself (`looked_at`).

Rules:
- Only `Admission` decides what may run. Every path that ends a unit releases it here.
- Whoever frees capacity calls `advance`: waiting units begin, and homes that were refused are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol

from ..membership.members import Members, State
from ..wire.messages import (
    Capacity,
    Commit,
    Committed,
    Contact,
    Grant,
    Member,
    Offers,
    Reserve,
    ReturnLeases,
    Room,
    Ticket,
    Vacancy,
    Work,
)
from ..wire.rpc import Rpc
from .admission import Admission

MADE_WAY = "it made way for a task that was promised its place"
OVERDUE = "the unit waited longer in this peer's queue than was promised"

#: called with a home's message after `Admission` has dealt with it
Look = Callable[[Contact, Reserve | ReturnLeases], None]


class Occupant(Protocol):
    """Runs the units that are let in."""

    def refusal(self, home: bytes, work: Work) -> str | None:
        """Why a unit may not come in; empty if it may; None for a repeat of one that is here."""

    def let_in(self, home: bytes, work: Work) -> None:
        """The unit is here now: `start` or `wait` comes next."""

    def start(self, unit: Hashable) -> None:
        """Its turn has come."""

    def wait(self, unit: Hashable) -> None:
        """Its turn will come."""

    def hand_back(self, unit: Hashable, reason: str) -> None:
        """It has waited for too long. (The occupant calls `release`.)"""

    def make_way(self, unit: Hashable, reason: str) -> None:
        """It runs, and must end for one that was promised its place. (The occupant calls
        `release` when it has ended.)"""


class Guest:
    """An occupant that takes every unit that fits; subclasses define `start`."""

    def refusal(self, home: bytes, work: Work) -> str | None:
        return ""

    def let_in(self, home: bytes, work: Work) -> None:
        pass

    def wait(self, unit: Hashable) -> None:
        pass

    def hand_back(self, unit: Hashable, reason: str) -> None:
        pass

    def make_way(self, unit: Hashable, reason: str) -> None:
        pass


class Door:
    def __init__(
        self, rpc: Rpc, members: Members, admission: Admission, lease_ttl_s: float
    ) -> None:
        self.admission = admission
        self.on_room: list[Callable[[], None]] = []  # called when free capacity may have changed
        self.looked_at: list[Look] = []  # strategies that read these messages, too
        self._rpc = rpc
        self._members = members
        self._lease_ttl_s = lease_ttl_s
        self._occupant: Occupant | None = None
        self._timer: asyncio.TimerHandle | None = None
        rpc.on(Reserve, self._reserve)
        rpc.on(ReturnLeases, self._return_leases)
        rpc.on(Commit, self._commit)
        members.listen(self._member_changed)

    def open(self, occupant: Occupant) -> None:
        """Call this before any message comes."""
        self._occupant = occupant

    @property
    def free(self) -> Capacity:
        return self.admission.free

    # ----------------------------------------------------------------- for this very peer

    def reserve(self, home: bytes, room: Room) -> Grant:
        """As if that home had asked by a message."""
        grant = self.admission.reserve(home, room, self._now())
        self._reserved()
        return grant

    def ticket(self) -> Ticket:
        """This peer's offer: its free capacity and its queue."""
        return Ticket(*self.admission.on_offer(self._now()))

    def release(self, unit: Hashable) -> None:
        """The unit has ended. Call `advance` when all units that ended are released."""
        self.admission.release(unit)

    def advance(self) -> None:
        """Capacity came free: begins waiting units, and tells homes that were refused."""
        assert self._occupant is not None, "nobody lives here"
        now = self._now()
        for unit in self.admission.starts(now):
            self._occupant.start(unit)
        for unit in self.admission.told_to_go():
            self._occupant.make_way(unit, MADE_WAY)
        for unit in self.admission.overdue(now):
            self._occupant.hand_back(unit, OVERDUE)
        homes = self.admission.meet_gangs(now)
        refused = self.admission.take_wish(now)
        for peer in (*homes, refused) if refused else homes:
            contact = self._members.contact(peer)
            if contact is not None:
                self._rpc.tell(contact, Vacancy(free=self.admission.free))
        self._set_timer()
        self._room_changed()

    def booked(self) -> None:
        """Bookings were made or changed."""
        self._set_timer()

    # ----------------------------------------------------------------- messages

    def _reserve(self, sender: Contact, message: Reserve) -> Offers:
        now = self._now()
        grants = tuple(self.admission.reserve(sender.id, room, now) for room in message.asks)
        self._look(sender, message)
        self._reserved()
        return Offers(grants=grants, free=self.admission.free, ttl_s=self._lease_ttl_s)

    def _reserved(self) -> None:
        if self.admission.passed_over:
            self.advance()
        else:
            self._set_timer()
            self._room_changed()

    def _return_leases(self, sender: Contact, message: ReturnLeases) -> None:
        self.admission.give_back(sender.id, message.leases, message.gangs)
        self._look(sender, message)
        self.advance()

    def _commit(self, sender: Contact, message: Commit) -> Committed:
        assert self._occupant is not None, "nobody lives here"
        now = self._now()
        refused = []
        for work in message.works:
            refusal = self._occupant.refusal(sender.id, work)
            if refusal is None:
                continue  # a repeat: the unit is here
            verdict = refusal or self.admission.commit(
                sender.id, work.lease, work.key, now, work.owner, work.key.workflow, work.ways
            )
            if verdict not in ("run", "wait"):
                refused.append((work.key, verdict))
                continue
            self._occupant.let_in(sender.id, work)
            (self._occupant.start if verdict == "run" else self._occupant.wait)(work.key)
        self.advance()  # capacity may have come free between the lease and this
        return Committed(refused=tuple(refused))

    def _look(self, sender: Contact, message: Reserve | ReturnLeases) -> None:
        for look in self.looked_at:
            look(sender, message)

    def _room_changed(self) -> None:
        for changed in self.on_room:
            changed()

    # ----------------------------------------------------------------- members and time

    def _member_changed(self, old: Member | None, new: Member) -> None:
        ended = new.state >= State.DEAD or (old is not None and old.boot != new.boot)
        if ended and self.admission.forsake(new.contact.id):
            self.advance()

    def _set_timer(self) -> None:
        """A timer that is set for earlier stays: it sets the next one."""
        at = self.admission.next_event_at(self._now())
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(at, loop.time() + 0.01), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.advance()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
