"""Failure detection and the spread of membership: SWIM, with digests to end disagreement.

Each peer pings one other peer every second, in shuffled rounds; less often when nothing has changed
for a while. The peers that run work for it (`watched`) it pings itself, every other second. If a
ping is not answered, a few others are asked to ping; if they get no answer either, the peer is
suspected, and everybody hears of it; if it has not objected in time, it is declared dead. When a
ping is late, and the host itself says that nothing listens at that port (a refused connection), and
a second peer (if there is one) is told the same, the peer is declared dead at once: its process has
ended. Should that ever be wrong, it objects as to any rumour.

Pings carry rumours and a digest of the whole view. Where digests differ, the two peers exchange the
members that the other lacks: so a new peer is known everywhere in O(log n) seconds, and a quiet
cluster sends little. A dead peer is pinged now and then, so that a healed partition grows together
again.

In a large cluster, every peer would hear each rumour several times before all have heard it once.
There, the peer that sees a change first tells one peer, the *speaker* (the lowest id of all alive).
Every moment the speaker tells its news to a few peers, each of these to a few more, and so to
everybody once: a *wave*. A peer that is to pass it on confirms that it has it; one that does not
confirm is passed over. Waves only save time and messages: a peer that misses one learns of it
because its digest differs, whichever peer is the speaker.

When many of its own pings fail, or its own timers are late, a peer doubts itself first (after
Lifeguard): it waits longer for answers and objections and pings less often, so that an overloaded
machine or network is not loaded further, and no peer is declared dead for being as slow as all.
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

#: of this many pings, one goes to a peer believed dead
DEAD_PING_EVERY = 10
WATCHED_MAX = 48  # pinged at once
WATCHED_FEW = 8  # up to this many are all pinged at once; of more, half
LATE_S_MAX = 5.0
HINTS_MAX = 64
TASKS_MAX = 64


class Sign(Enum):
    """The result of a ping."""

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
        self._watches: list[bytes] = []  # watched peers that are still to be pinged in this turn
        self._watching = False
        self._doubt = 0  # of this peer in itself: own pings that failed
        self._late_s = 0.0  # how late this peer's own timers are
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
        """Spread news while there is any: among a thousand peers, pings alone need 30 seconds."""
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
        """Pass on the changes seen here first: to the speaker; or, as the speaker, to all."""
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
        members.fresh.update(dict.fromkeys(fresh))  # try again, with whichever peer is speaker then

    def announce(self, about: bytes) -> None:
        """Announce something to all peers, this one included. It may not reach every one."""
        self._send_all((), about)
        self.on_announced(about)

    async def announce_to(self, contact: Contact, about: bytes) -> None:
        """Announce it to one peer alone."""
        with contextlib.suppress(CallFailed):  # a peer that is gone again need not know
            message = Wave.of((), contact.id, self._members.digest, about)
            await self._rpc.call(contact, message, Done, 2.0)

    def _send_all(self, news: tuple[bytes, ...], about: bytes = b"") -> None:
        members = self._members
        peers = [p for p in members.between(b"", LAST) if p != self._rpc.me.id]
        self._send_on(peers, Wave.of(news, LAST, members.digest, about))

    def _send_on(self, peers: list[bytes], wave: Wave) -> None:
        """Send to all of these, sorted by id: cut into parts, each served by its first peer."""
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
            part = part[1:]  # the next peer serves the rest of them

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
        """A timer of this peer was late: those of all others on its machine may be late, too."""
        self._late_s = max(by_s, 0.7 * self._late_s) if by_s + self._late_s > 0.02 else 0.0

    def _patience(self) -> float:
        """The factor by which this peer waits longer while it doubts itself."""
        late = min(LATE_S_MAX, self._late_s)
        return 1 + self._doubt / 2 + 3 * late / self._config.probe_timeout_s

    def _to_watch(self) -> list[Member]:
        """The watched peers to ping now: all if they are few, else one half, then the other."""
        if not self._watches:
            self._watches = [peer for peer in self.watched() if peer != self._rpc.me.id]
            self._watching = bool(self._watches)
            count = len(self._watches)
            count = count if count <= WATCHED_FEW else (count + 1) // 2
        else:
            count = len(self._watches)
        now, self._watches = self._watches[:count], self._watches[count:]
        members = (self._members.get(peer) for peer in now[:WATCHED_MAX])
        return [m for m in members if m is not None and m.state <= State.SUSPECT]

    def stir(self) -> None:
        """There is a peer to watch now: do not wait until the quiet interval is over."""
        if not self._watching and self._interval_s() > self._config.probe_s:
            self._changed_at = self._now()
            self._hinted.set()

    def suspect(self, contact: Contact) -> None:
        """A call to this peer failed: probe it now instead of at its turn, once."""
        alive = self._members.is_alive(contact.id)
        if alive and contact.id not in self._probing and len(self._hints) < HINTS_MAX:
            self._hints[contact.id] = None
            if not self._doubt:
                self._hinted.set()

    def broke(self, peer: bytes) -> None:
        """A stream to this peer ended, not by this side."""
        contact = self._members.contact(peer)
        if contact is not None:
            self.suspect(contact)

    def _next(self) -> Member | None:
        """The next member to ping: one that a call failed to reach, or one of this round."""
        self._ticks += 1
        while self._hints:
            peer, _ = self._hints.popitem()
            if self._members.is_here(peer):
                return self._members.get(peer)
        if self._ticks % DEAD_PING_EVERY == 0:
            dead = self._members.a_dead_one(self._rng.randrange)
            if dead is not None:
                return dead
        return self._next_in_round()

    def _next_in_round(self) -> Member | None:
        while self._round or self._begin_round():
            peer = self._round.pop()
            if self._members.is_here(peer):
                return self._members.get(peer)
        return None

    def _begin_round(self) -> bool:
        """Every member that is here, in a new order; False if there is none but this peer."""
        me = self._members.me.contact.id
        self._round = [m.contact.id for m in self._members.here() if m.contact.id != me]
        self._rng.shuffle(self._round)
        return bool(self._round)

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
            return  # everybody suspects it already: no need to ask around again
        verdict = await self._ask_around(contact, sign)
        member = self._members.get(contact.id)
        if verdict is not None and member is not None and member.boot == target.boot:
            self._members.judge(contact.id, verdict, self._now())

    async def _ask_around(self, contact: Contact, sign: Sign) -> State | None:
        """The verdict of others; None if it is alive. Two refusals are proof, one is not."""
        both = (contact.id, self._rpc.me.id)
        drawn = self._members.draw(self._rng, self._config.indirect_probes, without=both)
        helpers = [m.contact for m in drawn]
        if not helpers:
            return State.DEAD if sign is Sign.REFUSED else State.SUSPECT
        asked = [asyncio.ensure_future(self._ask(helper, contact)) for helper in helpers]
        try:
            for answer in asyncio.as_completed(asked):
                seen = await answer
                if seen is Sign.ANSWERED:
                    return None
                if seen is sign is Sign.REFUSED:
                    return State.DEAD
        finally:
            for task in asked:
                task.cancel()
        return State.SUSPECT

    async def _look(self, contact: Contact) -> Sign:
        """Ping a peer; if the answer is late, also ask its host whether anything listens there."""
        ping = asyncio.ensure_future(self._ping_once(contact))
        try:
            done, _ = await asyncio.wait((ping,), timeout=self._config.knock_after_s)
            known = self._members.contact(contact.id)  # only there: nobody may choose an address
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
            # a round takes as many pings as there are members: a newcomer has its turn in this one
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
            # all who heard of the suspicion come to this verdict at about the same time: no news
            self._members.judge(member.contact.id, State.DEAD, self._now(), fresh=False)

    # ----------------------------------------------------------------- agreeing

    def _hear(self, rumours: tuple[bytes, ...]) -> None:
        before = self._members.me
        self._members.hear(rumours, self._now())
        if self._members.me is not before:
            self._news.set()  # this peer has objected: all must hear that in time

    def _disagree(self, contact: Contact) -> None:
        now = self._now()
        scale = max(1.0, self._members.count / 100)  # among many, some always have news
        if now - self._last_sync >= scale * self._sync_s:
            self._agree_with(contact, now)

    def _agree_with(self, contact: Contact, now: float) -> None:
        self._last_sync = now
        # while there is news all the time, rumours alone carry most of it
        self._sync_s = min(self._config.sync_s_max, 1.5 * self._sync_s)
        self._spawn(self.sync(contact))

    async def sync(self, contact: Contact) -> None:
        """Exchange what either side lacks. It may fail: then the digests will differ again."""
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
        """Say goodbye, which is better than any detection. In a large cluster, some pass it on."""
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
        newer = [  # than what the sender has just told, such as deaths that are no news any more
            peer
            for peer, *rank in briefs(message.members)
            if (member := known(peer)) is not None and [*member[4:7]] > rank
        ]
        wanted = (self._members.packed(peer) for peer in dict.fromkeys((*message.wanted, *newer)))
        return Rumours.of(tuple(packed for packed in wanted if packed))

    def _left(self, sender: Contact, message: Leave) -> Done:
        self._members.apply(message.member, self._now())
        return Done()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: object) -> None:
        if len(self._tasks) >= TASKS_MAX:
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
