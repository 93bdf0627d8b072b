"""The layer of resources at a peer: the peer's own molecules, and those it holds for others.

After seed 000, section 3.2: meta-molecules lie under order-preserving keys on the ring, the least
loaded first, so that "the best of the moment" is a lookup and a walk (`questions`). (Every peer
knows the others, so the lookup takes one step; the ring is that of `overlay.chord`.)

Rules:
- There are no messages while the layer is not in use. A home that needs it tells the speaker
  (`liveness`), which tells all peers, and repeats that every so often; each peer then publishes its
  molecule, and publishes it again when it changes.
- A molecule with more capacity is published until its holder confirms it; one with less, only once:
  a home that is sent there in vain is refused, and then the peer publishes it again.
- The speaker also samples the order of a few peers: if a part of the ring is much fuller than the
  others, it makes a new scale, and all molecules move. A peer that uses an older scale is sent the
  newer one.
- Molecules are lost with the node that holds them: their peers put them at the next node at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from ...capacity.matching import unmet
from ...config import Config
from ...membership.liveness import Liveness
from ...membership.members import Members, State
from ...tasks import Tasks
from ...wire.codec import FrameKind as Envelope
from ...wire.codec import Malformed, decode, encode
from ...wire.messages import (
    Capacity,
    Contact,
    Done,
    Member,
    Needs,
    Reserve,
    ReturnLeases,
    Room,
    Ticket,
)
from ...wire.rpc import CallFailed, Rpc
from .config import ChemicalConfig
from .holder import ROOM, alike, rest_of, room, used_of
from .kinds import ALL, ResourceKind
from .messages import (
    Appeared,
    Arouse,
    InUse,
    Meta,
    Publish,
    Published,
    Sample,
    Sampled,
    Scale,
    Unwished,
)
from .scale import FIRST, STEPS, TOP, fit, key, order, skew

#: how many times more the fullest part may hold than with a new scale; the second, if a question
#: found less than the scale says
SKEW_MAX, SKEW_MISFIT = 1.5, 1.15
HOPS_MAX = 64
VERSION_MAX = 2**48
AGAIN_S = 0.2
METAS_MAX = 64


def load(ticket: Ticket, member: Member, queue_s_max: float) -> float:
    """From 0, idle, to 1, full and with a full queue. Below `ROOM` there is free capacity now."""
    used = used_of(ticket.free, member.capacity)
    if used < 1:
        return ROOM * used
    queued = 1 - min(1.0, ticket.queue_s / queue_s_max) if queue_s_max else 1.0
    return ROOM + (1 - ROOM) * queued


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
        self.kinds: dict[Needs, ResourceKind] = {ALL: ResourceKind(ALL, members, config)}
        #: called when a resource appears; True: it is wanted
        self.on_appeared: Callable[[Meta, Needs, int], bool] = lambda meta, needs, count: False
        #: finds the holder of a key where not every peer knows all others
        self.locate: Callable[[bytes], Awaitable[bytes]] | None = None
        self._rpc = rpc
        self._members = members
        self._liveness = liveness
        self._rng = rng
        self._config = config
        self._own = config.of(ChemicalConfig)
        self._ticket = ticket
        self._wake = asyncio.Event()
        self._balancing = False
        self._fitting = False
        self._misfits = asyncio.Event()
        self._said_misfits = 0.0
        self._version = 0
        self._tasks = Tasks()
        rpc.on(Publish, self._publish)
        rpc.on(Appeared, self._appeared)
        rpc.on(Unwished, self._unwished)
        rpc.on(Arouse, self._arouse)
        rpc.on(Sample, self._sample)
        liveness.on_announced = self._announced
        members.listen(self._member_changed, at_stake=self.kinds)

    @property
    def active(self) -> bool:
        until = self.kinds[ALL].until
        return until > 0.0 and self._now() < until

    @property
    def idle(self) -> bool:
        """This peer is idle, and any home may use it."""
        return self._mine()[0] < 1

    def kind(self, needs: Needs) -> ResourceKind:
        """That kind of peers; or all peers, if there are too many kinds: the needs are checked on
        the way, too."""
        kind = self.kinds.get(needs)
        if kind is None:
            now = self._now()
            for old in [n for n, k in self.kinds.items() if k.until < now and n != ALL]:
                del self.kinds[old]
            if len(self.kinds) >= self._own.kinds_max:
                self.counts["kinds_refused"] += 1
                return self.kinds[ALL]
            kind = self.kinds[needs] = ResourceKind(needs, self._members, self._config)
            kind.until = now + self._own.refresh_s
        return kind

    # ----------------------------------------------------------------- waking the layer

    async def want(self, needs: Needs = ALL) -> None:
        """A home here has a question: have all peers of that kind publish their molecules."""
        kind, now = self.kind(needs), self._now()
        if now < kind.asked_until:
            return
        kind.asked_until = now + self._own.active_s / 3
        contact = self._members.contact(self._members.speaker)
        try:
            if contact is not None:
                await self._rpc.call(contact, Arouse(kind=kind.needs), Done, 1.0)
        except CallFailed:
            kind.asked_until = 0.0

    def misfits(self) -> None:
        """A question found much less than the scale says: a new scale would be better."""
        now = self._now()
        contact = self._members.contact(self._members.speaker)
        if now - self._said_misfits >= self._own.fit_min_s and contact is not None:
            self._said_misfits = now
            self._rpc.tell(contact, Arouse(stale=self.scale.version + 1))

    def _arouse(self, sender: Contact, message: Arouse) -> Done:
        kind, now = self.kind(message.kind), self._now()
        if message.stale == self.scale.version + 1:
            self._misfits.set()
        if kind.until - now < 0.7 * self._own.active_s:
            kind.until = self.kinds[ALL].until = now + self._own.active_s
            # a message may be lost: a peer that misses it receives the next one
            self._liveness.announce(self._about(self.scale))
        return Done()

    def _about(self, scale: Scale) -> bytes:
        now = self._now()
        kinds = tuple((k.needs, k.until - now) for k in self.kinds.values() if k.until > now)
        return encode(Envelope.TELL, 0, InUse(scale=scale, kinds=kinds))

    def _announced(self, about: bytes) -> None:
        try:
            message = decode(about).message
        except Malformed:
            message = None
        if not isinstance(message, InUse):
            self.counts["malformed"] += 1
            return
        if not self._fitting:
            self._fitting = True
            self._tasks.spawn(self._keep_fitting())
        now = self._now()
        for needs, left_s in message.kinds:
            kind = self.kind(needs)
            kind.until = max(kind.until, now + min(self._own.active_s, left_s))
        self.adopt(message.scale)
        self._wake.set()

    def adopt(self, scale: Scale | None) -> None:
        """Adopt a newer scale; of two that were made at once, all peers choose the same one."""
        if scale is None or scale <= self.scale:
            return
        rising = all(a <= b for a, b in zip(scale.points, (*scale.points[1:], TOP), strict=True))
        if rising and scale.version < VERSION_MAX:
            self.scale = scale
            self._wake.set()

    async def _keep_fitting(self) -> None:
        try:
            await self._fit()
        finally:
            self._fitting = False

    async def _fit(self) -> None:
        """As the speaker, while the layer is in use: see that no part of the ring is much fuller
        than others."""
        while True:
            late_s = self._own.fit_s * (0.75 + 0.5 * self._rng.random())
            least_s = self._own.fit_min_s * max(1.0, self._members.count / 100)
            self._misfits.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, late_s - least_s)):
                    await self._misfits.wait()
            # give the molecules time to settle
            await asyncio.sleep(min(least_s, self._own.fit_s))
            if not self.active:
                return
            if self._members.speaker != self._rpc.me.id:
                continue
            drawn = self._members.draw(self._rng, self._own.sampled, ())
            calls = [self._rpc.call(m.contact, Sample(), Sampled, 1.0) for m in drawn]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            orders = [a.order for a in answers if isinstance(a, Sampled)]
            made = fit(self.scale.version + 1, orders)
            most = SKEW_MAX if not self._misfits.is_set() else SKEW_MISFIT
            if made is not None and skew(self.scale, orders) > most * max(1.0, skew(made, orders)):
                self.counts["scales"] += 1
                self._liveness.announce(self._about(made))

    def _sample(self, sender: Contact, message: Sample) -> Sampled:
        return Sampled(order=self._mine()[0])

    # ----------------------------------------------------------------- this peer's own molecule

    def changed(self) -> None:
        """There may be more free capacity, or less."""
        if self.active:
            self._wake.set()

    def look(self, sender: Contact, message: Reserve | ReturnLeases) -> None:
        """A home that asked for leases may have consumed this peer's molecule; one that lets go of
        it sends a `ReturnLeases` without leases."""
        if isinstance(message, Reserve):
            if message.consumed:
                self.consumed(message.molecule, message.asks)
        elif not message.leases and not message.gangs:
            self.consumed(0, ())

    def consumed(self, version: int, asks: tuple[Room, ...]) -> None:
        """A home was given capacity of this version of the molecule, and asks for it now."""
        for kind in self.kinds.values():
            for holder, meta in list(kind.at.items()):
                if version and meta.version != version:
                    continue  # that of another kind; or a newer one, which is published again
                rest: Meta | None = meta if version else None
                for ask in asks:
                    if rest is not None:
                        rest = self.rest(kind, rest, ask.needs, ask.count)
                del kind.at[holder]
                if rest is not None:
                    kind.at[holder] = rest
        self.changed()

    def rest(self, kind: ResourceKind, meta: Meta, needs: Needs, count: int) -> Meta | None:
        """The rest of a molecule that stays at its node, because its place is the same."""
        member = self._members.get(meta.peer)
        if member is None or self.locate is not None:
            return None
        rest = rest_of(meta, member.capacity, needs, count)
        if rest is None or rest.order == meta.order:
            return rest
        stays = kind.holder(self.scale, rest.order) == kind.holder(self.scale, meta.order)
        return rest if stays else None

    def _mine(self) -> tuple[float, Ticket]:
        ticket, me = self._ticket(), self._members.me
        return order(load(ticket, me, self._config.queue_s_max), me.contact.id), ticket

    async def run(self) -> None:
        said_at = 0.0
        while True:
            try:
                async with asyncio.timeout(self._own.refresh_s if self.active else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            early_s = said_at + self._own.gap_s - self._now()
            await asyncio.sleep(max(0.0, early_s))  # so that changes at the same time go together
            self._wake.clear()
            said = False
            for kind in list(self.kinds.values()):
                if kind.until > self._now() and kind.includes(self._members.me):
                    said |= await self._say(kind)
            said_at = self._now() if said else said_at

    async def _say(self, kind: ResourceKind) -> bool:
        """Publish this peer's molecule, if it has changed or was published long ago."""
        me, now = self._members.me.contact.id, self._now()
        stands, ticket = self._mine()
        holder = await self.place(kind, stands)
        free, queues = ticket.free, ticket.queue_s > 0
        same = self._is_known(kind.at.get(holder), stands, free, queues)
        if same and now - kind.said_at < self._own.refresh_s / 2:
            return False
        self._version = max(self._version + 1, self._members.me.boot << 32)
        meta = Meta(me, stands, self._version, free, queues)
        left = [peer for peer in kind.at if peer != holder]
        kind.at.clear()
        kind.at[holder] = meta
        scale = self.scale.version
        self._leave(kind, left, scale)
        contact = self._members.contact(holder)
        worse, kind.said, kind.said_at = stands > kind.said, stands, now
        self.counts["published"] += 1
        message = Publish(metas=(meta,), scale=scale, kind=kind.needs)
        try:
            if contact is None:
                raise CallFailed("it is gone")
            if worse and not same:
                self._rpc.tell(contact, message)
            else:
                answer = await self._rpc.call(contact, message, Published, 1.0)
                self.adopt(answer.scale)
        except CallFailed:
            kind.said_at = 0.0
            asyncio.get_running_loop().call_later(AGAIN_S, self._wake.set)
        return True

    def _is_known(self, old: Meta | None, stands: float, free: Capacity, queues: bool) -> bool:
        """The molecule that was published last is still right."""
        if old is None or old.order != stands:
            return False
        if not alike(old.free, free, self._members.me.capacity):
            return False
        return old.queues == queues or stands < ROOM * STEPS

    def _leave(self, kind: ResourceKind, holders: list[bytes], scale: int) -> None:
        """Have these former holders drop this peer's molecule."""
        for peer in holders:
            contact = self._members.contact(peer)
            if contact is not None:
                # not the version just made, should that be passed on to this holder
                gone = ((self._members.me.contact.id, self._version - 1),)
                message = Publish(metas=(), gone=gone, scale=scale, kind=kind.needs)
                self._rpc.tell(contact, message)

    async def place(self, kind: ResourceKind, stands: float) -> bytes:
        """The node that holds molecules of this order."""
        if self.locate is not None:
            return await self.locate(key(kind.start, self.scale, stands))
        return kind.holder(self.scale, stands)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        """If the holder of this peer's molecule is gone, or another node comes before it, the
        molecule is put there. And the speaker tells a newcomer that the layer is in use."""
        if not self.active:
            return
        came = new.state == State.ALIVE and (old is None or old.boot != new.boot)
        speaker, newcomer = self._members.speaker, new.contact.id
        if speaker == newcomer:  # it does not know yet that it speaks: the next peer tells it
            speaker = self._members.following(newcomer, after=True)
        if came and speaker == self._rpc.me.id:
            about = self._about(self.scale)
            self._tasks.spawn(self._liveness.announce_to(new.contact, about))
        for kind in self.kinds.values():
            for holder, meta in list(kind.at.items()):
                if kind.holder(self.scale, meta.order) != holder:
                    kind.at.pop(holder, None)
                    self._wake.set()

    # ----------------------------------------------------------------- molecules of others

    def _publish(self, sender: Contact, message: Publish) -> Published:
        now, kind = self._now(), self.kind(message.kind)
        if kind.needs != message.kind:
            return Published()  # there are too many kinds: its molecule is among all others, too
        for wanted in (kind, self.kinds[ALL]):
            wanted.until = max(wanted.until, now + self._own.refresh_s)
        for meta in message.metas:
            if kind.stretch.put(meta, now):
                self._tell_wishes(kind, meta, now)
        if len(kind.stretch) > self._own.rows_max and not self._balancing:
            self._balancing = True
            asyncio.get_running_loop().call_later(self._own.balance_s, self._balance)
        self._drop_gone(kind, message, now)
        return Published(scale=self.scale if message.scale < self.scale.version else None)

    def _drop_gone(self, kind: ResourceKind, message: Publish, now: float) -> None:
        """Drop these molecules; those that were passed on to the successor are dropped there."""
        gone = tuple(row for row in message.gone if not kind.stretch.take(*row))
        passed_on = kind.stretch.gone_on(now) < float("inf")
        if gone and passed_on and message.hops < HOPS_MAX:
            self._hand_on(kind, (), gone, message.hops + 1)

    def _balance(self) -> None:
        self._balancing = False
        for kind in self.kinds.values():
            seam = kind.seam(self.scale, self._rpc.me.id)
            surplus = kind.stretch.surplus(self._now(), seam)
            self.counts["passed_on"] += len(surplus)
            for start in range(0, len(surplus), METAS_MAX):
                self._hand_on(kind, tuple(surplus[start : start + METAS_MAX]), (), 0)

    def _hand_on(
        self,
        kind: ResourceKind,
        metas: tuple[Meta, ...],
        gone: tuple[tuple[bytes, int], ...],
        hops: int,
    ) -> None:
        """Send these to the next node on the ring."""
        successor = kind.following(self._rpc.me.id, after=True)
        contact = self._members.contact(successor)
        if contact is not None and successor != self._rpc.me.id:
            message = Publish(
                metas=metas, gone=gone, scale=self.scale.version, hops=hops, kind=kind.needs
            )
            self._tasks.spawn(self._pass_on(contact, message))

    async def _pass_on(self, contact: Contact, message: Publish) -> None:
        try:
            await self._rpc.call(contact, message, Published, 1.0)
        except CallFailed:
            self.counts["not_passed_on"] += 1  # its peer publishes it again before long

    def give(self, kind: ResourceKind, meta: Meta, needs: Needs, count: int) -> None:
        """Give so many units of a molecule away; the rest stays if its place is here."""
        kind.stretch.give(meta, self.rest(kind, meta, needs, count))

    def _tell_wishes(self, kind: ResourceKind, meta: Meta, now: float) -> None:
        member = self._members.get(meta.peer)
        if member is None or meta.order >= STEPS:
            return
        wishes = kind.stretch.wishes
        for wish_key, wish in kind.stretch.in_turn():
            if wish.until <= now:
                del wishes[wish_key]
                continue
            if meta.peer in wish.avoid or unmet(member.capacity, member.traits, wish.needs):
                continue
            count = room(meta, wish.needs, min(wish.count, wish.each), wish.queue)
            home = self._members.contact(wish.home)
            if not count or home is None:
                continue
            wish.count -= count
            del wishes[wish_key]
            if wish.count > 0:
                wishes[wish_key] = wish  # last now: it got something, and the others wait
            self.give(kind, meta, wish.needs, count)
            kind.stretch.shares.give(wish.owner, count * wish.needs.capacity.millicores / 1000)
            self._rpc.tell(home, Appeared(meta=meta, needs=wish.needs, count=count))
            return

    def _appeared(self, sender: Contact, message: Appeared) -> None:
        if not self.on_appeared(message.meta, message.needs, message.count):
            self._rpc.tell(sender, Unwished(needs=message.needs))

    def _unwished(self, sender: Contact, message: Unwished) -> None:
        for kind in self.kinds.values():
            wishes = kind.stretch.wishes
            for old in [k for k in wishes if k[:2] == (sender.id, message.needs)]:
                del wishes[old]

    # ----------------------------------------------------------------- small things

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._tasks.close()
