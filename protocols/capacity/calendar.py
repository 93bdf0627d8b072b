"""A peer's time: bookings are rectangles of capacity over time. Pure; earliest deadline first.

Rules:
- At no instant do the bookings together need more than the peer has, in any dimension.
- Every booking has a slot in its window, from its *start line* to its deadline. It may be moved in
  that window to make room for others, and never out of it. A booking that runs is never moved.
- At every instant at least a quarter of the peer is promised to nobody (`share`), so that other
  work always gets on. A booking too large for that may take up to the whole peer; it is then
  followed by a pause, in which nothing else that large is promised.
- While several owners want promises here, none has more than half of what may be promised.

With one core and one owner this is the local scheduler of Celaya and Arronategui (2010), section
V.A, whose queue is a list of one-core rectangles.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..wire.messages import Capacity
from .matching import plus

NOTHING = Capacity()
#: two times that differ by less are the same: sums of floats are not exact
TINY_S = 1e-6
#: with more bookings than this, none is moved for another: packing takes too long
PACKED_MAX = 200
#: how far a slot is moved on at once whose unit is not here yet
ABSENT_S = 0.5


class BookingAsk(NamedTuple):
    """A task that wants a booking. `length_s` is its time at this peer, with a margin; `least_s` is
    its time without."""

    needs: Capacity
    length_s: float
    start_line: float
    due_at: float
    least_s: float = 0.0


@dataclass(slots=True)
class Booking:
    id: int
    needs: Capacity
    length_s: float
    start_line: float
    due_at: float
    least_s: float
    start_at: float
    owner: str = ""
    fixed: bool = False  # it runs, or was never in a window: it is where it is
    here: bool = False  # its unit is here, and waits to begin

    @property
    def end_at(self) -> float:
        return self.start_at + self.length_s


def exceeds(used: Capacity, needs: Capacity, limit: Capacity) -> bool:
    """Whether these needs do not fit beside what is used. What is not needed can't be missing."""
    return (
        (needs[0] > 0 and used[0] + needs[0] > limit[0])
        or (needs[1] > 0 and used[1] + needs[1] > limit[1])
        or (needs[2] > 0 and used[2] + needs[2] > limit[2])
        or (needs[3] > 0 and used[3] + needs[3] > limit[3])
    )


class Profile:
    """Used capacity over time: a step function, which changes at `_times`."""

    __slots__ = ("_times", "_used")

    def __init__(self) -> None:
        self._times = [-math.inf]
        self._used = [NOTHING]

    def copy(self) -> Profile:
        other = Profile()
        other._times, other._used = self._times[:], self._used[:]
        return other

    def add(self, start: float, end: float, needs: Capacity, times: int = 1) -> None:
        first, behind = self._cut(start), self._cut(end)
        for i in range(first, behind):
            self._used[i] = plus(self._used[i], needs, times)
        self._join(behind)
        self._join(first)

    def _cut(self, at: float) -> int:
        """The index of the step that begins then; there is one from now on."""
        i = bisect.bisect_left(self._times, at)
        if i == len(self._times) or self._times[i] != at:
            self._times.insert(i, at)
            self._used.insert(i, self._used[i - 1])
        return i

    def _join(self, i: int) -> None:
        if i and self._used[i] == self._used[i - 1]:
            del self._times[i], self._used[i]

    def forget(self, before: float) -> None:
        """Drops the steps that have ended by then."""
        i = bisect.bisect_right(self._times, before) - 1
        if i > 0:
            del self._times[:i], self._used[:i]
            self._times[0] = -math.inf

    def at(self, time: float) -> Capacity:
        return self._used[bisect.bisect_right(self._times, time) - 1]

    def most(self, start: float, end: float) -> Capacity:
        """The most that is used in that time, of each dimension."""
        first = bisect.bisect_right(self._times, start) - 1
        behind = bisect.bisect_left(self._times, end, lo=first + 1)
        return Capacity(*map(max, zip(*self._used[first:behind], strict=True)))

    def holes(self, needs: Capacity, now: float, limit: Capacity) -> list[tuple[float, float]]:
        """The times from now on in which such needs fit."""
        open_since: float | None = None
        listed = []
        for i in range(bisect.bisect_right(self._times, now) - 1, len(self._times)):
            start = max(now, self._times[i])
            if exceeds(self._used[i], needs, limit):
                if open_since is not None:
                    listed.append((open_since, start))
                open_since = None
            elif open_since is None:
                open_since = start
        return listed if open_since is None else [*listed, (open_since, math.inf)]

    def earliest(self, needs: Capacity, length_s: float, start: float, limit: Capacity) -> float:
        """The first time from `start` on at which there is room for so long; infinite: never."""
        times, used = self._times, self._used
        at = start
        i = bisect.bisect_right(times, at) - 1
        while i < len(times) and times[i] < at + length_s - TINY_S:
            if exceeds(used[i], needs, limit):
                if i + 1 == len(times):
                    return math.inf
                at = times[i + 1]
            i += 1
        return at


class _Limit(NamedTuple):
    """What a slot must keep to: in this profile, so much, for its length times `stretch`."""

    profile: Profile
    needs: Capacity
    limit: Capacity
    stretch: float


ONE = Capacity(1)


class Calendar:
    def __init__(self, capacity: Capacity, share: float = 0.75) -> None:
        self.capacity = capacity
        self.share = share
        self.rows: dict[int, Booking] = {}
        self._limit = Capacity(*(int(share * have) for have in capacity))
        self._half = Capacity(*(have // 2 for have in self._limit))
        self._all = Profile()
        self._large = Profile()  # bookings beyond the limit, with their pauses
        self._of: dict[str, Profile] = {}  # of each owner
        self._large_of: dict[str, Profile] = {}

    # ----------------------------------------------------------------- changes

    def add(self, booking: Booking) -> None:
        self.rows[booking.id] = booking
        self._count(booking, +1)

    def drop(self, lease: int) -> Booking | None:
        booking = self.rows.pop(lease, None)
        if booking is not None:
            self._count(booking, -1)
        return booking

    def move(self, booking: Booking, start_at: float, length_s: float | None = None) -> None:
        self._count(booking, -1)
        booking.start_at = start_at
        booking.length_s = booking.length_s if length_s is None else length_s
        self._count(booking, +1)

    def _count(self, booking: Booking, sign: int) -> None:
        start, end, owner = booking.start_at, booking.end_at, booking.owner
        self._all.add(start, end, booking.needs, sign)
        if not owner:
            return  # nobody was promised this
        of = self._of.setdefault(owner, Profile())
        of.add(start, end, booking.needs, sign)
        if self._is_large(booking.needs):
            pause = booking.length_s / self.share
            self._large.add(start, start + pause, ONE, sign)
            large_of = self._large_of.setdefault(owner, Profile())
            large_of.add(start, start + 2 * pause, ONE, sign)

    def forget(self, now: float) -> None:
        """Frees the memory of times that have passed, up to the oldest booking."""
        now = min([now, *(booking.start_at for booking in self.rows.values())])
        for profile in (self._all, self._large, *self._of.values(), *self._large_of.values()):
            profile.forget(now)
        owners = {booking.owner for booking in self.rows.values()}
        for profiles in (self._of, self._large_of):
            for owner in [o for o in profiles if o not in owners]:
                del profiles[owner]

    # ----------------------------------------------------------------- questions

    @property
    def limit(self) -> Capacity:
        """What may be promised at one instant, of a peer that is not promised as a whole."""
        return self._limit

    def _is_large(self, needs: Capacity) -> bool:
        return exceeds(NOTHING, needs, self._limit)

    def _limits(self, needs: Capacity, owner: str, contested: bool) -> Iterator[_Limit]:
        large = self._is_large(needs)
        yield _Limit(self._all, needs, self.capacity if large else self._limit, 1.0)
        if large:
            yield _Limit(self._large, ONE, ONE, 1.0 / self.share)
        if not contested:
            return
        if large or exceeds(NOTHING, needs, self._half):
            yield _Limit(self._large_of.get(owner) or Profile(), ONE, ONE, 2.0 / self.share)
        else:
            yield _Limit(self._of.get(owner) or Profile(), needs, self._half, 1.0)

    def earliest(self, ask: BookingAsk, owner: str = "", contested: bool = False) -> float | None:
        """When a new booking can start, as all others stand; None if not in its window."""
        limits = list(self._limits(ask.needs, owner, contested))
        at, before = ask.start_line, -math.inf
        while at > before:
            before = at
            for profile, needs, limit, stretch in limits:
                at = profile.earliest(needs, ask.length_s * stretch, at, limit)
                if at + ask.length_s > ask.due_at + TINY_S or at == math.inf:
                    return None
        return at

    def holes(self, needs: Capacity, now: float) -> list[tuple[float, float]]:
        """When such needs could be booked here, as all bookings stand: from, until (section V.A).
        The last hole has no end."""
        limit = self.capacity if self._is_large(needs) else self._limit
        return self._all.holes(needs, now, limit)

    def has_room(self, needs: Capacity, start: float, end: float) -> bool:
        """Whether work that was promised nothing fits beside all bookings."""
        return not exceeds(self._all.most(start, end), needs, self.capacity)

    def most(self, start: float, end: float) -> Capacity:
        return self._all.most(start, end)

    def at(self, time: float) -> Capacity:
        return self._all.at(time)

    # ----------------------------------------------------------------- booking

    def fit(
        self, asks: Sequence[BookingAsk], owner: str, now: float, contested: bool = False
    ) -> tuple[list[float], dict[int, float]] | None:
        """Slots for a sequence of tasks, each after the one before, as early as possible; and the
        bookings that must move for that. First as all bookings stand, then packed anew by
        deadline; None: it does not fit."""
        asks = _in_order(asks)
        starts = self._fit_here(asks, owner, contested)
        if starts is not None:
            return starts, {}
        movable = [b for b in self.rows.values() if not b.fixed]
        if not movable or len(movable) > PACKED_MAX:
            return None
        trial = self._without(movable)
        return trial._pack(asks, owner, now, contested, movable)

    def _fit_here(
        self, asks: Sequence[BookingAsk], owner: str, contested: bool
    ) -> list[float] | None:
        starts: list[float] = []
        free_at = -math.inf
        for n, ask in enumerate(asks):
            ask = ask._replace(start_line=max(ask.start_line, free_at))
            start = self.earliest(ask, owner, contested)
            if start is None:
                break
            free_at = start + ask.length_s
            starts.append(start)
            self.add(Booking(-1 - n, *ask, start, owner))
        for n in range(len(starts)):
            self.drop(-1 - n)
        return starts if len(starts) == len(asks) else None

    def _without(self, bookings: Iterable[Booking]) -> Calendar:
        other = Calendar(self.capacity, self.share)
        left_out = {booking.id for booking in bookings}
        for booking in self.rows.values():
            if booking.id not in left_out:
                other.add(booking)
        return other

    def _pack(
        self,
        asks: Sequence[BookingAsk],
        owner: str,
        now: float,
        contested: bool,
        movable: list[Booking],
    ) -> tuple[list[float], dict[int, float]] | None:
        """Packs everything that may move, and the new tasks, by deadline. (What is late already may
        not get later.)"""
        starts: list[float] = []
        moves: dict[int, float] = {}
        rows = [(b.due_at, b.id, _ask(b), b.owner) for b in movable]
        rows += [(ask.due_at, -n, ask, owner) for n, ask in enumerate(asks)]
        free_at = -math.inf
        for _, lease, ask, whose in sorted(rows, key=lambda row: (row[0], -row[1])):
            is_new = lease <= 0
            line = max(ask.start_line, free_at if is_new else now)
            ask = ask._replace(start_line=line)
            start_at = self.earliest(ask, whose, contested and is_new)
            if start_at is None:
                return None
            if is_new:
                free_at = start_at + ask.length_s
                starts.append(start_at)
            else:
                moves[lease] = start_at
            self.add(Booking(-1 - len(self.rows), *ask, start_at, whose))
        return starts, moves

    # ----------------------------------------------------------------- as time passes

    def at_once(self, booking: Booking, now: float) -> dict[int, float] | None:
        """The bookings that must move so that this one can start now, each in its window; None: it
        can't."""
        self._count(booking, -1)
        at = self._all.earliest(booking.needs, booking.length_s, now, self.capacity)
        self._count(booking, +1)
        if at <= now + TINY_S:
            return {}
        movable = [b for b in self.rows.values() if not b.fixed and b is not booking]
        if len(movable) > PACKED_MAX:
            return None
        trial = self._without([*movable, booking])
        if not trial.has_room(booking.needs, now, now + booking.length_s):
            return None
        trial.add(replace(booking, start_at=now))
        packed = trial._pack((), "", now, False, [b for b in movable if b.end_at > now])
        return None if packed is None else packed[1]

    def apply(self, moves: dict[int, float]) -> None:
        for lease, start_at in moves.items():
            self.move(self.rows[lease], start_at)

    def slip(self, now: float) -> None:
        """Moves on those whose slot has begun without them. Each may first use up its margin. Then,
        if its unit is here, others make room in their windows; else it goes to where there is room
        a little later, maybe too late."""
        begun = [b for b in self.rows.values() if not b.fixed and b.start_at < now]
        for booking in sorted(begun, key=lambda b: (b.due_at, b.id)):
            if booking.start_at >= now:
                continue  # it has just made room for another
            if booking.end_at - now >= booking.least_s:
                self.move(booking, now, booking.end_at - now)
                continue
            self.move(booking, booking.start_at, booking.least_s)
            moves = self.at_once(booking, now) if booking.here else None
            if moves is not None:
                self.apply(moves)
                self.move(booking, now)
                continue
            self.drop(booking.id)
            self.add_behind(booking, now if booking.here else now + ABSENT_S)

    def add_behind(self, booking: Booking, now: float) -> None:
        """Adds it where there is room, in its window or behind it, and moves nothing."""
        line = max(now, booking.start_line)
        needs, length_s = booking.needs, booking.length_s
        booking.start_at = self._all.earliest(needs, length_s, line, self.capacity)
        self.add(booking)

    # ----------------------------------------------------------------- checks

    def sanity_check(self) -> None:
        """The invariants that hold after every step, but for bookings that run for too long."""
        check = Profile()
        for booking in self.rows.values():
            check.add(booking.start_at, booking.end_at, booking.needs)
        for time in check._times[1:]:
            assert check.at(time) == self._all.at(time), "the profile is wrong"


def _in_order(asks: Sequence[BookingAsk]) -> list[BookingAsk]:
    """With deadlines that leave each task behind the first one its time."""
    due_at = math.inf
    tightened = []
    for ask in reversed(asks):
        tightened.append(ask._replace(due_at=min(ask.due_at, due_at)))
        due_at = tightened[-1].due_at - ask.length_s
    return tightened[::-1]


def _ask(booking: Booking) -> BookingAsk:
    """Its window; one that is late already may not get later."""
    due_at = max(booking.due_at, booking.end_at)
    return BookingAsk(booking.needs, booking.length_s, booking.start_line, due_at, booking.least_s)
