"""Between a task queue and a site: the site's master pilot pulls tasks for it, and brings back what
became of them, all in bulk.

Rules:
- What is at the site is the truth, and the queue's journal is what counts. This part remembers
  nothing that can't be asked for again: a new master asks the pilots what they have.
- A request has a number and is repeated until it is answered. Tasks that were given to a request
  whose answer was lost are given again with the same answer; if the queue or the master began anew,
  what nobody holds is lost, and given out once more.
- A pilot keeps an outcome until the queue has it on its disk. While the queue is down, what was
  pulled goes on, and outcomes wait with the pilots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from ..membership.members import Members, State
from ..strategies.base import READ_BYTES_MIN, Placed, Unit, reads_of
from ..strategies.pilots.pilots import Pilots
from ..strategies.pilots.site import SiteView
from ..tasks import Tasks
from ..wire.messages import (
    Abort,
    AskHeld,
    AttemptKey,
    Commit,
    Committed,
    Contact,
    Done,
    HeldHere,
    Member,
    Message,
    Outcome,
    Placing,
    PulledTasks,
    PullTasks,
    Reported,
    ReturnLeases,
    StillHeld,
    Unheld,
    Work,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .outbox import size_bytes
from .outstanding import Given

log = logging.getLogger("valence.relay")

POLL_S = 2.0
WORDS_S = 2.0  # between two words on where everything is
WORDS_MAX, WORDS_KEYS_MAX = 200, 2000
LOOK_S = 30.0
GAP_S = 0.15  # between two requests: what ends within it shares the next
MORE_S = 0.5  # before more is asked for, where there is enough to go on with
AHEAD_S = 1.0
PACE_S = 3.0
PACE_MIN = 0.05  # slower than that, nothing is asked for ahead
CORES_MIN = 0.05
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
WORKS_MAX = 2000
OUTCOMES_MAX, OUTCOMES_BYTES_MAX = 1000, 2 << 20
ASK_AT_ONCE = 64
ASK_S = 2.0
ACK_S = 12.0
LOST_MAX = 20_000
HELD_MAX = 50_000
EPOCHS_MAX = 10_000  # workflows, the latest of which tasks came

#: carries a message to the queue and brings its answer, or `CallFailed`
Exchange = Callable[[Message], Awaitable[Message]]


class Relay:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        site: SiteView,
        pilots: Pilots,
        rng: random.Random,
        exchange: Exchange | None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.exchange = exchange  # None: there is no queue
        self.reason = ""  # why the queue can't be reached
        self.settled = False  # before others are known, everybody believes that it is the master
        self.given = Given(rpc, members, lambda id: self._epochs.get(id, 0), self._on_lost)
        self._rpc = rpc
        self._members = members
        self._site = site
        self._pilots = pilots
        self._rng = rng
        self._token = 0  # 0: not in office
        self._number = 0
        self._anew = False
        self._works: dict[AttemptKey, Work] = {}  # pulled, and not placed
        self._epochs: OrderedDict[str, int] = OrderedDict()
        # by pilot: an attempt whose first pilot was believed lost may end at two of them
        self._outcomes: dict[tuple[bytes, AttemptKey], Outcome] = {}
        self._acks: dict[tuple[bytes, AttemptKey], asyncio.Future[bool]] = {}
        self._lost: dict[AttemptKey, str] = {}
        self._dead: set[bytes] = set()
        self._told: frozenset[bytes] = frozenset()  # pilots that the queue knows of
        self._bound: set[AttemptKey] = set()  # of those, what reads files that are at this site
        self._cores = 1.0  # that a task takes, of late
        self._pace = 0.0  # tasks that end here in a second, of late
        self._paced_at = 0.0
        self._said_at = -WORDS_S
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        members.listen(self._member_changed)

    def settle(self) -> None:
        self.settled = True
        self._wake.set()

    @property
    def in_office(self) -> bool:
        return self._token != 0

    def _is_master(self) -> bool:
        return self._site.master(self._site.name) == self._rpc.me.id

    def _member_changed(self, old: Member | None, new: Member) -> None:
        if new.state >= State.DEAD and self.in_office:
            peer = new.contact.id
            if peer in self._told:
                self._dead.add(peer)
            what = "died" if new.state == State.DEAD else "left"
            lost = [(k, f"its peer {peer.hex()[:8]} {what}") for k in self.given.to(peer)]
            if lost:
                self._on_lost(lost)
        elif old is not None and old.boot != new.boot:
            self.given.doubt(new.contact.id)
        self._wake.set()

    # ----------------------------------------------------------------- with the queue

    async def run(self) -> None:
        if self.exchange is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        delay_s = RETRY_S_MIN
        pending: PullTasks | None = None
        while True:
            if not self.settled or not self._is_master():
                if self.in_office:
                    self._leave_office()
                pending = None
                await self._until_woken(LOOK_S)  # who is master changes with the members
                continue
            if not self.in_office:
                await self._take_office()
            began = self._now()
            pending = pending or await self._request()
            try:
                answer = await self._exchange(pending)
            except CallFailed as error:
                if not self.reason:
                    what = "refuses" if isinstance(error, Refused) else "can't be reached"
                    log.warning("the task queue %s: %s", what, error)
                self.reason = str(error)
                self.counts["failed"] += 1
                if pending.anew:  # who is here, and what they hold, may be other things by then
                    pending, self._anew = None, True
                await asyncio.sleep(delay_s * self._rng.uniform(0.75, 1.25))
                delay_s = min(RETRY_S_MAX, 2 * delay_s)
                continue
            if self.reason:
                log.info("the task queue answers again")
            self.reason, delay_s = "", RETRY_S_MIN
            self._take(pending, answer)
            pending = None
            if self._anew:
                continue
            # what outcomes set free came with the answer: an empty one is not asked for again soon
            await asyncio.sleep(max(0.0, began + GAP_S - self._now()))
            if self._outcomes or self._lost or self._dead or (self._hungry() and answer.works):
                continue
            await self._until_woken(MORE_S if self._want() and answer.works else POLL_S)

    async def _until_woken(self, limit_s: float) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()

    async def _exchange(self, message: Message) -> PulledTasks:
        assert self.exchange is not None
        self.counts["requests"] += 1
        answer = await self.exchange(message)
        if not isinstance(answer, PulledTasks):
            raise Refused("protocol", f"{type(answer).__name__} is no answer to this")
        return answer

    async def _take_office(self) -> None:
        self._token = self._rng.getrandbits(62) + 1
        self._anew = True
        self._told = frozenset()
        self.given.settled = True
        self.counts["offices"] += 1

    def _leave_office(self) -> None:
        """Another one is master: it learns from the pilots what is here."""
        self._token = 0
        self._pilots.withdraw(list(self._works))
        for rows in (self._works, self._bound, self._lost, self._outcomes):
            rows.clear()  # pilots keep what is not kept
        for future in self._acks.values():
            if not future.done():
                future.set_result(False)
        self._acks.clear()

    async def _request(self) -> PullTasks:
        self._number += 1
        anew, self._anew = self._anew, False
        pilots = self._site.pilots()
        here = frozenset(m.contact.id for m in pilots)
        held = await self._ask_pilots(pilots) if anew else ()
        outcomes: list[tuple[bytes, Outcome]] = []
        size = 0
        for (pilot, _), ended in self._outcomes.items():
            size += size_bytes(ended)
            if outcomes and (size > OUTCOMES_BYTES_MAX or len(outcomes) >= OUTCOMES_MAX):
                break
            outcomes.append((pilot, ended))
        message = PullTasks(
            site=self._site.name,
            token=self._token,
            request=self._number,
            pilots=tuple(pilots) if anew or here != self._told else (),
            dead=tuple(self._dead),
            outcomes=tuple(outcomes),
            lost=tuple(list(self._lost.items())[:LOST_MAX]),
            want=0 if anew else self._want(),
            anew=anew,
            held=held,
            whereabouts=self._whereabouts(),
        )
        self._told = here
        return message

    def _whereabouts(self) -> tuple[tuple[str, tuple[AttemptKey, ...]], ...] | None:
        """For those who ask the queue why. Of many, some: what is left out is at the site, too."""
        if self._now() - self._said_at < WORDS_S:
            return None
        self._said_at = self._now()
        rows: dict[str, list[AttemptKey]] = {}
        left = WORDS_KEYS_MAX
        for key in self._works:
            if left > 0:
                words = self._pilots.waiting_for(key) or "a pilot has been found for it"
                rows.setdefault(words[:2000], []).append(key)
                left -= 1
        for peer in self.given.peers():
            keys = self.given.to(peer)[: max(0, left)]
            left -= len(keys)
            if keys:
                rows[f"it was given to peer {peer.hex()[:8]}"] = keys
        return tuple((words, tuple(keys)) for words, keys in list(rows.items())[:WORDS_MAX])

    async def _ask_pilots(self, pilots: list[Member]) -> tuple[AttemptKey, ...]:
        """All attempts that are at the site: with its pilots, and on this master's list."""
        slots = asyncio.Semaphore(ASK_AT_ONCE)

        async def ask(member: Member) -> tuple[AttemptKey, ...]:
            async with slots:
                try:
                    answer = await self._rpc.call(member.contact, AskHeld(), HeldHere, ASK_S)
                except CallFailed:
                    return ()  # dead, or as good as that
                for key in answer.keys:
                    if (member.contact.id, key) not in self._outcomes:
                        self.given.add(member.contact.id, key)
                return tuple(answer.keys)

        found = await asyncio.gather(*map(ask, pilots))
        waiting = dict.fromkeys(key for keys in found for key in keys)
        waiting.update(dict.fromkeys(self._works))
        waiting.update(dict.fromkeys(key for _, key in self._outcomes))
        for peer in self.given.peers():  # perhaps on its way there; else it is asked about
            waiting.update(dict.fromkeys(self.given.to(peer)))
        return tuple(waiting)[:HELD_MAX]

    def _free(self) -> int:
        """For so many tasks there is room, if they are as large as those of late."""
        cores = sum(m.capacity.millicores for m in self._site.pilots()) / 1000
        return max(1, round(cores / self._cores)) - len(self.given)

    def _want(self) -> int:
        """What there is room for, and what will be begun until the next answer: what is pulled
        long before waits here while it could run at another site. What reads files of this site is
        not counted, as it waits for whoever holds them: others are to have something to do."""
        waiting = len(self._works) - len(self._bound)
        wanted = self._free() + math.ceil(AHEAD_S * self._pace - PACE_MIN) - waiting
        return max(0, min(WORKS_MAX - len(self._works), wanted))

    def _hungry(self) -> bool:
        """Somebody may have nothing to do: that does not wait for the next outcome."""
        return len(self._works) == len(self._bound) and self._free() > 0

    def _take(self, asked: PullTasks, answer: PulledTasks) -> None:
        kept = set(answer.kept)
        for pilot, ended in asked.outcomes:  # what was told, not what came since
            if ended.key in kept:
                self._outcomes.pop((pilot, ended.key), None)
                future = self._acks.pop((pilot, ended.key), None)
                if future is not None and not future.done():
                    future.set_result(True)
        for key, _ in asked.lost:
            self._lost.pop(key, None)
        self._dead.difference_update(asked.dead)
        if answer.ended:
            self._end(answer.ended)
        if answer.again:
            self._anew = True
            return
        self._keep_pace(len(asked.outcomes))
        self.counts["pulled"] += len(answer.works)
        units = []
        for work in answer.works:
            self._works[work.key] = work
            self._epochs[work.key.workflow] = work.epoch
            self._epochs.move_to_end(work.key.workflow)
            if len(self._epochs) > EPOCHS_MAX:
                self._epochs.popitem(last=False)
            cores = max(CORES_MIN, work.needs.capacity.millicores / 1000)
            self._cores += (cores - self._cores) / 10
            units.append(self._unit(work))
        self._pilots.add(units)

    def _keep_pace(self, ended: int) -> None:
        """A mean over some seconds, that forgets as time goes by."""
        now = self._now()
        gone = math.exp(-(now - self._paced_at) / PACE_S)
        self._pace, self._paced_at = self._pace * gone + ended / PACE_S, now

    def _unit(self, work: Work) -> Unit:
        """It was pulled for this site, and is looked for here."""
        large = [f for f in work.inputs if f.size >= READ_BYTES_MIN]
        near = frozenset(peer for file in large for peer in file.holders)
        if not near.isdisjoint(self._told):
            self._bound.add(work.key)
        placing = work.placing or Placing()
        due_s = placing.deadline_in_s
        return Unit(
            work.key,
            work.needs._replace(site=self._site.name),
            rank=placing.rank_s,
            runtime_s=work.runtime_s,
            deadline_at=None if due_s is None else self._now() + due_s,
            avoid=frozenset(placing.avoid),
            near=near,
            reads=reads_of(work.inputs),
            ranked_by=placing.ranked_by,
            owner=work.owner,
        )

    def _unpull(self, key: AttemptKey) -> Work | None:
        self._bound.discard(key)
        return self._works.pop(key, None)

    # ----------------------------------------------------------------- with the site

    def placed(self, batch: list[Placed]) -> None:
        """Leases for what was pulled."""
        by_peer: dict[bytes, tuple[Contact, list[Work]]] = {}
        for one in batch:
            work = self._unpull(one.unit.key)
            if work is None:
                self._rpc.tell(one.peer, ReturnLeases(leases=(one.lease,)))
                continue
            made = work._replace(lease=one.lease)
            by_peer.setdefault(one.peer.id, (one.peer, []))[1].append(made)
        for peer, works in by_peer.values():
            for work in works:
                self.given.add(peer.id, work.key)
                self.given.on_the_way.add(work.key)
            self._tasks.spawn(self._commit(peer, works))
        if self._hungry():
            self._wake.set()

    async def _commit(self, peer: Contact, works: list[Work]) -> None:
        try:
            answer = await self._rpc.call(peer, Commit.of(tuple(works)), Committed)
            refused = dict(answer.refused)
        except Refused as error:
            refused = dict.fromkeys((work.key for work in works), str(error))
        except CallFailed:
            refused = {}
            self.given.doubt(peer.id)  # it may have got it or not
        finally:
            self.given.on_the_way.difference_update(work.key for work in works)
        again = [work for work in works if work.key in refused]
        self.given.drop(peer.id, refused)
        if again and self.in_office:
            for work in again:
                self._works[work.key] = work
            self._pilots.add(map(self._unit, again))

    def _on_lost(self, rows: list[tuple[AttemptKey, str]]) -> None:
        ended = {key for _, key in self._outcomes}
        for key, reason in rows:
            if key not in ended:
                self._lost[key] = reason
        self.given.drop_anywhere(key for key, _ in rows)
        self._wake.set()

    def _end(self, keys: tuple[AttemptKey, ...]) -> None:
        self._pilots.withdraw(keys)
        for key in keys:
            self._unpull(key)
        for peer in self.given.peers():
            mine = [key for key in keys if key in self.given.to(peer)]
            contact = self._members.contact(peer)
            if mine and contact is not None:
                self.given.drop(peer, mine)
                epochs = tuple((w, self._epochs.get(w, 0)) for w in {k.workflow for k in mine})
                message = Abort(keys=tuple(mine), reason="not needed", epochs=epochs)
                self._tasks.spawn(self._call(contact, message))

    async def _call(self, contact: Contact, message: Message) -> None:
        with contextlib.suppress(CallFailed):
            await self._rpc.call(contact, message, Done)

    async def report(self, peer: bytes, outcomes: list[Outcome]) -> Reported:
        """From a pilot: kept when the queue has it."""
        master = self._site.master(self._site.name)
        if not self._is_master() or self.exchange is None:
            moved = {e.key.workflow: master for e in outcomes if master is not None}
            return Reported(kept=(), moved=tuple(moved.items()))
        waits = []
        loop = asyncio.get_running_loop()
        for ended in outcomes:
            self.given.drop(peer, [ended.key])
            self._outcomes[peer, ended.key] = ended
            future = self._acks.get((peer, ended.key))
            if future is None or future.done():
                future = self._acks[peer, ended.key] = loop.create_future()
            waits.append(future)
        self._wake.set()
        await asyncio.wait(waits, timeout=ACK_S)
        kept = [e.key for e, f in zip(outcomes, waits, strict=True) if f.done() and f.result()]
        return Reported(kept=tuple(kept))

    async def still_held(self, message: StillHeld) -> Unheld:
        if self.exchange is None or not self._is_master():
            raise Refused("moved", "its home is elsewhere")
        answer = await self.exchange(message)
        if not isinstance(answer, Unheld):
            raise Refused("protocol", "the queue has not understood")
        return answer

    async def close(self) -> None:
        await self._tasks.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
