"""A pilot: takes part in the rounds of its site, and leases capacity for the units it is assigned.

Rules:
- A pilot passes a task list on to the region that came with it, with one message to each of at most
  eight parts; a delegate that does not answer is passed over, and another one of its part is asked.
- Bids return the way the list went, and are merged on the way. Nothing waits for a late pilot: the
  timeout depends on the depth. A late pilot is in the next round.
- An assignment is no promise: units land by a lease of this peer's own admission, offered to the
  task's home. If there is no capacity after all, that home is told at once.
- As long as there are rounds, a pilot tells the master when it has more free capacity than the
  master knows of.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ...capacity.matching import plus, slots, unmet
from ...config import Config
from ...membership.members import Members
from ...tasks import Tasks
from ...wire.messages import ID_BYTES, Capacity, Contact, Done, Grant, Needs, Room, Ticket
from ...wire.rpc import CallFailed, Rpc
from ..advertise import is_more
from .config import PilotsConfig
from .listing import Copy
from .messages import Assign, Bid, Bids, Idle, Landing, Line, Reads, Seats, TaskList, TaskListed
from .ranking import ranking
from .regions import Region, divide
from .site import SiteView

COPIES_MAX = 4
ROUNDS_MAX = 64
DELEGATES_MAX = 4
ABOVE_MAX = 32
RANKS_MAX = 256
HELD_MAX = 64
IDLE_S_MAX = 30.0
SOON_S = 0.03  # from when a home knows of a file to its post at the master
MIB = 1 << 20
LOW, HIGH = bytes(ID_BYTES), b"\xff" * ID_BYTES
AVOIDED = 1e9  # rank that a task loses where it failed before
#: share of a round's time that is left for the pilots one level below
DEEPER = 0.7
PASS_ON_S = 0.35  # for a delegate to confirm that it has the list
WANTED_S = 60.0  # after the last message of a master

Reserve = Callable[[bytes, Room], Grant]
RoundKey = tuple[bytes, int]
#: has a deadline, value, a random number, the number of the line
_Ranked = tuple[bool, float, float, int]


@dataclass(slots=True)
class _Round:
    parent: Contact | None  # None: this pilot is the master
    waiting: set[bytes] = field(default_factory=set)  # delegates whose bids are outstanding
    bids: list[Bid] = field(default_factory=list)
    passing: int = 0
    over: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Pilot:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        site: SiteView,
        rng: random.Random,
        config: Config,
        reserve: Reserve,
        ticket: Callable[[], Ticket],
        held: Callable[[], dict[bytes, int]],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._site = site
        self._rng = rng
        self._config = config
        self._own = config.of(PilotsConfig)
        self._reserve = reserve
        self._ticket = ticket
        self._held = held
        self._copies: OrderedDict[bytes, Copy] = OrderedDict()
        self._rounds: OrderedDict[RoundKey, _Round] = OrderedDict()
        self._meets: dict[Needs, bool] = {}
        self._wanted_until = 0.0
        self._said_at = 0.0
        self._settled_at = 0.0
        self._made_at = 0.0
        self._hears_s = 0.0  # smoothed delay from when a file is made until its home knows of it
        self._calm = asyncio.Event()
        self._calm.set()
        self._timer: asyncio.TimerHandle | None = None
        self._again = False  # announce the free capacity, even if it was announced before
        self._told = Ticket(Capacity())
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        rpc.on(TaskList, self._task_list)
        rpc.on(Bids, self._bids)
        rpc.on(Assign, self._assign)

    # ----------------------------------------------------------------- a round

    def _task_list(self, sender: Contact, message: TaskList) -> TaskListed:
        now = self._now()
        if not message.excerpt:
            copy = self._copy(message.master)
            if not copy.follow(message.base, message.version, message.came, message.went, now):
                self.counts["behind"] += 1
                return TaskListed(behind=True)
        self._wanted_until = now + WANTED_S
        key = (message.master, message.round)
        if key not in self._rounds:
            self.counts["rounds"] += 1
            self._open(key, sender)
            self._tasks.spawn(self._take_part(key, message))
        return TaskListed()

    def _copy(self, master: bytes) -> Copy:
        copy = self._copies.get(master)
        if copy is None:
            copy = self._copies[master] = Copy()
            if len(self._copies) > COPIES_MAX:
                self._copies.popitem(last=False)
        self._copies.move_to_end(master)
        return copy

    def _open(self, key: RoundKey, parent: Contact | None) -> _Round:
        made = self._rounds[key] = _Round(parent)
        if len(self._rounds) > ROUNDS_MAX:
            _, oldest = self._rounds.popitem(last=False)
            oldest.over = True
            oldest.news.set()
        return made

    async def _take_part(self, key: RoundKey, message: TaskList) -> None:
        current = self._rounds[key]
        await self.gather(current, message)
        if current.parent is None:
            return
        answer = Bids(master=message.master, round=message.round, bids=tuple(current.bids))
        try:
            await self._rpc.call(current.parent, answer, Done, self._own.round_s)
        except CallFailed:
            self.counts["bids_lost"] += 1

    async def lead(self, message: TaskList) -> _Round:
        """The master's own part: returns a round with all bids that came in time."""
        current = self._open((message.master, message.round), None)
        self._wanted_until = self._now() + WANTED_S
        if not message.excerpt:
            copy = self._copy(message.master)
            copy.follow(message.base, message.version, message.came, message.went, self._now())
        await self.gather(current, message)
        return current

    async def gather(self, current: _Round, message: TaskList) -> None:
        """Pass the list on, bid, and wait for the bids from below; no longer than there is time."""
        me = self._rpc.me.id
        end = self._now() + message.wait_s
        regions = divide(message.low, message.high, self._below(message))
        current.passing = len(regions)
        work = [self._tasks.spawn(self._pass_on(current, region, message)) for region in regions]
        if not message.among or me in message.among:
            bid = self.bid(message)
            if bid is not None:
                current.bids.append(bid)
        await self._wait_for_bids(current, end)
        current.over = True
        for task in work:
            if not task.done():
                task.cancel()

    def _below(self, message: TaskList) -> list[bytes]:
        """The pilots that the list may be passed on to."""
        if message.among:
            known: list[bytes] = list(message.among)
        else:
            known = [m.contact.id for m in self._site.pilots()]
        above = {self._rpc.me.id, *message.above}
        return [peer for peer in known if peer not in above]

    async def _wait_for_bids(self, current: _Round, end: float) -> None:
        while current.passing or current.waiting:
            current.news.clear()
            try:
                async with asyncio.timeout_at(end):
                    await current.news.wait()
            except TimeoutError:
                self.counts["late"] += len(current.waiting)
                return

    async def _pass_on(self, current: _Round, region: Region, message: TaskList) -> None:
        """Pass the list to one pilot of a region: the first that confirms that it has it."""
        try:
            peers = list(region.peers)
            self._rng.shuffle(peers)
            peers.sort(key=lambda p: not self._members.is_alive(p))
            tries = DELEGATES_MAX if len(peers) > 1 else 2
            for attempt in range(tries):
                delegate = peers[attempt % len(peers)]
                if await self._hand(current, delegate, region, message):
                    return
            self.counts["regions_lost"] += 1
        finally:
            current.passing -= 1
            current.news.set()

    async def _hand(
        self, current: _Round, delegate: bytes, region: Region, message: TaskList
    ) -> bool:
        contact = self._members.contact(delegate)
        if contact is None:
            return False
        part = message.model_copy(
            update={
                "low": region.low,
                "high": region.high,
                "among": region.peers if message.among else (),
                "wait_s": message.wait_s * DEEPER,
                "above": (*message.above, self._rpc.me.id)[-ABOVE_MAX:],
            }
        )
        current.waiting.add(delegate)
        self.counts["lists_sent"] += 1
        try:
            answer = await self._rpc.call(contact, part, TaskListed, PASS_ON_S)
            if answer.behind:
                copy = self._copy(message.master)
                whole = {"base": 0, "came": tuple(copy.lines.values()), "went": ()}
                whole["version"] = copy.version
                part = part.model_copy(update=whole)
                self.counts["lists_whole"] += 1
                answer = await self._rpc.call(contact, part, TaskListed, 2 * PASS_ON_S)
        except CallFailed:
            current.waiting.discard(delegate)
            self.counts["delegates_silent"] += 1
            return False
        return not answer.behind

    def _bids(self, sender: Contact, message: Bids) -> Done:
        current = self._rounds.get((message.master, message.round))
        if current is None or current.over:
            self.counts["too_late"] += 1  # that pilot is in the next round
            return Done()
        current.bids.extend(message.bids)
        current.waiting.discard(sender.id)
        current.news.set()
        return Done()

    # ----------------------------------------------------------------- ranking

    def bid(self, message: TaskList) -> Bid | None:
        """The lines that this pilot ranks highest, if any; None if it has no free capacity."""
        ticket = self._ticket()
        self._told = ticket
        if not any(ticket.free) and not ticket.queue_units:
            return None
        if message.excerpt:
            lines = {line.number: line for line in message.came}
            since = dict.fromkeys(lines, self._now())
            ranks = self.rank(lines, since, ticket, frozenset(message.young))
        else:
            copy = self._copy(message.master)
            ranks = self.rank(copy.lines, copy.heard_at, ticket, frozenset(message.young))
        return Bid(self._rpc.me.id, ticket, tuple(ranks))

    def rank(
        self,
        lines: dict[int, Line],
        since: dict[int, float],
        ticket: Ticket,
        young: Collection[int] = (),
    ) -> list[tuple[int, float]]:
        now = self._now()
        speed = self._members.me.traits.speed
        held = self._held()
        me = self._rpc.me.id
        unsettled = now < self._settled_at
        by_owner: dict[str, list[_Ranked]] = {}
        most = 0
        for number, line in lines.items():
            room = slots(ticket.free, line.needs.capacity)
            if not self._suits(line.needs) or not (room or ticket.queue_units):
                continue
            most = max(most, min(room, RANKS_MAX))
            local, remote = _local_and_remote(line.reads, held)
            if not local and (unsettled or number in young):
                continue
            waited = line.waited_s + now - since[number]
            value = ranking(line.rank)(local / MIB, remote / MIB, speed, waited, line.hangs_s)
            if me in line.avoid:
                value -= AVOIDED
            # random, so that pilots do not all name the same lines of equal value
            row = (line.dated, value, self._rng.random(), number)
            by_owner.setdefault(line.owner, []).append(row)
        return _best(by_owner, min(RANKS_MAX, max(self._own.ranks, 4 * most)))

    def _suits(self, needs: Needs) -> bool:
        meets = self._meets.get(needs)
        if meets is None:
            if len(self._meets) > 1000:
                self._meets.clear()
            me = self._members.me
            meets = self._meets[needs] = not unmet(me.capacity, me.traits, needs)
        return meets

    # ----------------------------------------------------------------- landing

    def _assign(self, sender: Contact, message: Assign) -> Done:
        self.assigned(message)
        return Done()

    def assigned(self, message: Assign) -> None:
        """Land this pilot's own units, and pass the rest on to one pilot of each region."""
        me = self._rpc.me.id
        others: dict[bytes, list[Landing]] = {}
        for landing in message.landings:
            if landing.pilot == me:
                self._land(landing, message)
                # what the master believes now; it does not know what has come free meanwhile
                taken = landing.needs.capacity
                free = plus(self._told.free, taken, -landing.count)
                left = Capacity(*(max(0, amount) for amount in free))
                self._told = self._ticket()._replace(free=left)
            else:
                others.setdefault(landing.pilot, []).append(landing)
        for region in divide(LOW, HIGH, list(others)):
            part = [landing for peer in region.peers for landing in others[peer]]
            self._tasks.spawn(self._assign_to(region.peers, message, tuple(part)))
        self._wanted_until = self._now() + WANTED_S
        self._wake.set()

    async def _assign_to(
        self, peers: tuple[bytes, ...], message: Assign, landings: tuple[Landing, ...]
    ) -> None:
        part = Assign.of(message.master, message.round, landings)
        for peer in peers[:DELEGATES_MAX]:
            contact = self._members.contact(peer)
            try:
                if contact is not None:
                    await self._rpc.call(contact, part, Done, PASS_ON_S)
                    return
            except CallFailed:
                self.counts["delegates_silent"] += 1
        self.counts["assignments_lost"] += len(landings)  # their homes post these units again

    def _land(self, landing: Landing, message: Assign) -> None:
        home = self._members.contact(landing.home)
        if home is None:
            return
        queue = landing.runtime_s is not None
        room = Room(
            landing.needs,
            landing.count,
            landing.runtime_s,
            landing.deadline_in_s,
            queue,
            landing.hold,
        )
        grant = self._reserve(landing.home, room)
        short = landing.count - len(grant.leases)
        self.counts["landed"] += len(grant.leases)
        self.counts["short"] += short
        self._rpc.tell(
            home,
            Seats.of(landing.id, grant.leases, short, landing.rank, message.master, message.round),
        )

    # ----------------------------------------------------------------- room

    def changed(self) -> None:
        """There may be more free capacity than before."""
        if self._wanted_until > 0.0 and self._now() < self._wanted_until and self._is_more():
            self._wake.set()

    def made(self, took_s: float) -> None:
        """A task that ran this long has left files here, and tasks that read them will be posted
        soon. Until then this pilot takes nothing else; unless homes learn of files too slowly for
        that to be worthwhile."""
        own = self._own
        self._made_at = self._now()
        patience_s = min(own.settle_s, own.settle_share * took_s)
        # (one at a time: where many tasks end, some seat would wait for ever)
        if self._hears_s <= patience_s and self._calm.is_set():
            self._settle(patience_s)

    def heard(self) -> None:
        """The home of such a task knows of its files."""
        self._hears_s += 0.2 * (min(1.0, self._now() - self._made_at) - self._hears_s)
        if self._settled_at > self._now() + SOON_S:
            self._settle(SOON_S)

    def _settle(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._settled_at = loop.time() + wait_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(wait_s, self._settled)
        self._calm.clear()

    def _settled(self) -> None:
        self._calm.set()
        if self._ticket().free.millicores > 0:
            self._again = True
            self._wake.set()

    def _is_more(self) -> bool:
        all_of_it = self._members.me.capacity.millicores
        return is_more(self._told, self._ticket(), all_of_it, self._config)

    async def run(self) -> None:
        again_s = self._own.idle_s
        while True:
            # counted from the last announcement, however often something else wakes this up
            due_s = max(0.0, self._said_at + again_s - self._now())
            try:
                async with asyncio.timeout(due_s if self._now() < self._wanted_until else None):
                    await self._wake.wait()
                await asyncio.sleep(self._own.say_gather_s)
                if not self._calm.is_set():
                    self._say_idle(settling=True)
                    await self._calm.wait()
            except TimeoutError:
                again_s = min(IDLE_S_MAX, 2 * again_s)
                self._said_at = self._now()
                self._again = self._ticket().free.millicores > 0
            self._wake.clear()
            again, self._again = self._again, False
            if self._now() < self._wanted_until and (again or self._is_more()):
                if not again:
                    again_s = self._own.idle_s
                self._say_idle()

    def _say_idle(self, settling: bool = False) -> None:
        master = self._site.master(self._site.name)
        contact = self._members.contact(master) if master is not None else None
        if contact is None:
            return
        self._told = ticket = self._ticket()
        self._said_at = self._now()
        latest = tuple(islice(reversed(self._held()), HELD_MAX))
        self.counts["idle_told"] += 1
        self._rpc.tell(contact, Idle.of(ticket, latest, settling))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _bounded(value: float) -> float:
    return max(-1e15, min(1e15, value)) if value == value else -1e15


def _local_and_remote(reads: Reads, held: Mapping[bytes, int]) -> tuple[int, int]:
    """The bytes of these files that are held here, and those that would have to be fetched."""
    local = remote = 0
    for file, size in reads:
        if file in held:
            local += size
        else:
            remote += size
    return local, remote


def _best(by_owner: dict[str, list[_Ranked]], count: int) -> list[tuple[int, float]]:
    """About as many lines, the same number for each owner: no owner's lines hide another's."""
    each = -(-count // max(1, len(by_owner)))
    named = [row for rows in by_owner.values() for row in heapq.nlargest(each, rows)]
    return [(number, _bounded(value)) for _, value, _, number in named]
