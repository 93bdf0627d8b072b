"""A site's master pilot: gathers what homes want, and assigns it in rounds.

Rules:
- A home says what it wants, and only what has changed; lists are checked by their length and said
  again if they differ. They go with their home.
- `wanted`, `settled` and `given` count from the first unit on: what was given and is not settled is
  on its way. What does not arrive is given again after a while. So any message may be lost.
- A round is called for by events: something is wanted, and some pilot may have room. All pilots
  hear the list and its changes when most of them may have room, and now and then; between, those
  who have said so hear an excerpt: what is new, and what reads the files they hold.
- What reads files is best left to who holds them: of several, those whose holders will be busy for
  longest go to others first, and nobody hears of more than there is room for.
- The sum of ranks is maximised over all bids of a round. It is only advice: see `pilot`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
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
OTHERS_MIN = 4  # lines that read files of others, in an excerpt
SEATS_MAX = 64  # of one pilot, in the matrix
AHEAD_MAX = 1000  # units that may wait in one pilot's queue
HOMES_MAX = 5000
MISFITS_MAX = 50_000
BUSY_LINES = 4
QUEUE_S_MIN = 0.02
CHUNK_S = 0.02  # of work at least that goes into a queue at once
SETTLED_S = 0.5  # after that it has settled, also if nobody was told
SURPRISING = 0.02  # of all pilots have room, and nobody knew
MANY = 0.5  # of all pilots may have room: then all are asked

#: who got least goes first, if nobody holds half a MiB more of what another one's task reads
FAVOUR = 500.0
#: lines with a deadline that are seated one after the other, before all the rest
DUE_MAX = 16


@dataclass(slots=True)
class _Order:
    """A line of the list, and how far it is done."""

    number: int
    home: bytes
    wanting: Wanting
    since: float
    given: int = 0
    given_at: float = 0.0
    due_at: float = math.inf

    @property
    def open(self) -> int:
        return self.wanting.wanted - self.given


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
        self.busy = asyncio.Event()  # there is much to choose from
        self._rpc = rpc
        self._members = members
        self._site = site
        self._pilot = pilot
        self._rng = rng
        self._config = config
        self._own = config.of(PilotsConfig)
        self._orders: dict[int, _Order] = {}
        self._by_home: dict[bytes, dict[int, int]] = {}
        self._list = List(rng.getrandbits(40))  # another master's versions are others
        self._reading: dict[bytes, set[int]] = {}  # file → lines that read it
        self._dated: set[int] = set()  # lines with a deadline
        self._choosy: dict[int, None] = {}  # lines that are not worth the same to all pilots
        self._plain: dict[int, None] = {}  # and those that are: they read nothing
        self._quick: set[int] = set()  # lines of short tasks: they may wait in a pilot's queue
        self._fresh: set[int] = set()  # lines since the last round
        self._rooms: dict[bytes, Ticket] = {}  # of those that may have some
        self._misfits: dict[tuple[bytes, Needs], bool] = {}
        self._held: dict[bytes, tuple[bytes, ...]] = {}
        self._holders: dict[bytes, set[bytes]] = {}  # the same by file
        self._settling: dict[bytes, float] = {}  # with room for what reads their files only, until
        self._due: dict[bytes, float] = {}  # when a pilot is expected to have room again
        self._asked: set[bytes] = set()  # pilots that have been asked since they came
        self._told = 0  # the version that all were told last
        self._swept_at = 0.0
        self._looked_at = 0.0  # for what never arrived
        self._shares = Shares()
        self._sweep_s = self._own.sweep_s  # ever longer, while what is believed is right
        self._next = rng.getrandbits(40)
        self._round = rng.getrandbits(40)
        self._wake = asyncio.Event()
        rpc.on(PostUnits, self._post)
        rpc.on(Idle, self._idle)
        members.listen(self._member_changed)

    # ----------------------------------------------------------------- what is wanted

    def _post(self, sender: Contact, message: PostUnits) -> UnitsPosted:
        mine = self._by_home.get(sender.id)
        if message.anew:
            self._forget(sender.id)
            mine = None
        if mine is None:
            if len(self._by_home) >= HOMES_MAX or (message.lines and not message.units):
                return UnitsPosted(again=True)
            mine = self._by_home[sender.id] = {}
        now = self._now()
        for wanting in message.units:
            self._want(sender.id, mine, wanting, now)
        lines = len(mine)
        if not mine:
            del self._by_home[sender.id]
        if self._needs_round(now):
            self._wake.set()
        return UnitsPosted(again=lines != message.lines, pilots=len(self._site.pilots()))

    def _want(self, home: bytes, mine: dict[int, int], wanting: Wanting, now: float) -> None:
        number = mine.get(wanting.id)
        if wanting.wanted <= wanting.settled:
            if number is not None:
                self._drop(number)
                del mine[wanting.id]
            return
        if number is None:
            if len(self._orders) >= self._own.lines_max:
                return  # its home hears that not all of it is here, and says it again
            self._next += 1
            number = mine[wanting.id] = self._next
            order = _Order(number, home, wanting, now - wanting.waited_s, wanting.settled)
            self._orders[number] = order
        else:
            order = self._orders[number]
            before, order.wanting = order.wanting, wanting
            order.given = max(order.given, wanting.settled)
            if (before.owner, before.deadline_in_s is None) != (
                wanting.owner,
                wanting.deadline_in_s is None,
            ) and number in self._list.lines:
                self._unlist(order)  # the pilots know it otherwise
        due_in_s = math.inf if wanting.deadline_in_s is None else wanting.deadline_in_s
        order.due_at = now + due_in_s
        self._relist(order)

    def _relist(self, order: _Order) -> None:
        """On the list are lines of which something is to be given."""
        listed = order.number in self._list.lines
        if order.open > 0 and not listed:
            w = order.wanting
            dated = w.deadline_in_s is not None
            line = Line(
                order.number, w.needs, w.waited_s, w.hangs_s, w.reads, w.avoid, w.rank,
                dated, w.owner,
            )  # fmt: skip
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
        elif order.open <= 0 and listed:
            self._unlist(order)

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
            self._holds(peer, ())
            self._due.pop(peer, None)
            self._settling.pop(peer, None)
            self._asked.discard(peer)
        if new.state == State.ALIVE and self._orders:
            self._wake.set()

    # ----------------------------------------------------------------- who has room

    def _idle(self, sender: Contact, message: Idle) -> None:
        self._rooms[sender.id] = message.ticket
        self._holds(sender.id, message.held)
        self._settling.pop(sender.id, None)
        if message.settling:
            self._settling[sender.id] = self._now() + self._own.settle_s + SETTLED_S
        if self._needs_round(self._now()):
            self._wake.set()

    def _holds(self, pilot: bytes, files: tuple[bytes, ...]) -> None:
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
                # also with an empty list: what was given may never have arrived
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
        """What was given and never arrived. Looked for now and then: there may be many lines."""
        if now - self._looked_at < self._own.patience_s / 4:
            return
        self._looked_at = now
        for order in self._orders.values():
            lost = order.given - order.wanting.settled
            if lost > 0 and now - order.given_at > self._own.patience_s:
                order.given = order.wanting.settled
                self.counts["given_again"] += lost
                self._relist(order)

    async def _hold_round(self) -> bool:
        """One round; False if nobody in it could be given anything."""
        now = self._now()
        me = self._rpc.me.id
        asked = self._candidates(now)
        sweeping = now - self._swept_at >= self._sweep_s  # what is believed of them may be wrong
        plain = len(self._plain) == len(self._list.lines)
        if plain and not sweeping and all(map(self._rooms.get, asked)):
            return self._share_out(asked)
        pilots = len(self._site.pilots())
        left = {n: s for n in self._choosy if (s := self._left_s(n, now)) > 0}
        if left:  # when the first of them is not any more, they are for everybody
            soonest_s = min(left.values())
            asyncio.get_running_loop().call_later(soonest_s + 0.001, self._wake.set)
        if not sweeping:
            asked = self._enough_of(asked, left)
            if not asked:
                return False
        everyone = len(asked) >= MANY * pilots and (pilots > 16 or len(asked) == pilots or sweeping)
        self._round += 1
        if everyone:
            self._swept_at = now
            asked = [m.contact.id for m in self._site.pilots()]
            base, came, went = self._list.since(self._told)
            self._told = self._list.version
        else:
            base, came, went = 0, self._excerpt(asked, left), ()
        young = tuple(left) if everyone else tuple(x.number for x in came if x.number in left)
        message = TaskList.of(
            me, self._round, base, self._list.version, came, went, LOW, HIGH,
            () if everyone else tuple(sorted(asked)), self._own.round_s, (), not everyone,
            young,
        )  # fmt: skip
        self._fresh.clear()
        self.counts["rounds"] += 1
        self.counts["rounds_of_all"] += everyone
        self.counts["asked"] += len(asked)
        believed = set(filter(self._may_have_room, asked))
        for pilot in asked:
            self._asked.add(pilot)
            self._rooms.pop(pilot, None)
        round = await self._pilot.lead(message)
        self.counts["bids"] += len(round.bids)
        if everyone:
            self._learn(round.bids, believed)
        landings = self._match(round.bids, left)
        if landings:
            self._pilot.assigned(Assign.of(me, message.round, tuple(landings)))
        return bool(landings) or bool(self._fresh - set(young))

    def _learn(self, bids: list[Bid], believed: set[bytes]) -> None:
        """All were asked: again soon, if some have room of which nothing was known."""
        roomy = {bid.pilot for bid in bids if bid.ticket.free.millicores > 0}
        surprising = len(roomy - believed) > SURPRISING * len(bids)
        longer_s = min(self._own.sweep_s_max, 2 * self._sweep_s)
        self._sweep_s = self._own.sweep_s if surprising else longer_s

    def _left_s(self, number: int, now: float) -> float:
        """For so long a line is left to those who hold its files: they may be about to say that
        they have room."""
        order, own = self._orders[number], self._own
        if not order.wanting.reads:
            return 0.0
        share_s = own.local_share * (order.wanting.runtime_s or 0.0)
        return order.since + min(own.local_s, share_s) - now

    def _enough_of(self, pilots: list[bytes], left: Collection[int]) -> list[bytes]:
        """Where few units meet many idle pilots: those who hold their files, and some others."""
        units = sum(self._orders[n].open for n in self._list.lines if n not in left)
        enough = 4 * units + 8 if units else 0
        if len(pilots) <= 2 * enough:
            return pilots
        wanted = {file for n in self._choosy for file, _ in self._orders[n].wanting.reads}
        holders = [p for p in pilots if not wanted.isdisjoint(self._held.get(p, ()))]
        open_lines = (n for n in self._list.lines if n not in left)
        kinds = {(self._orders[n].wanting.needs, n in self._quick) for n in open_lines}
        fitting = [p for p in pilots if any(self._fits(p, *kind) for kind in kinds)]
        some = self._rng.sample(fitting, min(enough, len(fitting)))
        return list(dict.fromkeys((*holders, *some)))

    def _share_out(self, pilots: list[bytes]) -> bool:
        """Tasks that read nothing: what pilots would bid is known, and they need not be asked."""
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
        found = self._misfits.get(key)
        if found is None:
            if len(self._misfits) > MISFITS_MAX:
                self._misfits.clear()
            found = self._misfits[key] = bool(unmet(member.capacity, member.traits, needs))
        return found

    def _excerpt(self, pilots: Collection[bytes], left: Collection[int]) -> tuple[Line, ...]:
        """Of the list: what these hold files of, what is new, and some that anybody may take."""
        chosen: dict[int, None] = {}
        for pilot in pilots:
            for file in self._held.get(pilot, ()):
                chosen.update(dict.fromkeys(self._reading.get(file, ())))
        chosen.update(dict.fromkeys(sorted(self._fresh)))
        plain = self._fitting(self._in_turn(self._plain), pilots)
        chosen.update(dict.fromkeys(islice(plain, PLAIN_MAX)))
        lines = self._list.lines
        if len(lines) > len(chosen):
            others = [n for n in self._choosy if n not in left and n not in chosen]
            most = 2 * len(pilots) + OTHERS_MIN
            longest = heapq.nlargest(most, self._fitting(others, pilots), key=self._free_at)
            chosen.update(dict.fromkeys(longest))
        return tuple(lines[n] for n in list(chosen)[:EXCERPT_MAX] if n in lines)

    def _in_turn(self, numbers: Iterable[int]) -> list[int]:
        """As they came; but where it matters, those first whose turn it is."""
        if not self._dated and not self._shares.contended:
            return list(numbers)

        def turn(number: int) -> tuple[float, float]:
            order = self._orders[number]
            return self._shares.given(order.wanting.owner), order.due_at

        return sorted(numbers, key=turn)

    def _fitting(self, numbers: Iterable[int], pilots: Collection[bytes]) -> Iterator[int]:
        """Lines that one of these pilots has room for, as far as that is known."""
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
        """When somebody who holds its files is expected to have room."""
        soonest = math.inf
        for file, _ in self._orders[number].wanting.reads:
            for pilot in self._holders.get(file, ()):
                soonest = min(soonest, self._due.get(pilot, 0.0))
        return soonest

    # ----------------------------------------------------------------- matching

    def _match(self, bids: list[Bid], left: Collection[int] = ()) -> list[Landing]:
        """Seats now, by the largest sum of ranks; then places in queues, in equal parts. Of what is
        left to a few, only seats: before it waits in their queues, others are asked."""
        now = self._now()
        # who has just come may be known to who passed the list on, and not here: next time
        bids = [bid for bid in bids if self._members.contact(bid.pilot) is not None]
        for bid in bids:
            self._rooms[bid.pilot] = bid.ticket  # also if it would have none of these
        bids = [bid for bid in bids if bid.ranks]
        numbers = {n for bid in bids for n, _ in bid.ranks if n in self._list.lines}
        orders = [self._orders[n] for n in sorted(numbers) if n in self._orders]
        index = {order.number: i for i, order in enumerate(orders)}
        tickets = [bid.ticket for bid in bids]
        self._shares.only({o.wanting.owner for o in self._orders.values() if o.open > 0})
        favoured = ""
        if self._shares.contended:  # of those who wait, and could get something here
            favoured = self._shares.next(o.wanting.owner for o in orders) if orders else ""
        value: dict[tuple[int, int], float] = {}
        ranked: dict[tuple[int, int], float] = {}
        for p, bid in enumerate(bids):
            for number, rank in bid.ranks:
                line = index.get(number)
                if line is not None:
                    value[p, line] = rank
                    ranked[p, line] = self._weighed(orders[line], rank, favoured)
        units = [order.open for order in orders]
        given: dict[tuple[int, int], int] = {}
        contended = self._shares.contended
        due = [
            line
            for line, order in enumerate(orders)
            if order.due_at < math.inf and (not contended or order.wanting.owner == favoured)
        ]
        due.sort(key=lambda line: orders[line].due_at)
        for lines in (*([line] for line in due[:DUE_MAX]), range(len(orders))):
            self._seat(lines, orders, tickets, units, ranked, given)
        waiting = [0 if o.number in left else n for o, n in zip(orders, units, strict=True)]
        if self._shares.contended:
            waiting = [0] * len(orders)  # nobody queues ahead of others who wait
        self._fill(bids, orders, tickets, waiting, given, value)
        landings = []
        for (p, line), count in given.items():
            order = orders[line]
            order.given += count
            order.given_at = now
            if self._shares.contended:
                cores = max(1, order.wanting.needs.capacity.millicores) / 1000
                self._shares.give(
                    order.wanting.owner, count * cores * (order.wanting.runtime_s or 1.0)
                )
            w = order.wanting
            hold = now - order.since > self._own.hold_after_s and not w.runtime_s
            landing = Landing(
                bids[p].pilot,
                order.home,
                w.id,
                w.needs,
                count,
                w.runtime_s,
                w.deadline_in_s,
                value[p, line],
                hold,
            )
            landings.append(landing)
            self._due[landing.pilot] = now + self._share_s(landing.pilot, order)
            self._relist(order)
        for bid, ticket in zip(bids, tickets, strict=True):
            self._rooms[bid.pilot] = ticket
        self.counts["assigned"] += sum(given.values())
        return landings

    def _weighed(self, order: _Order, rank: float, favoured: str) -> float:
        """Beside what other owners want. What an owner's own expression says is no more than that:
        it puts this owner's tasks in order, and not before those of others."""
        if not self._shares.contended:
            return rank
        if order.wanting.rank:
            rank = FAVOUR / 2 * math.tanh(rank / FAVOUR)
        return rank + FAVOUR * (order.wanting.owner == favoured)

    def _seat(
        self,
        lines: Iterable[int],
        orders: list[_Order],
        tickets: list[Ticket],
        units: list[int],
        ranked: dict[tuple[int, int], float],
        given: dict[tuple[int, int], int],
    ) -> None:
        """Of these lines as many units as there are seats, by the largest sum of ranks."""
        some = {line for line in lines if units[line] > 0}
        seats = [0] * len(tickets)
        ranks = Ranks()
        for (p, line), rank in ranked.items():
            if line in some:
                room = slots(tickets[p].free, orders[line].wanting.needs.capacity)
                seats[p] = max(seats[p], min(SEATS_MAX, room))
                if room:
                    ranks.add(p, line, rank)
        if not len(ranks):
            return
        wanted = [n if line in some else 0 for line, n in enumerate(units)]
        chosen, exactly = assign(seats, wanted, ranks, self._own.cells_max)
        self.counts["exact" if exactly else "greedy"] += 1
        for p, line, count in chosen:
            needs = orders[line].wanting.needs.capacity
            count = min(count, slots(tickets[p].free, needs), units[line])
            if count > 0:
                tickets[p] = tickets[p]._replace(free=plus(tickets[p].free, needs, -count))
                units[line] -= count
                given[p, line] = given.get((p, line), 0) + count

    def _fill(
        self,
        bids: list[Bid],
        orders: list[_Order],
        tickets: list[Ticket],
        units: list[int],
        given: dict[tuple[int, int], int],
        value: dict[tuple[int, int], float],
    ) -> None:
        """Short tasks wait in the pilots' queues, where they begin without a round of their own."""
        for line, order in enumerate(orders):
            runtime_s = order.wanting.runtime_s
            if units[line] <= 0 or runtime_s is None:
                continue
            suited = [p for p in range(len(bids)) if (p, line) in value]
            home = order.home  # has enough to do with all the others
            suited.sort(key=lambda p: (bids[p].pilot == home, -value[p, line], -tickets[p].queue_s))
            for place, p in enumerate(suited):
                if units[line] <= 0:
                    break
                # half of what is fair: who is done first takes of the rest
                fair = -(-units[line] // (2 * (len(suited) - place)))
                least = int(CHUNK_S / max(1e-5, self._share_s(bids[p].pilot, order)))
                count = max(1, least if bids[p].pilot == home else max(fair, least))
                count = min(units[line], count, self._ahead(bids[p].pilot, tickets[p], order))
                if count > 0:
                    share_s = count * self._share_s(bids[p].pilot, order)
                    cores = count * order.wanting.needs.capacity.millicores
                    tickets[p] = tickets[p]._replace(
                        queue_s=max(0.0, tickets[p].queue_s - share_s),
                        queue_units=max(0, tickets[p].queue_units - count),
                        queue_cores=max(0, tickets[p].queue_cores - cores),
                    )
                    units[line] -= count
                    given[p, line] = given.get((p, line), 0) + count

    def _ahead(self, pilot: bytes, ticket: Ticket, order: _Order) -> int:
        by_time = int(ticket.queue_s / max(1e-5, self._share_s(pilot, order)))
        by_share = ticket.queue_cores // max(1, order.wanting.needs.capacity.millicores)
        return max(0, min(ticket.queue_units, AHEAD_MAX, max(by_time, by_share)))

    def _share_s(self, pilot: bytes, order: _Order) -> float:
        """Seconds of all of a pilot that one such unit takes."""
        member = self._members.get(pilot)
        capacity = member.capacity if member is not None else Capacity(millicores=1000)
        speed = (member.traits.speed if member is not None else 1.0) or 1.0
        at_once = max(1, slots(capacity, order.wanting.needs.capacity))
        return (order.wanting.runtime_s or 0.0) / speed / at_once

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
