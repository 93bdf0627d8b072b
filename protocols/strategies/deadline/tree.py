"""This peer's parts of the tree of summaries: its leaf, and the branches that it hosts.

`shape` says who hosts which branch, `leaf` and `branch` decide; here their messages are sent.

Rules:
- A summary that has not changed is told again now and then: a host that is new learns its children,
  and one that hears nothing of a child for a while forgets it.
- *Tree time*: a child follows the clock of the branch above it, so that reference points are the
  same everywhere. The root's clock is its own.
- A request goes down where there is a hole for it, else up, at most `hops_max` times in all. It
  ends at its home, as slots or as nothing. A request that is lost ends there too, after `seek_s`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ...capacity.door import Door
from ...membership.members import Members
from ...tasks import Tasks
from ...wire.messages import Contact, Member
from ...wire.rpc import CallFailed, Rpc
from .branch import Branch, divided
from .config import DeadlineConfig
from .leaf import Leaf
from .messages import (
    Availability,
    AvailabilityTaken,
    CellRow,
    NoneFound,
    Seek,
    SlotsFound,
    SortRow,
    TaskSequence,
    TreePlace,
    WindowedTask,
)
from .points import POINTS
from .provider import Provider
from .shape import Shape
from .summary import BEGUN, STEPS_PER_OCTAVE, HoleCell, Sort, Sought, Summary

BRANCHES_MAX, CHILDREN_MAX = 64, 256
SORTS_MAX = 200
TRIED_MAX = 8
LOOK_S = 0.1


class Tree:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        door: Door,
        provider: Provider,
        clock: Callable[[], float],
        config: DeadlineConfig,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.branches: dict[TreePlace, Branch] = {}
        self._rpc = rpc
        self._members = members
        self._provider = provider
        self._clock = clock
        self._config = config
        self._ahead_s = 0.0  # of tree time, compared to this peer's clock
        bookings, traits = door.admission.bookings, members.me.traits
        self.leaf = Leaf(bookings, traits, config, POINTS[config.points], self._behind_s)
        self._me = TreePlace(0, members.me.contact.id)
        self._told_at: dict[TreePlace, float] = {}
        self._told: dict[TreePlace, TreePlace] = {}  # the branch to which each was told last
        self._shape: Shape | None = None
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        rpc.on(Availability, self._heard)
        rpc.on(Seek, self._seek)
        members.listen(self._member_changed)
        bookings.on_changed = self._booked

    # ----------------------------------------------------------------- the shape

    @property
    def is_used(self) -> bool:
        """With few members, homes ask them all, and nobody needs summaries."""
        return self._members.count > self._config.direct_max

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            here = {member.contact.id: member for member in self._members.here()}
            me = self._members.me  # (it is in its own tree even while it leaves)
            self._shape = Shape({**here, me.contact.id: me}.values())
        return self._shape

    def _member_changed(self, old: Member | None, new: Member) -> None:
        if old is None or old.state != new.state:
            self._shape = None
            self._wake.set()

    def now(self) -> float:
        """Tree time."""
        return self._clock() + self._ahead_s

    def _behind_s(self) -> float:
        """How far the clock of the bookings is behind tree time."""
        return self.now() - asyncio.get_running_loop().time()

    def above(self, place: TreePlace) -> TreePlace:
        """The branch to which a leaf or a branch belongs."""
        level = place.level + 1
        head = place.head if place.head in self.shape else self._me.head
        return TreePlace(level, self.shape.branch(level, head))

    def _contact(self, place: TreePlace) -> Contact | None:
        if place.level and place.head not in self.shape:
            return None
        return self._members.contact(self.shape.host(place.level, place.head))

    # ----------------------------------------------------------------- updates

    def _booked(self) -> None:
        self.leaf.changed()
        self._wake.set()

    async def run(self) -> None:
        """Tells branches above what has changed; sleeps while nothing has."""
        while True:
            self._wake.clear()
            if self.is_used:
                self._tell_all()
            wait_s = self._until_next()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(LOOK_S)  # what changes together is told together

    def _until_next(self) -> float | None:
        if not self.is_used:
            return None
        now = self.now()
        dues = [self._told_at.get(place, now) + self._config.retell_s for place in self._places()]
        dues += [self.leaf.update_at(), *(b.update_at() for b in self.branches.values())]
        return max(LOOK_S, min(dues) - now)

    def _places(self) -> list[TreePlace]:
        """This peer's leaf and its branches, but for the root: that tells nobody."""
        return [self._me, *(p for p in self.branches if p.level < self.shape.levels)]

    def _tell_all(self) -> None:
        now = self.now()
        for place, branch in list(self.branches.items()):
            for child in branch.silent(now - self._config.forget_child_s):
                branch.lost(child)
            if not branch.children:
                del self.branches[place]
                self._retract(place, branch.again(now)[0])
        for place in self._places():
            part: Leaf | Branch = self.branches[place] if place.level else self.leaf
            if self._told.get(place, self.above(place)) != self.above(place):
                self._retract(place, part.again(now)[0])
            update = part.update(now)
            again_at = self._told_at.get(place, -math.inf) + self._config.retell_s
            if update is None and now >= again_at:
                update = part.again(now)
            if update is not None:
                self._told_at[place], self._told[place] = now, self.above(place)
                self._tasks.spawn(self._tell(place, self.above(place), update))

    def _retract(self, place: TreePlace, seq: int) -> None:
        """Its summary counts no more where it was told last."""
        above = self._told.pop(place, None)
        self._told_at.pop(place, None)
        if above is not None:
            self._tasks.spawn(self._tell(place, above, (seq, Counter())))

    async def _tell(self, place: TreePlace, above: TreePlace, update: tuple[int, Summary]) -> None:
        contact = self._contact(above)
        if contact is None:
            return
        seq, cells = update
        message = _message(place, above, seq, cells, self.now())
        self.counts["updates"] += 1
        if contact.id == self._me.head:
            self._take(message)
            return
        start = self._clock()
        try:
            answer = await self._rpc.call(contact, message, AvailabilityTaken)
        except CallFailed:
            return  # it is told again
        took_s = self._clock() - start
        self._ahead_s = answer.now + took_s / 2 - self._clock()

    def _heard(self, sender: Contact, message: Availability) -> AvailabilityTaken:
        self._take(message)
        return AvailabilityTaken(now=self.now())

    def _take(self, message: Availability) -> None:
        place = TreePlace(message.level + 1, message.parent)
        branch = self.branches.get(place)
        if branch is None:
            if len(self.branches) >= BRANCHES_MAX:
                return
            branch = self.branches[place] = Branch(self._config)
        child = TreePlace(message.level, message.child)
        cells = _cells(message)
        if not cells:
            branch.lost(child)
        elif len(branch.children) < CHILDREN_MAX or child in branch.children:
            branch.heard(child, message.seq, cells, self.now())
        self._wake.set()

    # ----------------------------------------------------------------- discovery

    def begin(self, seek: Seek) -> bool:
        """A home's request, to the branch of this peer. False: nobody hosts it now."""
        return self._pass_on(seek, self.above(self._me))

    def _seek(self, sender: Contact, message: Seek) -> None:
        if message.hops >= self._config.hops_max:
            self._none(message, "it was passed on too often")
        elif message.at.level == 0:
            self._seek_here(message)
        else:
            self._seek_below(message)

    def _seek_here(self, seek: Seek) -> None:
        self._provider.refresh()
        answer = self._provider.answer(
            seek.home.id, seek.workflow, seek.owner, TaskSequence(seek.tasks)
        )
        if answer.held:
            self.counts["found"] += 1
            slots = SlotsFound(id=seek.id, first=seek.first, held=answer.held)
            self._rpc.tell(seek.home, slots)
            return
        self.counts["stale"] += 1
        self.leaf.changed()
        self._wake.set()
        self._up(seek)

    def _seek_below(self, seek: Seek) -> None:
        """Down to the child that fits best; else in two pieces; else up; else back to its home."""
        self.counts["seeks"] += 1
        branch = self.branches.get(seek.at) or Branch(self._config)
        tasks = self._sought(seek.tasks)
        tried = frozenset(seek.tried)
        child = branch.choose(tasks, tried)
        if child is not None and self._pass_on(seek, child):
            return
        pieces = divided(tasks)
        if pieces is not None and not tried:
            front = branch.choose(pieces[0], tried)
            back = branch.choose(pieces[1], tried) if front is not None else None
            if front is not None and back is not None:
                cut = len(pieces[0])
                self._pass_on(_piece(seek, 0, cut), front)
                self._pass_on(_piece(seek, cut, len(tasks)), back)
                return
        self._up(seek)

    def _up(self, seek: Seek) -> None:
        tried = (*seek.tried, seek.at)[-TRIED_MAX:]
        onward = seek.model_copy(update={"tried": tried})
        if seek.at.level >= self.shape.levels or not self._pass_on(onward, self.above(seek.at)):
            self._none(seek, "no peer has so much time left")

    def _pass_on(self, seek: Seek, place: Any) -> bool:
        contact = self._contact(place)
        if contact is None:
            return False
        onward = seek.model_copy(update={"at": place, "hops": seek.hops + 1})
        if contact.id == self._me.head:
            asyncio.get_running_loop().call_soon(self._seek, contact, onward)
        else:
            self._rpc.tell(contact, onward)
        return True

    def _none(self, seek: Seek, why: str) -> None:
        self._rpc.tell(seek.home, NoneFound(id=seek.id, first=seek.first, why=why))

    def _sought(self, tasks: tuple[WindowedTask, ...]) -> list[Sought]:
        now = self.now()
        return [
            Sought(
                task.needs,
                task.length_s,
                now + task.start_in_s,
                math.inf if task.due_in_s is None else now + task.due_in_s,
            )
            for task in tasks
        ]

    async def close(self) -> None:
        await self._tasks.close()


def _piece(seek: Seek, start: int, end: int) -> Seek:
    return seek.model_copy(update={"tasks": seek.tasks[start:end], "first": seek.first + start})


def _message(
    place: TreePlace, above: TreePlace, seq: int, cells: Summary, now: float
) -> Availability:
    base = int(now)
    sorts = list(dict.fromkeys(cell.sort for cell in cells))[:SORTS_MAX]
    index = {sort: n for n, sort in enumerate(sorts)}
    rows = tuple(
        CellRow(
            index[cell.sort],
            None if cell.start == BEGUN else round(2 * (cell.start - base)),
            None if cell.end == math.inf else round(2 * (cell.end - base)),
            None if cell.end == math.inf else _steps(cell.length_s),
            count,
        )
        for cell, count in cells.items()
        if cell.sort in index
    )
    return Availability(
        level=place.level, child=place.head, parent=above.head, seq=seq, base=base,
        sorts=tuple(SortRow(*sort) for sort in sorts), cells=rows,
    )  # fmt: skip


def _steps(length_s: float) -> int:
    return round(math.log2(length_s) * STEPS_PER_OCTAVE)


def _cells(message: Availability) -> Summary:
    cells: Summary = Counter()
    sorts = [Sort(*row) for row in message.sorts]
    for row in message.cells:
        if row.sort < len(sorts) and row.count:
            start = BEGUN if row.start is None else message.base + row.start / 2
            end = math.inf if row.end is None else message.base + row.end / 2
            length_s = math.inf if row.length is None else 2.0 ** (row.length / STEPS_PER_OCTAVE)
            if end - max(start, 0.0) >= 0 and (end == math.inf) == (length_s == math.inf):
                cells[HoleCell(sorts[row.sort], start, end, length_s)] += row.count
    return cells
