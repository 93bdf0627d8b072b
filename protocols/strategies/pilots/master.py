"""The master pilot of a site: collects the units that homes post, and assigns them in rounds.

Rules:
- A home posts what it wants, and only what has changed. Both sides compare the length of the list,
  and the home posts all of it again if they differ. A list is dropped when its home dies.
- `wanted`, `settled` and `assigned` count from the first unit on: units that are assigned and not
  settled are on their way. Units that do not arrive are assigned again after a while. So any
  message may be lost.
- Events start a round: something is wanted, and some pilot may have free capacity. All pilots
  receive the list and its changes when most of them may have free capacity, and every so often. In
  between, the pilots that announced free capacity receive an excerpt: the new lines, and those that
  read files they hold.
- A line that reads files is best reserved for the pilots that hold them: of several such lines, the
  ones whose holders will be busy for longest are offered to other pilots first, and no pilot
  receives more lines than there is capacity for.
- The sum of ranks is maximised over all bids of a round. The result is only advice: see `pilot`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ...capacity.matching import plus, slots, unmet
from ...config import Config
from ...membership.members import Members, State
from ...wire.messages import Capacity, Contact, Member, Needs, Ticket
from ...wire.rpc import Rpc
from ..shares import Shares
from .assignment import Ranks, assign
from .config import PilotsConfig
from .listing import List
from .messages import Assign, Bid, Idle, Landing, Line, PostUnits, TaskList, UnitsPosted, Wanting
from .pilot import HIGH, LOW, Pilot
from .ranking import by_default
from .site import SiteView

EXCERPT_MAX = 400
PLAIN_MAX = 64
OTHERS_MIN = 4  # lines in an excerpt that read files which its pilots do not hold
SEATS_MAX = 64  # of one pilot, in the matrix
AHEAD_MAX = 1000  # units that may wait in one pilot's queue
HOMES_MAX = 5000
MISFITS_MAX = 50_000
BUSY_LINES = 4
QUEUE_S_MIN = 0.02
CHUNK_S = 0.02  # of work at least that goes into a queue at once
SETTLED_S = 0.5  # after this a pilot has settled, even if no message said so
SURPRISING = 0.02  # share of all pilots that had free capacity, unknown to the master
MANY = 0.5  # share of all pilots that may have free capacity: then all are asked

#: the owner that got least goes first, unless a pilot holds half a MiB more of what another owner's
#: task reads
FAVOUR = 500.0
#: lines with a deadline that are seated one after the other, before all the rest
DUE_MAX = 16


@dataclass(slots=True)
class _Order:
    """A line of the list, and its progress."""

    number: int
    home: bytes
    wanting: Wanting
    since: float
    assigned: int = 0
    assigned_at: float = 0.0
    due_at: float = math.inf

    @property
    def open(self) -> int:
        return self.wanting.wanted - self.assigned


@dataclass(slots=True)
class _Table:
    """The bids of a round, the orders they name, and the units that were assigned so far.

    A pair is the index of a bid and the index of an order."""

    bids: list[Bid]
    orders: list[_Order]
    tickets: list[Ticket]  # of each bid, less what was assigned of it
    units: list[int]  # of each order, still to be assigned
    ranks: dict[tuple[int, int], float] = field(default_factory=dict)
    weighed: dict[tuple[int, int], float] = field(default_factory=dict)  # ranks among all owners
    assigned: dict[tuple[int, int], int] = field(default_factory=dict)

    def assign(self, bid: int, line: int, count: int) -> None:
        self.units[line] -= count
        self.assigned[bid, line] = self.assigned.get((bid, line), 0) + count


class Master:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        site: SiteView,
        pilot: Pilot,
        rng: random.Random,
        config: Config,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.busy = asyncio.Event()  # there are many lines to choose from
        self._rpc = rpc
        self._members = members
        self._site = site
        self._pilot = pilot
        self._rng = rng
        self._config = config
        self._own = config.of(PilotsConfig)
        self._orders: dict[int, _Order] = {}
        self._by_home: dict[bytes, dict[int, int]] = {}  # home → its own numbers → line numbers
        self._list = List(rng.getrandbits(40))  # random, as each master has its own versions
        self._reading: dict[bytes, set[int]] = {}  # file → lines that read it
        self._dated: set[int] = set()  # lines with a deadline
        self._choosy: dict[int, None] = {}  # lines that are not worth the same to all pilots
        self._plain: dict[int, None] = {}  # lines that are: they read nothing
        self._quick: set[int] = set()  # lines of short tasks: they may wait in a pilot's queue
        self._fresh: set[int] = set()  # lines since the last round
        self._rooms: dict[bytes, Ticket] = {}  # of pilots that may have free capacity
        self._misfits: dict[tuple[bytes, Needs], bool] = {}
        self._held: dict[bytes, tuple[bytes, ...]] = {}  # pilot → files
        self._holders: dict[bytes, set[bytes]] = {}  # the same by file
        self._settling: dict[
            bytes, float
        ] = {}  # until then, a pilot takes only readers of its files
        self._due: dict[bytes, float] = {}  # when a pilot is expected to have capacity again
        self._asked: set[bytes] = set()  # pilots that have been asked since they joined
        self._told = 0  # the version of the list that all pilots have
        self._swept_at = 0.0
        self._looked_at = 0.0  # when units that never arrived were last looked for
        self._shares = Shares()
        self._sweep_s = self._own.sweep_s  # longer each time, while the master's beliefs hold
        self._next_number = rng.getrandbits(40)
        self._round = rng.getrandbits(40)
        self._wake = asyncio.Event()
        rpc.on(PostUnits, self._post)
        rpc.on(Idle, self._idle)
        members.listen(self._member_changed)

    # ----------------------------------------------------------------- what is wanted

    def _post(self, sender: Contact, message: PostUnits) -> UnitsPosted:
        numbers = self._by_home.get(sender.id)
        if message.anew:
            self._forget(sender.id)
            numbers = None
        if numbers is None:
            if len(self._by_home) >= HOMES_MAX or (message.lines and not message.units):
                return UnitsPosted(again=True)
            numbers = self._by_home[sender.id] = {}
        now = self._now()
        for wanting in message.units:
            self._want(sender.id, numbers, wanting, now)
        lines = len(numbers)
        if not numbers:
            del self._by_home[sender.id]
        if self._needs_round(now):
            self._wake.set()
        return UnitsPosted(again=lines != message.lines, pilots=len(self._site.pilots()))

    def _want(self, home: bytes, numbers: dict[int, int], wanting: Wanting, now: float) -> None:
        number = numbers.get(wanting.id)
        if wanting.wanted <= wanting.settled:
            if number is not None:
                self._drop(number)
                del numbers[wanting.id]
            return
        if number is None:
            if len(self._orders) >= self._own.lines_max:
                return  # its home learns that not all of it is here, and posts it again
            self._next_number += 1
            number = numbers[wanting.id] = self._next_number
            order = _Order(number, home, wanting, now - wanting.waited_s, wanting.settled)
            self._orders[number] = order
        else:
            order = self._orders[number]
            before, order.wanting = order.wanting, wanting
            order.assigned = max(order.assigned, wanting.settled)
            if _differ_for_pilots(before, wanting) and number in self._list.lines:
                self._unlist(order)
        due_in_s = math.inf if wanting.deadline_in_s is None else wanting.deadline_in_s
        order.due_at = now + due_in_s
        self._relist(order)

    def _relist(self, order: _Order) -> None:
        """A line is on the list as long as it has units to assign."""
        listed = order.number in self._list.lines
        if order.open > 0 and not listed:
            self._enlist(order)
        elif order.open <= 0 and listed:
            self._unlist(order)

    def _enlist(self, order: _Order) -> None:
        w = order.wanting
        dated = w.deadline_in_s is not None
        line = Line(
            order.number, w.needs, w.waited_s, w.hangs_s, w.reads, w.avoid, w.rank, dated, w.owner
        )
        if dated:
            self._dated.add(order.number)
        self._list.put(line)
        if len(self._list.lines) > BUSY_LINES:
            self.busy.set()
        self._fresh.add(order.number)
        for file, _ in w.reads:
            self._reading.setdefault(file, set()).add(order.number)
        (self._choosy if w.reads or w.rank else self._plain)[order.number] = None
        if w.runtime_s is not None and w.runtime_s < self._config.queue_s_max:
            self._quick.add(order.number)

    def _unlist(self, order: _Order) -> None:
        self._list.drop(order.number)
        self._fresh.discard(order.number)
        self._choosy.pop(order.number, None)
        self._plain.pop(order.number, None)
        self._quick.discard(order.number)
        self._dated.discard(order.number)
        for file, _ in order.wanting.reads:
            readers = self._reading.get(file)
            if readers is not None:
                readers.discard(order.number)
                if not readers:
                    del self._reading[file]

    def _drop(self, number: int) -> None:
        order = self._orders.pop(number, None)
        if order is not None:
            self._unlist(order)

    def _forget(self, home: bytes) -> None:
        for number in self._by_home.pop(home, {}).values():
            self._drop(number)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        peer = new.contact.id
        if new.state >= State.DEAD or (old is not None and old.boot != new.boot):
            self._forget(peer)
            self._rooms.pop(peer, None)
            self._set_held(peer, ())
            self._due.pop(peer, None)
            self._settling.pop(peer, None)
            self._asked.discard(peer)
        if new.state == State.ALIVE and self._orders:
            self._wake.set()

    # ----------------------------------------------------------------- free capacity

    def _idle(self, sender: Contact, message: Idle) -> None:
        self._rooms[sender.id] = message.ticket
        self._set_held(sender.id, message.held)
        self._settling.pop(sender.id, None)
        if message.settling:
            self._settling[sender.id] = self._now() + self._own.settle_s + SETTLED_S
        if self._needs_round(self._now()):
            self._wake.set()

    def _set_held(self, pilot: bytes, files: tuple[bytes, ...]) -> None:
        for file in self._held.pop(pilot, ()):
            holders = self._holders[file]
            holders.discard(pilot)
            if not holders:
                del self._holders[file]
        if files:
            self._held[pilot] = files = tuple(dict.fromkeys(files))
        for file in files:
            self._holders.setdefault(file, set()).add(pilot)

    def _candidates(self, now: float) -> list[bytes]:
        pilots = [m.contact.id for m in self._site.pilots()]
        if now - self._swept_at >= self._sweep_s:
            return pilots
        return [p for p in pilots if p not in self._asked or self._may_have_room(p)]

    def _may_have_room(self, pilot: bytes) -> bool:
        ticket = self._rooms.get(pilot)
        if ticket is None:
            return False
        settles = self._now() < self._settling.get(pilot, 0.0)
        if settles and self._reading.keys().isdisjoint(self._held.get(pilot, ())):
            return False
        quick = bool(self._quick) and ticket.queue_s > QUEUE_S_MIN and ticket.queue_units > 0
        return quick or ticket.free.millicores > 0

    def _needs_round(self, now: float) -> bool:
        if not self._list.lines:
            return False
        if now - self._swept_at >= self._sweep_s:
            return True
        return len(self._asked) < len(self._site.pilots()) or any(
            map(self._may_have_room, self._rooms)
        )

    # ----------------------------------------------------------------- rounds

    async def run(self) -> None:
        while True:
            try:
                # also with an empty list: assigned units may never have arrived
                most_s = min(self._sweep_s, self._own.patience_s)
                async with asyncio.timeout(most_s if self._orders else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await asyncio.sleep(self._own.gather_s)
            self._take_back(self._now())
            while self._needs_round(self._now()):
                if not await self._hold_round():
                    break

    def _take_back(self, now: float) -> None:
        """Take back units that were assigned and never arrived. Not looked for every time: there
        may be many lines."""
        if now - self._looked_at < self._own.patience_s / 4:
            return
        self._looked_at = now
        for order in self._orders.values():
            lost = order.assigned - order.wanting.settled
            if lost > 0 and now - order.assigned_at > self._own.patience_s:
                order.assigned = order.wanting.settled
                self.counts["given_again"] += lost
                self._relist(order)

    async def _hold_round(self) -> bool:
        """One round; False if nothing could be assigned in it."""
        now = self._now()
        asked = self._candidates(now)
        sweeping = now - self._swept_at >= self._sweep_s  # the master's beliefs may be wrong
        if not sweeping and self._knows_all_bids_of(asked):
            return self._share_out(asked)
        reserved = self._reserved(now)
        if not sweeping:
            asked = self._enough_of(asked, reserved)
            if not asked:
                return False
        everyone = self._are_many(asked, sweeping)
        self._round += 1
        if everyone:
            self._swept_at = now
            asked = [m.contact.id for m in self._site.pilots()]
        message = self._task_list(asked, reserved, everyone)
        self.counts["rounds"] += 1
        self.counts["rounds_of_all"] += everyone
        believed = self._begin_round(asked)
        bids = (await self._pilot.lead(message)).bids
        self.counts["bids"] += len(bids)
        if everyone:
            self._learn(bids, believed)
        landings = self._match(bids, reserved)
        if landings:
            self._pilot.assigned(Assign.of(self._rpc.me.id, message.round, tuple(landings)))
        return bool(landings) or bool(self._fresh - set(message.young))

    def _begin_round(self, asked: list[bytes]) -> set[bytes]:
        """The pilots that are believed to have free capacity, before they are asked."""
        self._fresh.clear()
        self.counts["asked"] += len(asked)
        believed = set(filter(self._may_have_room, asked))
        for pilot in asked:
            self._asked.add(pilot)
            self._rooms.pop(pilot, None)
        return believed

    def _knows_all_bids_of(self, pilots: list[bytes]) -> bool:
        """All lines read nothing, and each of these pilots has said what it has free."""
        plain = len(self._plain) == len(self._list.lines)
        return plain and all(map(self._rooms.get, pilots))

    def _are_many(self, asked: list[bytes], sweeping: bool) -> bool:
        """So many pilots are to be asked that all might as well be."""
        pilots = len(self._site.pilots())
        return len(asked) >= MANY * pilots and (pilots > 16 or len(asked) == pilots or sweeping)

    def _task_list(self, asked: list[bytes], reserved: Collection[int], everyone: bool) -> TaskList:
        among: tuple[bytes, ...] = ()
        if everyone:
            base, came, went = self._list.since(self._told)
            self._told = self._list.version
            young = tuple(reserved)
        else:
            base, came, went = 0, self._excerpt(asked, reserved), ()
            young = tuple(line.number for line in came if line.number in reserved)
            among = tuple(sorted(asked))
        return TaskList.of(
            self._rpc.me.id, self._round, base, self._list.version, came, went, LOW, HIGH,
            among, self._own.round_s, (), not everyone, young,
        )  # fmt: skip

    def _learn(self, bids: list[Bid], believed: set[bytes]) -> None:
        """All pilots were asked: ask all again soon if some had free capacity that the master did
        not know of."""
        roomy = {bid.pilot for bid in bids if bid.ticket.free.millicores > 0}
        surprising = len(roomy - believed) > SURPRISING * len(bids)
        longer_s = min(self._own.sweep_s_max, 2 * self._sweep_s)
        self._sweep_s = self._own.sweep_s if surprising else longer_s

    def _reserved(self, now: float) -> dict[int, float]:
        """The lines that are reserved for the pilots that hold their files; and for how long."""
        reserved = {n: s for n in self._choosy if (s := self._reserved_s(n, now)) > 0}
        if reserved:  # a round for everybody as soon as the first of them is reserved no more
            soonest_s = min(reserved.values())
            asyncio.get_running_loop().call_later(soonest_s + 0.001, self._wake.set)
        return reserved

    def _reserved_s(self, number: int, now: float) -> float:
        """How long a line is still reserved for the pilots that hold its files: they may be about
        to announce free capacity."""
        order, own = self._orders[number], self._own
        if not order.wanting.reads:
            return 0.0
        share_s = own.local_share * (order.wanting.runtime_s or 0.0)
        return order.since + min(own.local_s, share_s) - now

    def _enough_of(self, pilots: list[bytes], reserved: Collection[int]) -> list[bytes]:
        """For few units and many idle pilots: those that hold their files, and some others."""
        open_lines = [n for n in self._list.lines if n not in reserved]
        units = sum(self._orders[n].open for n in open_lines)
        enough = 4 * units + 8 if units else 0
        if len(pilots) <= 2 * enough:
            return pilots
        kinds = {(self._orders[n].wanting.needs, n in self._quick) for n in open_lines}
        fitting = [p for p in pilots if any(self._fits(p, *kind) for kind in kinds)]
        some = self._rng.sample(fitting, min(enough, len(fitting)))
        return list(dict.fromkeys((*self._holders_among(pilots), *some)))

    def _holders_among(self, pilots: list[bytes]) -> list[bytes]:
        """Those that hold a file which some line reads."""
        wanted = {file for n in self._choosy for file, _ in self._orders[n].wanting.reads}
        return [p for p in pilots if not wanted.isdisjoint(self._held.get(p, ()))]

    def _share_out(self, pilots: list[bytes]) -> bool:
        """A round without messages, for lines that read nothing: the bids of pilots are known."""
        self._round += 1
        self.counts["rounds_of_none"] += 1
        self._fresh.clear()
        bids = []
        now = self._now()
        lines = [self._orders[n] for n in self._in_turn(self._plain)[:EXCERPT_MAX]]
        for pilot in pilots:
            member = self._members.get(pilot)
            if member is None:
                continue
            ranks = []
            for order in lines:
                w = order.wanting
                if pilot not in w.avoid and not self._unmet(member, w.needs):
                    value = by_default(0, 0, member.traits.speed, now - order.since, w.hangs_s)
                    ranks.append((order.number, value))
            bids.append(Bid(pilot, self._rooms[pilot], tuple(ranks[:512])))
        landings = self._match(bids)
        for bid in bids:
            if not bid.ranks:
                self._rooms.pop(bid.pilot, None)
        if landings:
            self._pilot.assigned(Assign.of(self._rpc.me.id, self._round, tuple(landings)))
        return bool(landings)

    def _unmet(self, member: Member, needs: Needs) -> bool:
        key = (member.contact.id, needs)
        misfit = self._misfits.get(key)
        if misfit is None:
            if len(self._misfits) > MISFITS_MAX:
                self._misfits.clear()
            misfit = self._misfits[key] = bool(unmet(member.capacity, member.traits, needs))
        return misfit

    def _excerpt(self, pilots: Collection[bytes], reserved: Collection[int]) -> tuple[Line, ...]:
        """The part of the list for these pilots: lines that read files they hold, new lines, and
        some that any pilot may take."""
        chosen: dict[int, None] = {}
        for pilot in pilots:
            for file in self._held.get(pilot, ()):
                chosen.update(dict.fromkeys(self._reading.get(file, ())))
        chosen.update(dict.fromkeys(sorted(self._fresh)))
        plain = self._fitting(self._in_turn(self._plain), pilots)
        chosen.update(dict.fromkeys(islice(plain, PLAIN_MAX)))
        lines = self._list.lines
        if len(lines) > len(chosen):
            others = [n for n in self._choosy if n not in reserved and n not in chosen]
            most = 2 * len(pilots) + OTHERS_MIN
            longest = heapq.nlargest(most, self._fitting(others, pilots), key=self._free_at)
            chosen.update(dict.fromkeys(longest))
        return tuple(lines[n] for n in list(chosen)[:EXCERPT_MAX] if n in lines)

    def _in_turn(self, numbers: Iterable[int]) -> list[int]:
        """In the order they came; or, with deadlines or several owners, by whose turn it is."""
        if not self._dated and not self._shares.contended:
            return list(numbers)

        def turn(number: int) -> tuple[float, float]:
            order = self._orders[number]
            return self._shares.given(order.wanting.owner), order.due_at

        return sorted(numbers, key=turn)

    def _fitting(self, numbers: Iterable[int], pilots: Collection[bytes]) -> Iterator[int]:
        """Lines that one of these pilots has capacity for, as far as the master knows."""
        known: dict[tuple[Needs, bool], bool] = {}
        for number in numbers:
            kind = (self._orders[number].wanting.needs, number in self._quick)
            if kind not in known:
                known[kind] = any(self._fits(pilot, *kind) for pilot in pilots)
            if known[kind]:
                yield number

    def _fits(self, pilot: bytes, needs: Needs, quick: bool) -> bool:
        member, ticket = self._members.get(pilot), self._rooms.get(pilot)
        if member is None or self._unmet(member, needs):
            return False
        if ticket is None or slots(ticket.free, needs.capacity):
            return True
        return quick and ticket.queue_units > 0

    def _free_at(self, number: int) -> float:
        """When a pilot that holds files of this line is expected to have capacity."""
        soonest = math.inf
        for file, _ in self._orders[number].wanting.reads:
            for pilot in self._holders.get(file, ()):
                soonest = min(soonest, self._due.get(pilot, 0.0))
        return soonest

    # ----------------------------------------------------------------- matching

    def _match(self, bids: list[Bid], reserved: Collection[int] = ()) -> list[Landing]:
        """Seats now, by the largest sum of ranks; then places in queues, in equal parts. Reserved
        lines get seats only: before their units wait in the holders' queues, others are asked."""
        now = self._now()
        bids = self._known(bids)
        orders = self._named_by(bids)
        self._shares.only({o.wanting.owner for o in self._orders.values() if o.open > 0})
        favoured = self._favoured(orders)
        table = self._table(bids, orders, favoured)
        for line in self._due_lines(orders, favoured):
            self._seat([line], table)
        self._seat(range(len(orders)), table)
        self._fill(table, reserved)
        landings = [self._landing(table, *pair, now) for pair in table.assigned]
        for bid, ticket in zip(bids, table.tickets, strict=True):
            self._rooms[bid.pilot] = ticket
        self.counts["assigned"] += sum(table.assigned.values())
        return landings

    def _known(self, bids: list[Bid]) -> list[Bid]:
        """The bids that name lines. A pilot that has just joined may be known to the peer that
        passed the list on, and not here: it is in the next round."""
        bids = [bid for bid in bids if self._members.contact(bid.pilot) is not None]
        for bid in bids:
            self._rooms[bid.pilot] = bid.ticket  # also if it wants none of these lines
        return [bid for bid in bids if bid.ranks]

    def _named_by(self, bids: list[Bid]) -> list[_Order]:
        numbers = {n for bid in bids for n, _ in bid.ranks if n in self._list.lines}
        return [self._orders[n] for n in sorted(numbers) if n in self._orders]

    def _favoured(self, orders: list[_Order]) -> str:
        """The owner that got least, of those that wait and could get something in this round."""
        if not self._shares.contended or not orders:
            return ""
        return self._shares.next(order.wanting.owner for order in orders)

    def _table(self, bids: list[Bid], orders: list[_Order], favoured: str) -> _Table:
        tickets, units = [bid.ticket for bid in bids], [order.open for order in orders]
        table = _Table(bids, orders, tickets, units)
        index = {order.number: line for line, order in enumerate(orders)}
        for p, bid in enumerate(bids):
            for number, rank in bid.ranks:
                line = index.get(number)
                if line is not None:
                    table.ranks[p, line] = rank
                    table.weighed[p, line] = self._weighed(orders[line], rank, favoured)
        return table

    def _due_lines(self, orders: list[_Order], favoured: str) -> list[int]:
        """Lines with a deadline, the earliest first; where owners share, only the favoured one."""
        contended = self._shares.contended
        due = [
            line
            for line, order in enumerate(orders)
            if order.due_at < math.inf and (not contended or order.wanting.owner == favoured)
        ]
        due.sort(key=lambda line: orders[line].due_at)
        return due[:DUE_MAX]

    def _landing(self, table: _Table, p: int, line: int, now: float) -> Landing:
        """Note that these units are assigned to that pilot."""
        pilot, order, count = table.bids[p].pilot, table.orders[line], table.assigned[p, line]
        order.assigned += count
        order.assigned_at = now
        w = order.wanting
        if self._shares.contended:
            cores = max(1, w.needs.capacity.millicores) / 1000
            self._shares.give(w.owner, count * cores * (w.runtime_s or 1.0))
        hold = now - order.since > self._own.hold_after_s and not w.runtime_s
        self._due[pilot] = now + self._share_s(pilot, order)
        self._relist(order)
        return Landing(
            pilot, order.home, w.id, w.needs, count, w.runtime_s, w.deadline_in_s,
            table.ranks[p, line], hold,
        )  # fmt: skip

    def _weighed(self, order: _Order, rank: float, favoured: str) -> float:
        """A rank that can be compared with those of other owners. An owner's own expression only
        orders the tasks of this owner: it does not put them before those of others."""
        if not self._shares.contended:
            return rank
        if order.wanting.rank:
            rank = FAVOUR / 2 * math.tanh(rank / FAVOUR)
        return rank + FAVOUR * (order.wanting.owner == favoured)

    def _seat(self, lines: Iterable[int], table: _Table) -> None:
        """Assign as many units of these lines as there are seats, by the largest sum of ranks."""
        some = {line for line in lines if table.units[line] > 0}
        seats, ranks = _seats(some, table)
        if not len(ranks):
            return
        wanted = [n if line in some else 0 for line, n in enumerate(table.units)]
        chosen, exactly = assign(seats, wanted, ranks, self._own.cells_max)
        self.counts["exact" if exactly else "greedy"] += 1
        tickets = table.tickets
        for p, line, count in chosen:
            needs = table.orders[line].wanting.needs.capacity
            count = min(count, slots(tickets[p].free, needs), table.units[line])
            if count > 0:
                tickets[p] = tickets[p]._replace(free=plus(tickets[p].free, needs, -count))
                table.assign(p, line, count)

    def _fill(self, table: _Table, reserved: Collection[int]) -> None:
        """Short tasks wait in the pilots' queues, where they start without a round of their own;
        but not ahead of other owners that wait."""
        if self._shares.contended:
            return
        for line, order in enumerate(table.orders):
            if order.number not in reserved and order.wanting.runtime_s is not None:
                self._queue(line, order, table)

    def _queue(self, line: int, order: _Order, table: _Table) -> None:
        bids, tickets = table.bids, table.tickets
        home = order.home  # comes last: it has enough to do with all the others
        suited = [p for p in range(len(bids)) if (p, line) in table.ranks]
        suited.sort(
            key=lambda p: (bids[p].pilot == home, -table.ranks[p, line], -tickets[p].queue_s)
        )
        for place, p in enumerate(suited):
            if table.units[line] <= 0:
                return
            each_s = self._share_s(bids[p].pilot, order)
            # half of a fair part: the pilots that finish first take of the rest
            fair = -(-table.units[line] // (2 * (len(suited) - place)))
            least = int(CHUNK_S / max(1e-5, each_s))
            count = max(1, least if bids[p].pilot == home else max(fair, least))
            count = min(table.units[line], count, self._ahead(bids[p].pilot, tickets[p], order))
            if count > 0:
                cores = count * order.wanting.needs.capacity.millicores
                tickets[p] = tickets[p]._replace(
                    queue_s=max(0.0, tickets[p].queue_s - count * each_s),
                    queue_units=max(0, tickets[p].queue_units - count),
                    queue_cores=max(0, tickets[p].queue_cores - cores),
                )
                table.assign(p, line, count)

    def _ahead(self, pilot: bytes, ticket: Ticket, order: _Order) -> int:
        by_time = int(ticket.queue_s / max(1e-5, self._share_s(pilot, order)))
        by_share = ticket.queue_cores // max(1, order.wanting.needs.capacity.millicores)
        return max(0, min(ticket.queue_units, AHEAD_MAX, max(by_time, by_share)))

    def _share_s(self, pilot: bytes, order: _Order) -> float:
        """Seconds for which one such unit would take up a whole pilot."""
        member = self._members.get(pilot)
        capacity = member.capacity if member is not None else Capacity(millicores=1000)
        speed = (member.traits.speed if member is not None else 1.0) or 1.0
        at_once = max(1, slots(capacity, order.wanting.needs.capacity))
        return (order.wanting.runtime_s or 0.0) / speed / at_once

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _differ_for_pilots(before: Wanting, now: Wanting) -> bool:
    """The pilots must hear of the line again: it has another owner, or got or lost a deadline."""
    if before.owner != now.owner:
        return True
    return (before.deadline_in_s is None) != (now.deadline_in_s is None)


def _seats(lines: Collection[int], table: _Table) -> tuple[list[int], Ranks]:
    """The seats of each pilot for these lines, and their ranks there."""
    seats = [0] * len(table.tickets)
    ranks = Ranks()
    for (p, line), rank in table.weighed.items():
        if line in lines:
            room = slots(table.tickets[p].free, table.orders[line].wanting.needs.capacity)
            seats[p] = max(seats[p], min(SEATS_MAX, room))
            if room:
                ranks.add(p, line, rank)
    return seats, ranks
