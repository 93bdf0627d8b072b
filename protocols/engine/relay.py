"""Relays tasks and outcomes, in bulk, between a task queue and the master pilot of a site.

Rules:
- The pilots know which attempts are at the site; the queue's journal decides what is committed. The
  relay remembers nothing that it can't ask for again: a new master asks the pilots what they have.
- A request has a number and is repeated until it is answered. If an answer is lost, the repeated
  request gets the same answer with the same tasks; after a restart of the queue or a change of the
  master, attempts that nobody holds are lost, and handed out once more.
- A pilot keeps an outcome until the queue has it on its disk. While the queue is down, pulled tasks
  go on, and outcomes wait at the pilots.
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
from .outstanding import Outstanding

log = logging.getLogger("valence.relay")

POLL_S = 2.0
WHEREABOUTS_S = 2.0  # between two reports on where tasks are
WHEREABOUTS_MAX, WHEREABOUTS_KEYS_MAX = 200, 2000
LOOK_S = 30.0
GAP_S = 0.15  # between two requests: tasks that end within it share the next one
MORE_S = 0.5  # before the next request, if the site has enough to do
AHEAD_S = 1.0
PACE_S = 3.0
PACE_MIN = 0.05  # below this pace, no tasks are pulled ahead
CORES_MIN = 0.05
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
WORKS_MAX = 2000
OUTCOMES_MAX, OUTCOMES_BYTES_MAX = 1000, 2 << 20
ASK_AT_ONCE = 64
ASK_S = 2.0
ACK_S = 12.0
LOST_MAX = 20_000
HELD_MAX = 50_000
EPOCHS_MAX = 10_000  # workflows: the latest whose tasks were pulled

#: carries a message to the queue and returns its answer; else `CallFailed`
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
        self.settled = False  # before a peer knows the others, it takes itself for the master
        self.outstanding = Outstanding(
            rpc, members, lambda id: self._epochs.get(id, 0), self._on_lost
        )
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
        # by pilot, because an attempt whose first pilot was taken for lost may end at two of them
        self._outcomes: dict[tuple[bytes, AttemptKey], Outcome] = {}
        self._acks: dict[tuple[bytes, AttemptKey], asyncio.Future[bool]] = {}
        self._lost: dict[AttemptKey, str] = {}
        self._dead: set[bytes] = set()
        self._told: frozenset[bytes] = frozenset()  # pilots that the queue knows of
        self._bound: set[AttemptKey] = set()  # those of `_works` that read files of this site
        self._cores = 1.0  # per task, a moving mean
        self._pace = 0.0  # tasks that end here per second, a moving mean
        self._paced_at = 0.0
        self._said_at = -WHEREABOUTS_S
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
            verb = "died" if new.state == State.DEAD else "left"
            lost = [(k, f"its peer {peer.hex()[:8]} {verb}") for k in self.outstanding.to(peer)]
            if lost:
                self._on_lost(lost)
        elif old is not None and old.boot != new.boot:
            self.outstanding.doubt(new.contact.id)
        self._wake.set()

    # ----------------------------------------------------------------- with the queue

    async def run(self) -> None:
        if self.exchange is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        delay_s = RETRY_S_MIN
        pending: PullTasks | None = None
        while True:
            if not self.settled or not self._is_master():
                self._leave_office()
                pending = None
                await self._until_woken(LOOK_S)  # the master changes with the members
                continue
            if not self.in_office:
                self._take_office()
            began = self._now()
            pending = pending or await self._request()
            try:
                answer = await self._exchange(pending)
            except CallFailed as error:
                self._failed(error)
                if pending.anew:  # other pilots may be here by then, and hold other tasks
                    pending, self._anew = None, True
                await asyncio.sleep(delay_s * self._rng.uniform(0.75, 1.25))
                delay_s = min(RETRY_S_MAX, 2 * delay_s)
                continue
            self._answered()
            self._take(pending, answer)
            pending, delay_s = None, RETRY_S_MIN
            if not self._anew:
                await self._pause(began, answer)

    def _failed(self, error: CallFailed) -> None:
        if not self.reason:
            verb = "refuses" if isinstance(error, Refused) else "can't be reached"
            log.warning("the task queue %s: %s", verb, error)
        self.reason = str(error)
        self.counts["failed"] += 1

    def _answered(self) -> None:
        if self.reason:
            log.info("the task queue answers again")
        self.reason = ""

    async def _pause(self, began: float, answer: PulledTasks) -> None:
        """Until the next request. Tasks that the outcomes made ready came with the answer: if it
        brought none, asking again soon is of no use."""
        await asyncio.sleep(max(0.0, began + GAP_S - self._now()))
        if self._outcomes or self._lost or self._dead or (self._hungry() and answer.works):
            return
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
            raise Refused(
                "protocol", f"the queue answered with an unexpected {type(answer).__name__}"
            )
        return answer

    def _take_office(self) -> None:
        self._token = self._rng.getrandbits(62) + 1
        self._anew = True
        self._told = frozenset()
        self.outstanding.settled = True
        self.counts["offices"] += 1

    def _leave_office(self) -> None:
        """Another pilot is master, and learns from the pilots which tasks are here."""
        if not self.in_office:
            return
        self._token = 0
        self._pilots.withdraw(list(self._works))
        for rows in (self._works, self._bound, self._lost, self._outcomes):
            rows.clear()  # pilots keep the outcomes that the queue has not confirmed
        for future in self._acks.values():
            if not future.done():
                future.set_result(False)
        self._acks.clear()

    async def _request(self) -> PullTasks:
        self._number += 1
        anew, self._anew = self._anew, False
        pilots = self._site.pilots()
        pilot_ids = frozenset(m.contact.id for m in pilots)
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
            pilots=tuple(pilots) if anew or pilot_ids != self._told else (),
            dead=tuple(self._dead),
            outcomes=tuple(outcomes),
            lost=tuple(list(self._lost.items())[:LOST_MAX]),
            want=0 if anew else self._want(),
            anew=anew,
            held=held,
            whereabouts=self._whereabouts(),
        )
        self._told = pilot_ids
        return message

    def _whereabouts(self) -> tuple[tuple[str, tuple[AttemptKey, ...]], ...] | None:
        """Where tasks are, for users who ask the queue; of very many, some are left out."""
        if self._now() - self._said_at < WHEREABOUTS_S:
            return None
        self._said_at = self._now()
        rows: dict[str, list[AttemptKey]] = {}
        left = WHEREABOUTS_KEYS_MAX
        for key in self._works:
            if left > 0:
                words = self._pilots.waiting_for(key) or "a peer has been found for it"
                rows.setdefault(words[:2000], []).append(key)
                left -= 1
        for peer in self.outstanding.peers():
            keys = self.outstanding.to(peer)[: max(0, left)]
            left -= len(keys)
            if keys:
                rows[f"it was sent to peer {peer.hex()[:8]}"] = keys
        return tuple((words, tuple(keys)) for words, keys in list(rows.items())[:WHEREABOUTS_MAX])

    async def _ask_pilots(self, pilots: list[Member]) -> tuple[AttemptKey, ...]:
        """All attempts that are at the site: at its pilots, and on this master's list."""
        slots = asyncio.Semaphore(ASK_AT_ONCE)

        async def ask(member: Member) -> tuple[AttemptKey, ...]:
            async with slots:
                try:
                    answer = await self._rpc.call(member.contact, AskHeld(), HeldHere, ASK_S)
                except CallFailed:
                    return ()  # dead, or as good as dead
                for key in answer.keys:
                    if (member.contact.id, key) not in self._outcomes:
                        self.outstanding.add(member.contact.id, key)
                return tuple(answer.keys)

        answers = await asyncio.gather(*map(ask, pilots))
        held = dict.fromkeys(key for keys in answers for key in keys)
        held.update(dict.fromkeys(self._works))
        held.update(dict.fromkeys(key for _, key in self._outcomes))
        for (
            peer
        ) in self.outstanding.peers():  # perhaps still on the way there; else it is asked about
            held.update(dict.fromkeys(self.outstanding.to(peer)))
        return tuple(held)[:HELD_MAX]

    def _free(self) -> int:
        """The number of tasks that the site has capacity for, if they are like recent ones."""
        cores = sum(m.capacity.millicores for m in self._site.pilots()) / 1000
        return max(1, round(cores / self._cores)) - len(self.outstanding)

    def _want(self) -> int:
        """The tasks that the site has capacity for, and those that it will begin before the next
        answer: pulled earlier, they would wait here while they could run at another site. Waiting
        tasks that read files of this site are not counted, as they wait for the pilots that hold
        these: the other pilots shall have something to do."""
        waiting = len(self._works) - len(self._bound)
        wanted = self._free() + math.ceil(AHEAD_S * self._pace - PACE_MIN) - waiting
        return max(0, min(WORKS_MAX - len(self._works), wanted))

    def _hungry(self) -> bool:
        """A pilot may have nothing to do: that does not wait for the next outcome."""
        return len(self._works) == len(self._bound) and self._free() > 0

    def _take(self, asked: PullTasks, answer: PulledTasks) -> None:
        kept = set(answer.kept)
        for pilot, ended in asked.outcomes:  # those of the request, not later ones
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
        """A mean over some seconds that decays with time."""
        now = self._now()
        decay = math.exp(-(now - self._paced_at) / PACE_S)
        self._pace, self._paced_at = self._pace * decay + ended / PACE_S, now

    def _unit(self, work: Work) -> Unit:
        """The task was pulled for this site: only a peer of this site may run it."""
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
        """Leases for pulled tasks."""
        by_peer: dict[bytes, tuple[Contact, list[Work]]] = {}
        for row in batch:
            work = self._unpull(row.unit.key)
            if work is None:
                self._rpc.tell(row.peer, ReturnLeases(leases=(row.lease,)))
                continue
            leased = work._replace(lease=row.lease)
            by_peer.setdefault(row.peer.id, (row.peer, []))[1].append(leased)
        for peer, works in by_peer.values():
            for work in works:
                self.outstanding.add(peer.id, work.key)
                self.outstanding.on_the_way.add(work.key)
            self._tasks.spawn(self._commit(peer, works))
        if self._hungry():
            self._wake.set()

    async def _commit(self, peer: Contact, works: list[Work]) -> None:
        refused = await self._send(peer, works)
        again = [work for work in works if work.key in refused]
        self.outstanding.drop(peer.id, refused)
        if again and self.in_office:
            for work in again:
                self._works[work.key] = work
            self._pilots.add(map(self._unit, again))

    async def _send(self, peer: Contact, works: list[Work]) -> dict[AttemptKey, str]:
        """Returns the attempts that the pilot has refused."""
        try:
            answer = await self._rpc.call(peer, Commit.of(tuple(works)), Committed)
        except Refused as error:
            return dict.fromkeys((work.key for work in works), str(error))
        except CallFailed:
            self.outstanding.doubt(peer.id)  # the message may have arrived or not
            return {}
        finally:
            self.outstanding.on_the_way.difference_update(work.key for work in works)
        return dict(answer.refused)

    def _on_lost(self, rows: list[tuple[AttemptKey, str]]) -> None:
        ended = {key for _, key in self._outcomes}
        for key, reason in rows:
            if key not in ended:
                self._lost[key] = reason
        self.outstanding.drop_anywhere(key for key, _ in rows)
        self._wake.set()

    def _end(self, keys: tuple[AttemptKey, ...]) -> None:
        self._pilots.withdraw(keys)
        for key in keys:
            self._unpull(key)
        for peer in self.outstanding.peers():
            there = [key for key in keys if key in self.outstanding.to(peer)]
            contact = self._members.contact(peer)
            if there and contact is not None:
                self.outstanding.drop(peer, there)
                epochs = tuple((w, self._epochs.get(w, 0)) for w in {k.workflow for k in there})
                message = Abort(keys=tuple(there), reason="not needed", epochs=epochs)
                self._tasks.spawn(self._call(contact, message))

    async def _call(self, contact: Contact, message: Message) -> None:
        with contextlib.suppress(CallFailed):
            await self._rpc.call(contact, message, Done)

    async def report(self, peer: bytes, outcomes: list[Outcome]) -> Reported:
        """Outcomes from a pilot: those are kept that the queue has confirmed."""
        master = self._site.master(self._site.name)
        if not self._is_master() or self.exchange is None:
            moved = {e.key.workflow: master for e in outcomes if master is not None}
            return Reported(kept=(), moved=tuple(moved.items()))
        acks = [self._relayed(peer, ended) for ended in outcomes]
        self._wake.set()
        await asyncio.wait(acks, timeout=ACK_S)
        kept = [e.key for e, f in zip(outcomes, acks, strict=True) if f.done() and f.result()]
        return Reported(kept=tuple(kept))

    def _relayed(self, peer: bytes, ended: Outcome) -> asyncio.Future[bool]:
        """Done when the queue has the outcome, or this pilot is master no more."""
        self.outstanding.drop(peer, [ended.key])
        self._outcomes[peer, ended.key] = ended
        ack = self._acks.get((peer, ended.key))
        if ack is None or ack.done():
            ack = self._acks[peer, ended.key] = asyncio.get_running_loop().create_future()
        return ack

    async def still_held(self, message: StillHeld) -> Unheld:
        if self.exchange is None or not self._is_master():
            raise Refused("moved", "its home is elsewhere")
        answer = await self.exchange(message)
        if not isinstance(answer, Unheld):
            raise Refused(
                "protocol", f"the queue answered with an unexpected {type(answer).__name__}"
            )
        return answer

    async def close(self) -> None:
        await self._tasks.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
