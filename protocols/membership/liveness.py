"""Failure detection and the spread of membership: SWIM, with digests to end disagreement.

Each peer pings one other a second, in shuffled rounds; when nothing has changed for a while, less
often. Whom it has given work to (`watched`) it pings itself, every other second. No answer: a few
others are asked to ping it; still none: it is suspected, and everybody hears; if it has not
objected in time, it is dead. Where a ping is late and the host itself says that nobody listens at
that port (a refused connection), and a second peer (if there is one) is told the same, it is dead
without further waiting: its process has ended. Should that ever be wrong, it objects as to any
rumour.

Pings carry rumours and a digest of the whole view; where digests differ the two exchange what the
other lacks, so a new peer is known everywhere in O(log n) seconds, and a quiet cluster says little.
A dead peer is pinged now and then, so that a healed partition grows together again.

Among many, each would hear everything several times before all have heard it once. There, who sees
a change first tells one peer, the *speaker* (of all alive the one with the lowest id): every moment
it tells what has come in to a few, each of these to a few more, and so everybody once: a *wave*.
Whoever passes it on to others says that it has it; a peer that does not is passed over. Waves only
save time and messages: who misses one is told by its digest, whoever is the speaker.

When many of its own pings fail, or its own timers come late, a peer doubts itself first (after
Lifeguard): it waits longer for answers and objections and asks less often, so that an overloaded
machine or network is not loaded further, and nobody is declared dead for being slow like all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterable
from enum import Enum

from ..config import Config
from ..wire.messages import (
    Ack,
    Contact,
    Done,
    Exchange,
    Leave,
    Member,
    Ping,
    PingedFor,
    PingFor,
    Rumours,
    Sync,
    Synced,
    Wave,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .members import LAST, Members, State, briefs

#: every so many pings one goes to a peer believed dead
DEAD_PING_EVERY = 10
WATCHED_MAX = 48
WATCHED_FEW = 8
LATE_S_MAX = 5.0


class Sign(Enum):
    """What became of a ping."""

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"


class Liveness:
    def __init__(self, rpc: Rpc, members: Members, rng: random.Random, config: Config) -> None:
        self._rpc = rpc
        self._members = members
        self._rng = rng
        self._config = config
        self._round: list[bytes] = []
        self._hints: dict[bytes, None] = {}
        self._hinted = asyncio.Event()
        self._news = asyncio.Event()
        self._probing: set[bytes] = set()
        self._suspected: dict[bytes, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sync = -math.inf
        self._sync_s = config.sync_s_min
        self._changed_at = -math.inf
        self._watches: list[bytes] = []  # of those that are watched, the ones whose turn is next
        self._watching = False
        self._doubt = 0  # in this peer's own view of things
        self._late_s = 0.0
        self.on_announced: Callable[[bytes], None] = lambda about: None
        self.watched: Callable[[], Iterable[bytes]] = tuple
        self._ticks = 0
        rpc.on(Ping, self._ping)
        rpc.on(PingFor, self._ping_for)
        rpc.on(Sync, self._sync)
        rpc.on(Exchange, self._exchange)
        rpc.on(Rumours, self._rumours)
        rpc.on(Wave, self._wave)
        rpc.on(Leave, self._left)
        members.listen(self._changed)

    # ----------------------------------------------------------------- driving

    async def run(self) -> None:
        while True:
            wait_s = self._interval_s() * (0.9 + 0.2 * self._rng.random())
            start = self._now()
            try:
                async with asyncio.timeout(wait_s):
                    await self._hinted.wait()
            except TimeoutError:
                self._late(self._now() - start - wait_s)
            self._hinted.clear()
            for member in self._to_watch():
                self._spawn(self._probe(member))
            target = self._next()
            if target is not None:
                self._spawn(self._probe(target))
            self._members.forget(self._now())

    async def gossip(self) -> None:
        """While there is news, tell it: pings alone take half a minute to a thousand peers."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._config.gossip_s * (0.75 + 0.5 * self._rng.random()))
            if self._members.count >= self._config.wave_min:
                await self._pass_on()
                continue
            rumours = self._members.rumours(self._config.gossip_per_message)
            if not rumours:
                self._news.clear()
            for member in self._members.draw(self._rng, 1, (self._rpc.me.id,)) if rumours else ():
                self._rpc.tell(member.contact, Rumours.of(rumours))

    async def _pass_on(self) -> None:
        """What this peer has seen: as the speaker to all, else to the speaker."""
        members = self._members
        fresh = members.take_fresh(self._config.wave_news_max)
        if not fresh:
            self._news.clear()
            return
        if members.speaker == self._rpc.me.id:
            self._send_all(fresh)
            return
        contact = members.contact(members.speaker)
        try:
            if contact is not None:
                answer = await self._rpc.call(contact, Exchange.of(fresh, ()), Rumours)
                self._hear(answer.members)
                return
        except CallFailed:
            pass
        members.fresh.update(dict.fromkeys(fresh))  # to whoever speaks then

    def announce(self, about: bytes) -> None:
        """All peers are to know it; this one, too. May not reach one or another."""
        self._send_all((), about)
        self.on_announced(about)

    async def announce_to(self, contact: Contact, about: bytes) -> None:
        """To this one alone."""
        with contextlib.suppress(CallFailed):  # who is gone again need not know
            message = Wave.of((), contact.id, self._members.digest, about)
            await self._rpc.call(contact, message, Done, 2.0)

    def _send_all(self, news: tuple[bytes, ...], about: bytes = b"") -> None:
        members = self._members
        peers = [p for p in members.between(b"", LAST) if p != self._rpc.me.id]
        self._send_on(peers, Wave.of(news, LAST, members.digest, about))

    def _send_on(self, peers: list[bytes], wave: Wave) -> None:
        """To all of these, whose ids rise, by the first of each part of them."""
        width = self._config.wave_width
        size = -(-len(peers) // width) if len(peers) > 2 * width else 1
        for start in range(0, len(peers), size):
            part = peers[start : start + size]
            after = peers[start + size] if start + size < len(peers) else wave.end
            self._spawn(self._send_part(part, after, wave))

    async def _send_part(self, part: list[bytes], end: bytes, wave: Wave) -> None:
        while part:
            contact = self._members.contact(part[0])
            last = len(part) == 1
            message = Wave.of(wave.members, part[0] if last else end, wave.digest, wave.about)
            try:
                if contact is not None and last:
                    self._rpc.tell(contact, message)
                elif contact is not None:
                    limit_s = self._config.probe_timeout_s
                    await self._rpc.call(contact, message, Done, limit_s, probing=True)
                    return
            except CallFailed:
                pass
            part = part[1:]  # the next one sees to the others

    def _wave(self, sender: Contact, message: Wave) -> Done:
        now, me = self._now(), self._rpc.me.id
        before = self._members.me
        self._members.hear(message.members, now, news=False)
        if self._members.me is not before:
            self._news.set()
        peers = self._members.between(me, message.end)
        if peers:
            self._send_on(peers, message)
        if message.about:
            self.on_announced(message.about)
        differs = message.digest != self._members.digest and not self._members.fresh
        if differs and now - self._last_sync >= self._sync_s:
            self._agree_with(sender, now)
        return Done()

    def _interval_s(self) -> float:
        config = self._config
        quiet = self._now() - self._changed_at > config.probe_quiet_after_s
        base = config.probe_quiet_s if quiet and not self._watching else config.probe_s
        return base * (1 + self._doubt + min(LATE_S_MAX, self._late_s))

    def _late(self, by_s: float) -> None:
        """A timer of this peer's own was late: so may be those of all others on its machine."""
        self._late_s = max(by_s, 0.7 * self._late_s) if by_s + self._late_s > 0.02 else 0.0

    def _patience(self) -> float:
        late = min(LATE_S_MAX, self._late_s)
        return 1 + self._doubt / 2 + 3 * late / self._config.probe_timeout_s

    def _to_watch(self) -> list[Member]:
        """A few each second; of many half, so that each has its turn every other second."""
        if not self._watches:
            self._watches = [peer for peer in self.watched() if peer != self._rpc.me.id]
            self._watching = bool(self._watches)
            count = len(self._watches)
            count = count if count <= WATCHED_FEW else (count + 1) // 2
        else:
            count = len(self._watches)
        now, self._watches = self._watches[:count], self._watches[count:]
        found = (self._members.get(peer) for peer in now[:WATCHED_MAX])
        return [m for m in found if m is not None and m.state <= State.SUSPECT]

    def stir(self) -> None:
        """There is somebody to watch now: not only when a quiet while is over."""
        if not self._watching and self._interval_s() > self._config.probe_s:
            self._changed_at = self._now()
            self._hinted.set()

    def suspect(self, contact: Contact) -> None:
        """A call to it failed: look at it now instead of at its turn. Once is enough."""
        member = self._members.get(contact.id)
        alive = member is not None and member.state == State.ALIVE
        if alive and contact.id not in self._probing and len(self._hints) < 64:
            self._hints[contact.id] = None
            if not self._doubt:
                self._hinted.set()

    def broke(self, peer: bytes) -> None:
        """A stream to it ended, not by this side."""
        contact = self._members.contact(peer)
        if contact is not None:
            self.suspect(contact)

    def _next(self) -> Member | None:
        self._ticks += 1
        while self._hints:
            peer, _ = self._hints.popitem()
            member = self._members.get(peer)
            if member is not None and member.state <= State.SUSPECT:
                return member
        if self._ticks % DEAD_PING_EVERY == 0:
            dead = self._members.a_dead_one(self._rng.randrange)
            if dead is not None:
                return dead
        while True:
            if not self._round:
                mine = self._members.me.contact.id
                self._round = [m.contact.id for m in self._members.here() if m.contact.id != mine]
                self._rng.shuffle(self._round)
                if not self._round:
                    return None
            member = self._members.get(self._round.pop())
            if member is not None and member.state <= State.SUSPECT:
                return member

    async def _probe(self, target: Member) -> None:
        if target.contact.id in self._probing:
            return
        self._probing.add(target.contact.id)
        try:
            await self._examine(target)
        finally:
            self._probing.discard(target.contact.id)

    async def _examine(self, target: Member) -> None:
        contact = target.contact
        sign = await self._look(contact)
        if sign is Sign.ANSWERED:
            self._doubt = max(0, self._doubt - 1)
            return
        if sign is Sign.SILENT and target.state <= State.SUSPECT:
            self._doubt = min(self._config.self_doubt_max, self._doubt + 1)
        member = self._members.get(contact.id)
        if sign is Sign.SILENT and member is not None and member.state >= State.SUSPECT:
            return  # as everybody thinks: no need to ask around once more
        verdict = await self._ask_around(contact, sign)
        member = self._members.get(contact.id)
        if verdict is not None and member is not None and member.boot == target.boot:
            self._members.judge(contact.id, verdict, self._now())

    async def _ask_around(self, contact: Contact, sign: Sign) -> State | None:
        """What others see; None if it is there. Two refusals are proof, one is not."""
        mine = (contact.id, self._rpc.me.id)
        drawn = self._members.draw(self._rng, self._config.indirect_probes, without=mine)
        helpers = [m.contact for m in drawn]
        if not helpers:
            return State.DEAD if sign is Sign.REFUSED else State.SUSPECT
        asked = [asyncio.ensure_future(self._ask(helper, contact)) for helper in helpers]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is Sign.ANSWERED:
                    return None
                if found is sign is Sign.REFUSED:
                    return State.DEAD
        finally:
            for task in asked:
                task.cancel()
        return State.SUSPECT

    async def _look(self, contact: Contact) -> Sign:
        """Ping it; if the answer is late, also ask its host whether anybody listens there."""
        ping = asyncio.ensure_future(self._ping_once(contact))
        try:
            done, _ = await asyncio.wait((ping,), timeout=self._config.knock_after_s)
            known = self._members.contact(contact.id)  # no other address is tried for anybody
            if not done and known == contact and await self._rpc.knock(contact):
                return Sign.ANSWERED if ping.done() and ping.result() else Sign.REFUSED
            return Sign.ANSWERED if await ping else Sign.SILENT
        finally:
            ping.cancel()

    async def _ping_once(self, contact: Contact) -> bool:
        about = self._members.get(contact.id)
        rumours = self._members.rumours(self._config.gossip_per_ping)
        if about is not None and about.state != State.ALIVE:
            packed = self._members.packed(contact.id)
            rumours = (packed, *rumours[:-1]) if packed else rumours  # so that it can object
        ping = Ping.of(self._members.digest, rumours)
        try:
            limit_s = self._config.probe_timeout_s * self._patience()
            ack = await self._rpc.call(contact, ping, Ack, limit_s, probing=True)
        except CallFailed:
            return False
        self._hear(ack.rumours)
        if ack.digest != self._members.digest:
            self._disagree(contact)
        else:
            self._sync_s = self._config.sync_s_min
        return True

    async def _ask(self, helper: Contact, target: Contact) -> Sign:
        try:
            wait_s = 1.5 * self._config.probe_timeout_s * self._patience()
            message = PingFor(target=target)
            answer = await self._rpc.call(helper, message, PingedFor, wait_s, probing=True)
        except CallFailed:
            return Sign.SILENT
        if answer.alive:
            return Sign.ANSWERED
        return Sign.REFUSED if answer.refused else Sign.SILENT

    def _changed(self, old: Member | None, new: Member) -> None:
        peer = new.contact.id
        self._news.set()
        self._changed_at = self._now()
        if new.state == State.ALIVE and (old is None or old.state >= State.DEAD):
            # a round takes as many pings as there are members: who comes has its turn in this one
            self._round.insert(int(self._rng.random() * (len(self._round) + 1)), peer)
        timer = self._suspected.pop(peer, None)
        if timer is not None:
            timer.cancel()
        if new.state == State.SUSPECT:
            scale = max(1.0, math.log10(len(self._members)))
            scale *= self._patience()
            self._suspected[peer] = asyncio.get_running_loop().call_later(
                self._config.suspicion_s * scale, self._condemn, new
            )

    def _condemn(self, member: Member) -> None:
        self._suspected.pop(member.contact.id, None)
        if self._members.get(member.contact.id) == member:  # no objection came
            # all who heard of the suspicion come to this at about the same time: no news to them
            self._members.judge(member.contact.id, State.DEAD, self._now(), fresh=False)

    # ----------------------------------------------------------------- agreeing

    def _hear(self, rumours: tuple[bytes, ...]) -> None:
        before = self._members.me
        self._members.hear(rumours, self._now())
        if self._members.me is not before:
            self._news.set()  # this peer has objected: that is to be heard in time

    def _disagree(self, contact: Contact) -> None:
        now = self._now()
        scale = max(1.0, self._members.count / 100)  # of many, some always have news
        if now - self._last_sync >= scale * self._sync_s:
            self._agree_with(contact, now)

    def _agree_with(self, contact: Contact, now: float) -> None:
        self._last_sync = now
        # while there is no end of news, rumours alone carry most of it
        self._sync_s = min(self._config.sync_s_max, 1.5 * self._sync_s)
        self._spawn(self.sync(contact))

    async def sync(self, contact: Contact) -> None:
        """Exchange what either side lacks. Failure is no matter: digests will differ again."""
        members = self._members
        digests = members.digests()
        try:
            answer = await self._rpc.call(contact, Sync(digests=digests), Synced)
            self._hear(answer.members)
            known = [*answer.known, *briefs(answer.members)]
            lacks, wanted = members.compare(answer.parts, len(digests) // 4, known)
            if lacks or wanted:
                message = Exchange.of(lacks, wanted)
                news = await self._rpc.call(contact, message, Rumours)
                self._hear(news.members)
        except CallFailed:
            return

    async def leave(self) -> None:
        """Say goodbye: worth more than any detection. In a large cluster some pass it on."""
        others = [m.contact for m in self._members.here() if m.contact.id != self._rpc.me.id]
        told = self._rng.sample(others, min(len(others), self._config.farewells_max))
        self._members.leave()
        farewell = Leave(member=self._members.me)
        calls = [self._rpc.call(c, farewell, Done, 1.0, probing=True) for c in told]
        await asyncio.gather(*calls, return_exceptions=True)

    # ----------------------------------------------------------------- answering

    def _ping(self, sender: Contact, message: Ping) -> Ack:
        self._hear(message.rumours)
        differs = message.digest and message.digest != self._members.digest
        if differs and self._members.get(sender.id) is None:
            self._disagree(sender)
        most = self._config.gossip_per_ping
        rumours = self._members.rumours(most, frozenset(message.rumours))
        return Ack.of(self._members.digest, rumours)

    async def _ping_for(self, sender: Contact, message: PingFor) -> PingedFor:
        sign = await self._look(message.target)
        return PingedFor(alive=sign is Sign.ANSWERED, refused=sign is Sign.REFUSED)

    def _sync(self, sender: Contact, message: Sync) -> Synced:
        try:
            return Synced.of(*self._members.differing(message.digests, self._now()))
        except ValueError as error:
            raise Refused("protocol", str(error)) from None

    def _rumours(self, sender: Contact, message: Rumours) -> None:
        self._hear(message.members)

    def _exchange(self, sender: Contact, message: Exchange) -> Rumours:
        self._hear(message.members)
        known = self._members.get
        newer = [  # than what it has just told, such as deaths that are no news any more
            peer
            for peer, *rank in briefs(message.members)
            if (mine := known(peer)) is not None and [*mine[4:7]] > rank
        ]
        wanted = (self._members.packed(peer) for peer in dict.fromkeys((*message.wanted, *newer)))
        return Rumours.of(tuple(packed for packed in wanted if packed))

    def _left(self, sender: Contact, message: Leave) -> Done:
        self._members.apply(message.member, self._now())
        return Done()

    # ----------------------------------------------------------------- small things

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: object) -> None:
        if len(self._tasks) >= 64:
            work.close()  # type: ignore[attr-defined]
            return
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for timer in self._suspected.values():
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
