"""Questions to the layer: a question walks along the ring from node to node; the last one answers.

Rules:
- A question starts with the least loaded and goes on in order. Among molecules of one value none is
  better than another: so it starts anywhere among them, and then takes those before its start; or
  all questions would start with the same ones, and walk past those that others have taken. After a
  few nodes in a row that have nothing, hardly anything is left there: then it goes on with the next
  value.
- A node gives what it has, and passes the question on with all that was found. A message may be
  lost, or a node on the way may die: then the home asks again, and each node makes sure that the
  next one has the question, or passes it over. A node answers a repeated question as before.
- A question that finds too little leaves a wish where idle peers would appear, and where the least
  loaded ones would. Not earlier: a resource that appears goes to the oldest wish, and must not go
  to a home that has enough.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable

from ...capacity.matching import unmet
from ...config import Config
from ...membership.members import Members, State
from ...tasks import Tasks
from ...wire.messages import Contact, Done, Needs, ReturnLeases
from ...wire.rpc import CallFailed, RoundTrip, Rpc
from .config import ChemicalConfig
from .holder import Wish, room
from .kinds import ResourceKind, kind_of
from .layer import Layer
from .messages import Found, Meta, Range, Ranged
from .scale import STEPS, place, stretch_from, tie

#: units are divided among this many resources, if there are: few units get one each
DEALT_TO = 32
#: the legs: searching, then leaving wishes where idle peers would appear, and where others would
SEARCH, FOR_IDLE, FOR_OTHERS = range(3)
#: nodes that a question may visit, plus two for each unit
NODES_MIN = 32
#: nodes at which a wish is left, on each leg
WISHED_AT = 8
#: resources in one part of an answer
ROWS_MAX = 12
#: seconds of work that are worth a capture
WORTH_S, TOGETHER_MAX = 0.005, 16
#: how many nodes fewer are asked in a row, if none was idle a moment ago
DOUBT = 6
GIVEN_MAX = 1024
WALKS_MAX, PEERS_EACH, UNITS_EACH = 8, 16, 3
GIVEN_S = 10.0
CAREFUL_CALL_S = 0.5
CAREFUL_S = 3.0
KINDS_KNOWN_MAX = 256
AVOID_MAX = 64
UNITS_MAX = 100_000


class _Asked:
    """A question whose answer comes in parts, in any order, some of them twice."""

    def __init__(self) -> None:
        self.parts: dict[int, Ranged] = {}
        self.new: list[Ranged] = []
        self.stir = asyncio.Event()

    def add(self, part: Ranged) -> None:
        if part.part not in self.parts:
            self.parts[part.part] = part
            self.new.append(part)
            self.stir.set()

    def take_new(self) -> list[Ranged]:
        new, self.new = self.new, []
        return new

    @property
    def over(self) -> bool:
        return any(p.last and len(self.parts) > p.part for p in self.parts.values())


class Questions:
    def __init__(
        self, rpc: Rpc, members: Members, layer: Layer, rng: random.Random, config: Config
    ) -> None:
        self._rpc = rpc
        self._members = members
        self._layer = layer
        self._rng = rng
        self._config = config
        self._own = config.of(ChemicalConfig)
        self._next_id = rng.getrandbits(48)
        self._asked: dict[int, _Asked] = {}
        self._dry_until = -1.0
        self._hopeful = True  # the last question found idle peers
        self._trip = RoundTrip()
        # what was given for which question, as it may come twice
        self._given: OrderedDict[tuple[bytes, int, float, bool], tuple[float, tuple[Found, ...]]]
        self._given = OrderedDict()
        self._walked: dict[tuple[bytes, int, int, float, bool], float] = {}
        self._here: object = None
        self._kinds: dict[Needs, tuple[Needs, int]] = {}
        self._tasks = Tasks()
        rpc.on(Range, self._range)
        rpc.on(Ranged, self._ranged)

    # ----------------------------------------------------------------- asking

    def kind_of(self, needs: Needs) -> tuple[Needs, int]:
        """The kind of peers among which to look for these needs; and how many peers meet them."""
        here = self._members.here()
        if here is not self._here or len(self._kinds) > KINDS_KNOWN_MAX:
            self._here, self._kinds = here, {}
        if needs not in self._kinds:
            matching = sum(not unmet(m.capacity, m.traits, needs) for m in here)
            self._kinds[needs] = kind_of(needs, here), matching
        return self._kinds[needs]

    def walks(self, needs: Needs, count: int, begun: int) -> list[int]:
        """The units of each question, if a question for so many is divided while `begun` others are
        on their way. One long walk takes time; but among few peers, or where none is idle, several
        walks would meet: then all units that have come up meanwhile are asked for together."""
        peers = self._layer.kind(self.kind_of(needs)[0]).count
        most = max(1, min(WALKS_MAX, peers // PEERS_EACH)) - begun
        if self._now() < self._dry_until:
            most = min(1, most)
        walks = min(most, max(1, count // UNITS_EACH))
        return [count // walks + (i < count % walks) for i in range(walks)]

    def each(self, needs: Needs, count: int, runtime_s: float | None) -> int:
        """How many of so many units one resource should get: short units are not worth a message
        each."""
        peers = self._layer.kind(self.kind_of(needs)[0]).count
        dealt = max(1, -(-count // max(1, min(DEALT_TO, peers))))
        worth = 1 if runtime_s is None else math.ceil(WORTH_S / max(runtime_s, 1e-4))
        return min(max(dealt, min(worth, TOGETHER_MAX)), UNITS_MAX)

    async def ask(
        self,
        needs: Needs,
        count: int,
        runtime_s: float | None,
        avoid: Iterable[bytes] = (),
        owner: str = "",
    ) -> AsyncIterator[tuple[Found, ...]]:
        """The least loaded resources that should have capacity, each with a number of units, as
        they are found. For the rest, wishes are left where such resources would appear."""
        kind = self._layer.kind(self.kind_of(needs)[0])
        await self._layer.want(kind.needs)
        question = self._question(kind, needs, min(count, UNITS_MAX), runtime_s, avoid, owner)
        asked = self._asked[question.id] = _Asked()
        began = self._now()
        try:
            for careful in (False, True):
                self._layer.counts["questions"] += 1
                self._begin(kind, question.model_copy(update={"careful": careful}))
                end = self._now() + (CAREFUL_S if careful else self._answer_s())
                while asked.new or (not asked.over and await self._stirs(asked, end)):
                    for part in asked.take_new():
                        yield part.rows
                if asked.over:
                    break
                self._layer.counts["unanswered"] += 1
            if not careful:
                self._trip.measured(self._now() - began)
        finally:
            del self._asked[question.id]

    def _question(
        self,
        kind: ResourceKind,
        needs: Needs,
        count: int,
        runtime_s: float | None,
        avoid: Iterable[bytes],
        owner: str,
    ) -> Range:
        self._next_id += 1
        question = Range(
            home=self._rpc.me.id, id=self._next_id, kind=kind.needs, needs=needs, count=count,
            each=self.each(needs, count, runtime_s), queue=runtime_s is not None,
            low=1.0 if self._now() < self._dry_until else 0.0, high=0.0, top=0.0, leg=SEARCH,
            nodes=min(self._own.walk_max, NODES_MIN + 2 * count), empty=0,
            wait_s=self._own.wait_s, scale=self._layer.scale.version,
            avoid=self.avoidable(needs, avoid), owner=owner,
        )  # fmt: skip
        question = self._stretch(kind, question, question.low)
        return question if self._hopeful else question.model_copy(update={"empty": DOUBT})

    def avoidable(self, needs: Needs, avoid: Iterable[bytes]) -> tuple[bytes, ...]:
        """The peers to avoid; none if there are no others that meet the needs."""
        members = [self._members.get(peer) for peer in avoid]
        matching = [m for m in members if m and not unmet(m.capacity, m.traits, needs)]
        if len(matching) >= self.kind_of(needs)[1]:
            return ()
        return tuple(sorted(m.contact.id for m in matching))[:AVOID_MAX]

    async def _stirs(self, asked: _Asked, end: float) -> bool:
        try:
            async with asyncio.timeout_at(end):
                await asked.stir.wait()
        except TimeoutError:
            return False
        asked.stir.clear()
        return True

    def let_be(self, peer: bytes) -> None:
        """A peer is not wanted after all: have it publish its molecule again, as before."""
        contact = self._members.contact(peer)
        if contact is not None:
            self._rpc.tell(contact, ReturnLeases(leases=()))

    def _answer_s(self) -> float:
        """The timeout of an answer, by the round-trip times of recent ones."""
        trip, most = self._trip, self._own.answer_s
        wanted = 2 * (trip.smoothed_s + 4 * trip.deviation_s)
        return min(most, max(most / 8, wanted)) if trip.smoothed_s else most

    def _ranged(self, sender: Contact, message: Ranged) -> Done:
        self._layer.adopt(message.scale)
        asked = self._asked.get(message.id)
        if asked is None:
            for meta, _ in message.rows:  # the question is over
                self.let_be(meta.peer)
        else:
            asked.add(message)
            if message.dry:
                self._dry_until = self._now() + self._own.dry_s
            self._hopeful = not message.dry
            if message.last and message.stale:
                self._layer.misfits()
        return Done()

    # ----------------------------------------------------------------- being asked

    def _range(self, sender: Contact, message: Range) -> Done:
        self._layer.counts["asked"] += 1
        kind = self._layer.kind(message.kind)
        if message.careful and self._was_here(message):
            return Done()  # its sender missed the confirmation, and has passed this node over
        if message.nodes <= self._own.walk_max:
            self._walk_on(kind, message, self._given_to(kind, message))
        return Done()

    def _was_here(self, message: Range) -> bool:
        now = self._now()
        for old in [key for key, at in self._walked.items() if now - at > GIVEN_S]:
            del self._walked[old]
        key = (message.home, message.id, message.leg, message.low, message.again)
        if key in self._walked or len(self._walked) >= GIVEN_MAX:
            return True
        self._walked[key] = now
        return False

    def _given_to(self, kind: ResourceKind, message: Range) -> tuple[Found, ...]:
        now = self._now()
        while self._given:
            oldest, (at, _) = next(iter(self._given.items()))
            if now - at < GIVEN_S and len(self._given) < GIVEN_MAX:
                break
            del self._given[oldest]
        key = (message.home, message.id, message.low, message.again)
        if key in self._given:
            return self._given[key][1]
        rows = self._give(kind, message, now)
        if rows:
            self._given[key] = now, rows
        return rows

    def _give(self, kind: ResourceKind, message: Range, now: float) -> tuple[Found, ...]:
        left = message.count
        rows: list[Found] = []
        for meta in self._on_offer(kind, message, now):
            if not left:
                break
            if not self._suits(meta, message):
                continue
            count = room(meta, message.needs, min(left, message.each), message.queue)
            if count:
                rows.append((meta, count))
                self._layer.give(kind, meta, message.needs, count)
                left -= count
        if left and message.wait_s and message.leg != SEARCH:
            until = now + min(message.wait_s, self._own.wait_s)
            wish = Wish(
                message.home, message.needs, left, message.each, message.queue, until,
                message.avoid, message.owner,
            )  # fmt: skip
            kind.stretch.wish(wish, now)
        return tuple(rows)

    def _on_offer(self, kind: ResourceKind, message: Range, now: float) -> list[Meta]:
        """The molecules that this node holds of the range; none if other homes wait here with the
        same needs: the question does not overtake them, but waits with them, and all in turn."""
        others = any(
            wish.home != message.home and wish.until > now and wish.needs == message.needs
            for wish in kind.stretch.wishes.values()
        )
        if others:
            return []
        seam = kind.seam(self._layer.scale, self._rpc.me.id)
        low, high = message.low, message.high
        if message.again:
            low = max(low, seam)
        else:
            high = min(high, seam)
        return kind.stretch.between(low, high, now)

    def _suits(self, meta: Meta, message: Range) -> bool:
        member = self._members.get(meta.peer)
        if member is None or member.state != State.ALIVE or meta.peer in message.avoid:
            return False
        return not unmet(member.capacity, member.traits, message.needs)

    # ----------------------------------------------------------------- going on

    def _walk_on(self, kind: ResourceKind, message: Range, given: tuple[Found, ...]) -> None:
        """Send the question to the next node, with what this one gave; or answer it."""
        rows = message.rows + given
        left = message.count - sum(count for _, count in given)
        empty = 0 if given else message.empty + 1
        message = message.model_copy(update={"count": max(1, left), "rows": rows, "empty": empty})
        while len(message.rows) > ROWS_MAX:
            message = self._answer(message, message.rows[:ROWS_MAX], last=False)
        end = kind.stretch.gone_on(self._now())
        if left > 0 and self._next(kind, message, self._rpc.me.id, end):
            return
        self._answer(message, message.rows, last=True)

    def _answer(self, message: Range, rows: tuple[Found, ...], last: bool) -> Range:
        scale = self._layer.scale
        newer = scale if last and scale.version > message.scale else None
        answer = Ranged(
            id=message.id, part=message.part, last=last, rows=rows, dry=message.dry, scale=newer,
            stale=message.stale,
        )  # fmt: skip
        home = self._members.contact(message.home)
        if home is not None and message.careful:
            self._tasks.spawn(self._make_sure(home, answer))
        elif home is not None:
            self._rpc.tell(home, answer)
        left = message.rows[len(rows) :]
        return message.model_copy(update={"part": message.part + 1, "rows": left})

    def _next(self, kind: ResourceKind, message: Range, at: bytes, gone_on: float) -> bool:
        """Send the question on from this node. False: this was the last one."""
        goes_on = place(self._layer.scale, message.high) > kind.far(at) or gone_on < message.high
        enough = message.leg == SEARCH and message.empty >= self._patience(kind, message)
        if goes_on and message.nodes and not message.again and not enough:
            successor = kind.following(at, after=True)
            again = successor == kind.following(kind.start)
            next_one = message.model_copy(update={"nodes": message.nodes - 1, "again": again})
            self._send(kind, next_one, successor)
            return True
        if message.leg == SEARCH and message.nodes:
            return self._search_on(kind, message, enough)
        return self._wish_on(kind, message)

    def _wish_on(self, kind: ResourceKind, message: Range) -> bool:
        """The next leg: leave wishes. False: there is none."""
        if message.leg == FOR_OTHERS or not message.wait_s:
            return False
        if message.rows:  # so that these can be captured meanwhile
            message = self._answer(message, message.rows, last=False)
        low, high = (0.0, 1.0) if message.leg == SEARCH else (1.0, float(STEPS))
        update = {"leg": message.leg + 1, "low": low, "high": high, "nodes": WISHED_AT - 1}
        self._begin(kind, message.model_copy(update=update))
        return True

    def _patience(self, kind: ResourceKind, message: Range) -> float:
        """Nodes in a row without anything before a stretch is left; fewer in a long stretch."""
        scale, most = self._layer.scale, self._own.empty_max
        share = place(scale, message.top) - place(scale, float(int(message.low)))
        return most if share * kind.count < most else most / 2

    def _search_on(self, kind: ResourceKind, message: Range, enough: bool) -> bool:
        """A stretch ends: go on with its first part, with the next stretch, or end the search."""
        if message.low > int(message.low) and not enough:  # it started in the middle
            update = {"low": float(int(message.low)), "high": message.low}
            self._begin(kind, message.model_copy(update=update))
            return True
        if message.top >= STEPS:
            return self._next(kind, message.model_copy(update={"nodes": 0}), self._rpc.me.id, 0.0)
        if message.rows:
            message = self._answer(message, message.rows, last=False)
        dry = message.dry or (enough and message.top <= 1 and not message.part)
        stale = message.stale or enough
        message = message.model_copy(update={"dry": dry, "stale": stale, "empty": 0})
        self._begin(kind, self._stretch(kind, message, message.top))
        return True

    def _stretch(self, kind: ResourceKind, message: Range, low: float) -> Range:
        """The question for the stretch of equal or of different values from this order on."""
        top, alike = stretch_from(self._layer.scale, low, kind.count)
        if alike:  # computed, not drawn, so that a repeated question starts at the same place
            seed = message.home + message.id.to_bytes(8, "big") + int(low).to_bytes(2, "big")
            low = int(low) + tie(seed)
        return message.model_copy(update={"low": low, "high": top, "top": top})

    def _begin(self, kind: ResourceKind, message: Range) -> None:
        """Send the question to the node where its leg starts."""
        if self._layer.locate is None:
            self._begin_at(kind, message, kind.holder(self._layer.scale, message.low))
        else:
            self._tasks.spawn(self._begin_far(kind, message))

    async def _begin_far(self, kind: ResourceKind, message: Range) -> None:
        self._begin_at(kind, message, await self._layer.place(kind, message.low))

    def _begin_at(self, kind: ResourceKind, message: Range, holder: bytes) -> None:
        seam = kind.following(kind.start)
        past = place(self._layer.scale, message.low) > kind.far(seam)
        self._send(kind, message.model_copy(update={"again": holder == seam and past}), holder)

    def _send(self, kind: ResourceKind, message: Range, holder: bytes) -> None:
        contact = self._members.contact(holder)
        if contact is not None and not message.careful:
            self._rpc.tell(contact, message)
        else:
            self._tasks.spawn(self._send_carefully(kind, message, holder))

    async def _send_carefully(self, kind: ResourceKind, message: Range, holder: bytes) -> None:
        contact = self._members.contact(holder)
        if contact is not None and await self._make_sure(contact, message):
            return
        if not self._next(kind, message, holder, float("inf")):  # it is passed over
            self._answer(message, message.rows, last=True)

    async def _make_sure(self, contact: Contact, message: Range | Ranged) -> bool:
        try:
            await self._rpc.call(contact, message, Done, CAREFUL_CALL_S)
        except CallFailed:
            return False
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._tasks.close()
