"""Questions to the layer: they walk along the ring, node by node, and the last one answers.

Rules:
- It begins with the least and goes on in order. Among those of one value none is better than
  another: it begins anywhere among them, and then takes up what lies before; or all would begin
  with the same, and walk past what others have taken. A few nodes in a row that have nothing, and
  there is hardly anything left there: then it goes on with the next ones.
- A node gives what it has, and passes the question on with what was found. A word may be lost, or
  a node on the way has died: who asked asks again, and then each makes sure that the next one has
  it, or passes it over. A question that comes twice is answered by a node as before.
- Who finds too little leaves a wish where idle ones would appear, and where the least loaded would.
  Not earlier: what appears goes to the oldest wish, and must not go to one that has enough.
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
from .messages import Found, Range, Ranged
from .scale import STEPS, place, stretch_from, tie

#: units are dealt out to so many resources, if there are: one each of a few, more of many
DEALT_TO = 32
#: looking for some, then leaving wishes where idle ones would appear, and where others would
SEARCH, FOR_IDLE, FOR_OTHERS = range(3)
#: that a question may visit, and two for each unit
NODES_MIN = 32
#: nodes with which a wish is left, on each leg
WISHED_AT = 8
#: with so many an answer is sent, and the rest as another part of it
ROWS_MAX = 12
#: seconds of work that are worth a capture
WORTH_S, TOGETHER_MAX = 0.005, 16
#: where none was idle just now, so many nodes fewer are asked once more
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
        self._hopeful = True  # there were idle ones when it was asked last
        self._trip = RoundTrip()
        # what was given to whom: a question may come twice
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
        """Among which kind of peers units with these needs look for one; and how many meet them."""
        here = self._members.here()
        if here is not self._here or len(self._kinds) > KINDS_KNOWN_MAX:
            self._here, self._kinds = here, {}
        if needs not in self._kinds:
            matching = sum(not unmet(m.capacity, m.traits, needs) for m in here)
            self._kinds[needs] = kind_of(needs, here), matching
        return self._kinds[needs]

    def walks(self, needs: Needs, count: int, begun: int) -> list[int]:
        """Into how many questions one for so many units is better divided, while so many are on
        their way: a long walk takes time, but among few peers, or where none is idle, they would
        meet; then all that has come up meanwhile is asked for together."""
        peers = self._layer.kind(self.kind_of(needs)[0]).count
        most = max(1, min(WALKS_MAX, peers // PEERS_EACH)) - begun
        if self._now() < self._dry_until:
            most = min(1, most)
        walks = min(most, max(1, count // UNITS_EACH))
        return [count // walks + (i < count % walks) for i in range(walks)]

    def each(self, needs: Needs, count: int, runtime_s: float | None) -> int:
        """How many of so many units one resource should get: what is soon done is not worth a
        message for each."""
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
        """The least loaded that should have room, each with how many units, as they are found; and
        a wish for the rest is left wherever they would appear."""
        kind = self._layer.kind(self.kind_of(needs)[0])
        await self._layer.want(kind.needs)
        self._next_id += 1
        count = min(count, UNITS_MAX)
        question = Range(
            home=self._rpc.me.id, id=self._next_id, kind=kind.needs, needs=needs, count=count,
            each=self.each(needs, count, runtime_s), queue=runtime_s is not None,
            low=1.0 if self._now() < self._dry_until else 0.0, high=0.0, top=0.0, leg=SEARCH,
            nodes=min(self._own.walk_max, NODES_MIN + 2 * count), empty=0,
            wait_s=self._own.wait_s, scale=self._layer.scale.version,
            avoid=self.avoidable(needs, avoid), owner=owner,
        )  # fmt: skip
        question = self._stretch(kind, question, question.low)
        if not self._hopeful:
            question = question.model_copy(update={"empty": DOUBT})
        asked = self._asked[question.id] = _Asked()
        began = self._now()
        try:
            for careful in (False, True):
                self._layer.counts["questions"] += 1
                self._begin(kind, question.model_copy(update={"careful": careful}))
                end = self._now() + (CAREFUL_S if careful else self._answer_s())
                while asked.new or (not asked.over and await self._stirs(asked, end)):
                    new, asked.new = asked.new, []
                    for part in new:
                        yield part.rows
                if asked.over:
                    break
                self._layer.counts["unanswered"] += 1
            if not careful:
                self._trip.measured(self._now() - began)
        finally:
            del self._asked[question.id]

    def avoidable(self, needs: Needs, avoid: Iterable[bytes]) -> tuple[bytes, ...]:
        """Unless there are no others."""
        members = [self._members.get(peer) for peer in avoid]
        found = [m for m in members if m and not unmet(m.capacity, m.traits, needs)]
        there_are_others = len(found) < self.kind_of(needs)[1]
        return tuple(sorted(m.contact.id for m in found))[:AVOID_MAX] if there_are_others else ()

    async def _stirs(self, asked: _Asked, end: float) -> bool:
        try:
            async with asyncio.timeout_at(end):
                await asked.stir.wait()
        except TimeoutError:
            return False
        asked.stir.clear()
        return True

    def let_be(self, peer: bytes) -> None:
        """It is not wanted after all: it says anew where it stands, as it was consumed."""
        contact = self._members.contact(peer)
        if contact is not None:
            self._rpc.tell(contact, ReturnLeases(leases=()))

    def _answer_s(self) -> float:
        """An answer takes no longer, as answers go; else it was lost on its way."""
        trip, most = self._trip, self._own.answer_s
        wanted = 2 * (trip.smoothed_s + 4 * trip.deviation_s)
        return min(most, max(most / 8, wanted)) if trip.smoothed_s else most

    def _ranged(self, sender: Contact, message: Ranged) -> Done:
        self._layer.adopt(message.scale)
        asked = self._asked.get(message.id)
        if asked is None:
            for meta, _ in message.rows:  # nobody waits for it any more
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
            return Done()  # its sender did not hear that, and has passed this node over
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
        seam = kind.seam(self._layer.scale, self._rpc.me.id)
        low, high = message.low, message.high
        if message.again:
            low = max(low, seam)
        else:
            high = min(high, seam)
        left = message.count
        rows: list[Found] = []
        others = any(
            wish.home != message.home and wish.until > now and wish.needs == message.needs
            for wish in kind.stretch.wishes.values()
        )
        # (who asks does not take what others wait for here: it waits with them, and all in turn)
        found = [] if others else kind.stretch.between(low, high, now)
        for meta in found:
            member = self._members.get(meta.peer)
            if member is None or member.state != State.ALIVE or meta.peer in message.avoid:
                continue
            if unmet(member.capacity, member.traits, message.needs):
                continue
            count = room(meta, message.needs, min(left, message.each), message.queue)
            if count:
                rows.append((meta, count))
                self._layer.give(kind, meta, message.needs, count)
                left -= count
            if not left:
                break
        if left and message.wait_s and message.leg != SEARCH:
            until = now + min(message.wait_s, self._own.wait_s)
            wish = Wish(
                message.home, message.needs, left, message.each, message.queue, until,
                message.avoid, message.owner,
            )  # fmt: skip
            kind.stretch.wish(wish, now)
        return tuple(rows)

    # ----------------------------------------------------------------- going on

    def _walk_on(self, kind: ResourceKind, message: Range, given: tuple[Found, ...]) -> None:
        """With what this node has given, to the next one, or back with all there is."""
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
        """From this node on. False: that was the last one."""
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
        if message.leg == FOR_OTHERS or not message.wait_s:
            return False
        if message.rows:  # what there is may be captured meanwhile
            message = self._answer(message, message.rows, last=False)
        low, high = (0.0, 1.0) if message.leg == SEARCH else (1.0, float(STEPS))
        update = {"leg": message.leg + 1, "low": low, "high": high, "nodes": WISHED_AT - 1}
        self._begin(kind, message.model_copy(update=update))
        return True

    def _patience(self, kind: ResourceKind, message: Range) -> float:
        """Nodes in a row that have nothing, before a stretch is left: not many of one with many."""
        scale, most = self._layer.scale, self._own.empty_max
        share = place(scale, message.top) - place(scale, float(int(message.low)))
        return most if share * kind.count < most else most / 2

    def _search_on(self, kind: ResourceKind, message: Range, enough: bool) -> bool:
        """Where a stretch ends."""
        if message.low > int(message.low) and not enough:  # it began in the middle
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
        """The question for what is alike from this order on."""
        top, alike = stretch_from(self._layer.scale, low, kind.count)
        if alike:  # whoever computes it: the same, should it be asked again
            seed = message.home + message.id.to_bytes(8, "big") + int(low).to_bytes(2, "big")
            low = int(low) + tie(seed)
        return message.model_copy(update={"low": low, "high": top, "top": top})

    def _begin(self, kind: ResourceKind, message: Range) -> None:
        """Where its leg does."""
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
