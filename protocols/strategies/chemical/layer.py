"""The layer of resources, as a service: a peer's own molecule, those it holds, and questions.

After seed 000, section 3.2: meta-molecules lie under order-preserving keys on the ring, the least
loaded first, so that "the best of the moment" is a lookup and a walk. (Every peer knows the others,
so the lookup is one step; the ring is that of `overlay.chord`.)

Rules:
- Nobody says anything while nobody wants the layer. Who does tells the speaker (`liveness`), who
  has all peers told, now and then again; each then says where it stands, and when that changes.
- The speaker also asks a few where they stand: if a part of the ring is much fuller than others, it
  makes a new scale, and all move. Whoever uses an older one is handed the newer one.
- A node that dies takes molecules with it: their peers put them to the next one at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import msgpack

from ...config import Config
from ...liveness import Liveness
from ...matching import unmet
from ...members import Members, State
from ...messages import (
    Appeared,
    Arouse,
    Contact,
    Done,
    Member,
    Meta,
    Needs,
    Publish,
    Published,
    Range,
    Ranged,
    Sample,
    Sampled,
    Scale,
    Ticket,
)
from ...overlay.chord import SIZE, clockwise
from ...rpc import CallFailed, Rpc
from .holder import Stretch, Wish, room
from .scale import FIRST, STEPS, fit, key, order, order_at, place, skew

START = hashlib.blake2b(b"layer:load", digest_size=20).digest()
SKEW_MAX = 2.2  # by chance a hundred in eight parts hardly ever come to that
#: units are dealt out to so many resources, if there are: one each of a few, more of many
DEALT_TO = 32
HOPS_MAX = 64
IDLE_WALK_MIN = 8
AGAIN_S = 0.2
ROWS_ANSWERED_MAX = 200
POINTS_MAX = 64
METAS_MAX = 64


def load(ticket: Ticket, member: Member, queue_s_max: float) -> float:
    """From 0, idle, to 1: no room, and none may wait. Below 0.9 there is room now."""
    used = 0.0
    for have, most in zip(ticket.free, member.capacity, strict=True):
        if most:
            used = max(used, 1 - have / most)
    if used < 1:
        return 0.9 * used
    queued = 1 - min(1.0, ticket.queue_s / queue_s_max) if queue_s_max else 1.0
    return 0.9 + 0.1 * queued


def _about(active_s: float, scale: Scale) -> bytes:
    return bytes(msgpack.packb([active_s, scale.version, list(scale.points)]))


class Layer:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        liveness: Liveness,
        rng: random.Random,
        config: Config,
        ticket: Callable[[], Ticket],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.scale = FIRST
        self.stretch = Stretch(config)
        self.on_appeared: Callable[[bytes, Needs, int], None] = lambda peer, needs, count: None
        #: how a place is found where not every peer knows all others
        self.locate: Callable[[bytes], Awaitable[bytes]] | None = None
        self._rpc = rpc
        self._members = members
        self._liveness = liveness
        self._rng = rng
        self._config = config
        self._ticket = ticket
        self._active_until = -1.0
        self._asked_until = -1.0  # the speaker knows that it is wanted
        self._wake = asyncio.Event()
        self._balancing = False
        self._fitting = False
        self._dirty = False  # something has changed here, or was asked for
        self._version = 0
        self._at: dict[bytes, Meta] = {}  # where this peer's own molecule is, at most one
        self._tasks: set[asyncio.Task[None]] = set()
        rpc.on(Publish, self._publish)
        rpc.on(Range, self._range)
        rpc.on(Appeared, self._appeared)
        rpc.on(Arouse, self._arouse)
        rpc.on(Sample, self._sample)
        liveness.on_announced = self._announced
        members.listen(self._member_changed, at_stake=self._at)

    @property
    def active(self) -> bool:
        return self._now() < self._active_until

    # ----------------------------------------------------------------- wanting it

    async def want(self) -> None:
        """Somebody here has a question: all peers are to say where they stand."""
        now = self._now()
        if now < self._asked_until:
            return
        self._asked_until = now + self._config.layer_active_s / 3
        contact = self._members.contact(self._members.speaker)
        try:
            if contact is not None:
                await self._rpc.call(contact, Arouse(), Done, 1.0)
        except CallFailed:
            self._asked_until = 0.0

    def _arouse(self, sender: Contact, message: Arouse) -> Done:
        if self._active_until - self._now() < 0.7 * self._config.layer_active_s:
            self._announce(self.scale)  # a word may be lost: who misses it hears the next one
        return Done()

    def _announce(self, scale: Scale) -> None:
        self._liveness.announce(_about(self._config.layer_active_s, scale))

    def _announced(self, about: bytes) -> None:
        try:
            active_s, version, points = msgpack.unpackb(about)
            found = Scale(int(version), tuple(float(p) for p in points[:POINTS_MAX]))
            until = self._now() + min(self._config.layer_active_s, float(active_s))
        except (ValueError, TypeError, msgpack.UnpackException):
            self.counts["malformed"] += 1
            return
        if not self._fitting:
            self._fitting = True
            self._spawn(self._fit())
        self._active_until = max(self._active_until, until)
        self._adopt(found)
        self._wake.set()

    def _adopt(self, scale: Scale | None) -> None:
        newer = scale is not None and scale.version > self.scale.version
        if scale is not None and newer and list(scale.points) == sorted(scale.points):
            self.scale = scale
            self._wake.set()

    async def _fit(self) -> None:
        """As the speaker, while it is wanted: see that no part of the ring is much fuller."""
        while True:
            await asyncio.sleep(self._config.layer_fit_s * (0.75 + 0.5 * self._rng.random()))
            if not self.active:
                self._fitting = False
                return
            if self._members.speaker != self._rpc.me.id:
                continue
            drawn = self._members.draw(self._rng, self._config.layer_sampled, ())
            calls = [self._rpc.call(m.contact, Sample(), Sampled, 1.0) for m in drawn]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            found = [a.order for a in answers if isinstance(a, Sampled)]
            made = fit(self.scale.version + 1, found)
            if made is not None and skew(self.scale, found) > max(
                SKEW_MAX, 1.5 * skew(made, found)
            ):
                self.counts["scales"] += 1
                self._announce(made)

    def _sample(self, sender: Contact, message: Sample) -> Sampled:
        return Sampled(order=self._mine()[0])

    # ----------------------------------------------------------------- this peer's own

    def changed(self) -> None:
        """There may be more room, or less."""
        if self.active:
            self._dirty = True
            self._wake.set()

    def consumed(self) -> None:
        """Its molecule was given to one who asks for room now: nobody needs to be told."""
        self._at.clear()
        self.changed()

    def _mine(self) -> tuple[float, Ticket]:
        ticket, me = self._ticket(), self._members.me
        return order(load(ticket, me, self._config.queue_s_max), me.contact.id), ticket

    async def run(self) -> None:
        said_at = 0.0
        while True:
            try:
                async with asyncio.timeout(self._config.layer_refresh_s if self.active else None):
                    await self._wake.wait()
            except TimeoutError:
                said_at = 0.0
            await asyncio.sleep(self._config.layer_gap_s)
            self._wake.clear()
            if self.active:
                said_at = await self._say(said_at)

    async def _say(self, said_at: float) -> float:
        """Where it stands, if that is elsewhere than was said, or was long ago."""
        me, now = self._members.me.contact.id, self._now()
        stands, ticket = self._mine()
        holder = await self._holder(stands)
        free, queues = ticket.free, ticket.queue_s > 0
        old = self._at.get(holder)
        same = old is not None and old[1] == stands and old[3:] == (free, queues)
        if same and not self._dirty and now - said_at < self._config.layer_refresh_s / 2:
            return said_at
        self._dirty = False
        self._version = max(self._version + 1, self._members.me.boot << 32)
        meta = Meta(me, stands, self._version, free, queues)
        left = [peer for peer in self._at if peer != holder]
        self._at.clear()
        self._at[holder] = meta
        for peer in left:
            contact = self._members.contact(peer)
            if contact is not None:
                gone = ((me, self._version),)
                self._rpc.tell(contact, Publish(metas=(), gone=gone, scale=self.scale.version))
        contact = self._members.contact(holder)
        try:
            if contact is None:
                raise CallFailed("it is gone")
            self.counts["published"] += 1
            message = Publish(metas=(meta,), scale=self.scale.version)
            answer = await self._rpc.call(contact, message, Published, 1.0)
            self._adopt(answer.scale)
        except CallFailed:
            asyncio.get_running_loop().call_later(AGAIN_S, self._wake.set)
            return 0.0
        return now

    async def _holder(self, stands: float) -> bytes:
        at = key(START, self.scale, stands)
        if self.locate is not None:
            return await self.locate(at)
        return self._members.following(at)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        """Its holder is gone, or another one stands before it: it is put there. And who has just
        come is told by the speaker that the layer is in use."""
        came = new.state == State.ALIVE and (old is None or old.boot != new.boot)
        if came and self.active and self._members.speaker == self._rpc.me.id:
            left_s = self._active_until - self._now()
            self._liveness.announce_to(new.contact, _about(left_s, self.scale))
        for holder, meta in list(self._at.items()):
            if not self.active:
                self._at.clear()
            elif self._members.following(key(START, self.scale, meta.order)) != holder:
                self._at.pop(holder, None)
                self._wake.set()

    # ----------------------------------------------------------------- what it holds

    def _publish(self, sender: Contact, message: Publish) -> Published:
        now = self._now()
        self._active_until = max(self._active_until, now + self._config.layer_refresh_s)
        for meta in message.metas:
            if self.stretch.put(meta, now):
                self._tell_wishes(meta, now)
        if len(self.stretch) > self._config.layer_rows_max and not self._balancing:
            self._balancing = True
            asyncio.get_running_loop().call_later(self._config.layer_balance_s, self._balance)
        gone = tuple(row for row in message.gone if not self.stretch.take(*row))
        gone = gone if self.stretch.gone_on(now) < float("inf") else ()
        if gone and message.hops < HOPS_MAX:
            self._hand_on((), gone, message.hops + 1)
        return Published(scale=self.scale if message.scale < self.scale.version else None)

    def _balance(self) -> None:
        self._balancing = False
        surplus = self.stretch.surplus(self._now(), self._seam())
        self.counts["passed_on"] += len(surplus)
        for start in range(0, len(surplus), METAS_MAX):
            self._hand_on(tuple(surplus[start : start + METAS_MAX]), (), 0)

    def _hand_on(
        self, metas: tuple[Meta, ...], gone: tuple[tuple[bytes, int], ...], hops: int
    ) -> None:
        """To the next on the ring."""
        successor = self._members.following(self._rpc.me.id, after=True)
        contact = self._members.contact(successor)
        if contact is not None and successor != self._rpc.me.id:
            message = Publish(metas=metas, gone=gone, scale=self.scale.version, hops=hops)
            self._spawn(self._pass_on(contact, message))

    async def _pass_on(self, contact: Contact, message: Publish) -> None:
        try:
            await self._rpc.call(contact, message, Published, 1.0)
        except CallFailed:
            self.counts["not_passed_on"] += 1  # its peer says it again before long

    def _seam(self) -> float:
        """Where the ring begins anew for this kind of value, one node has its first stretch and its
        last: from which order on it is the last. No end: this is not that node."""
        me = self._rpc.me.id
        if self._members.following(START) != me:
            return math.inf
        return order_at(self.scale, clockwise(START, me) / SIZE)

    def _tell_wishes(self, meta: Meta, now: float) -> None:
        member = self._members.get(meta.peer)
        if member is None or meta.order >= STEPS:
            return
        for wish_key, wish in list(self.stretch.wishes.items()):
            if wish.until <= now:
                del self.stretch.wishes[wish_key]
                continue
            if unmet(member.capacity, member.traits, wish.needs):
                continue
            count = room(meta, wish.needs, min(wish.count, wish.each), wish.queue)
            home = self._members.contact(wish.home)
            if not count or home is None:
                continue
            del self.stretch.wishes[wish_key]
            self.stretch.take(meta.peer, meta.version)
            self._rpc.tell(home, Appeared(meta=meta, needs=wish.needs, count=count))
            return

    def _range(self, sender: Contact, message: Range) -> Ranged:
        now, left = self._now(), message.count
        self.counts["asked"] += 1
        rows: list[tuple[Meta, int]] = []
        seam = self._seam()
        low, high = message.low, message.high
        if message.again:
            low = max(low, seam)
        else:
            high = min(high, seam)
        for meta in self.stretch.between(low, high, now):
            member = self._members.get(meta.peer)
            if member is None or member.state != State.ALIVE:
                continue
            if unmet(member.capacity, member.traits, message.needs):
                continue
            count = room(meta, message.needs, min(left, message.each), message.queue)
            if count and len(rows) < ROWS_ANSWERED_MAX:
                rows.append((meta, count))
                self.stretch.take(meta.peer, meta.version)
                left -= count
            if not left:
                break
        if left and message.wait_s:
            until = now + min(message.wait_s, self._config.layer_wait_s)
            wish = Wish(sender.id, message.needs, left, message.each, message.queue, until)
            self.stretch.wish(wish, now)
        reached = clockwise(START, self._rpc.me.id) / SIZE
        more = place(self.scale, message.high) > reached or self.stretch.gone_on(now) < message.high
        more = more and not message.again
        newer = self.scale if message.scale < self.scale.version else None
        return Ranged(rows=tuple(rows), more=bool(left) and more, scale=newer)

    # ----------------------------------------------------------------- asking

    async def find(self, needs: Needs, count: int, queue: bool) -> list[tuple[Meta, int]]:
        """The least loaded that should have room, each with how many units; and a wish for the
        rest is left wherever they would appear."""
        each = max(1, -(-count // min(DEALT_TO, self._members.count)))
        # Of those that are idle none is better than another: not all are to begin with the same. A
        # few nodes without any, and there are hardly any left: then the least loaded of the others.
        found: list[tuple[Meta, int]] = []
        wanted, most = count, self._config.layer_walk_max
        for low, high, nodes in (
            (self._rng.random(), 1.0, min(most, IDLE_WALK_MIN + 2 * min(count, most))),
            (1.0, float(STEPS), most),
            (0.0, 1.0, most),
        ):
            if count > 0:
                found += await self._walk(low, high, needs, count, each, queue, nodes)
                count = wanted - sum(row[1] for row in found)
        newest: dict[bytes, int] = {}  # one that has just moved may be found twice
        for meta, _ in found:
            newest[meta.peer] = max(meta.version, newest.get(meta.peer, 0))
        rows = [row for row in found if row[0].version == newest[row[0].peer]]
        return sorted(rows, key=lambda row: row[0].order)

    async def _walk(
        self,
        low: float,
        high: float,
        needs: Needs,
        count: int,
        each: int,
        queue: bool,
        most: int,
    ) -> list[tuple[Meta, int]]:
        holder = await self._holder(low)
        seam = self._members.following(START)  # has the first stretch of all, and the last
        begun = place(self.scale, low) > clockwise(START, seam) / SIZE
        found: list[tuple[Meta, int]] = []
        wait_s = self._config.layer_wait_s if low in (0.0, 1.0) else 0.0
        for step in range(min(most, self._members.count) + 1):
            contact = self._members.contact(holder)
            if contact is None:
                break
            self.counts["questions"] += 1
            message = Range(
                low=low, high=high, needs=needs, count=count, each=each, queue=queue, wait_s=wait_s,
                scale=self.scale.version, again=holder == seam and (begun or step > 0),
            )  # fmt: skip
            try:
                answer = await self._rpc.call(contact, message, Ranged, 1.0)
            except CallFailed:
                answer = Ranged(rows=(), more=True)
            found += answer.rows
            count -= sum(row[1] for row in answer.rows)
            self._adopt(answer.scale)
            if count <= 0 or not answer.more or message.again:
                break
            holder = self._members.following(holder, after=True)
        return found

    def _appeared(self, sender: Contact, message: Appeared) -> None:
        self.on_appeared(message.meta.peer, message.needs, message.count)

    # ----------------------------------------------------------------- small things

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
