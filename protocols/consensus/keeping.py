"""Replicated journals: a peer writes them as their home, and keeps copies as a keeper for others.

In Raft's words: home = leader, keeper = voter, epoch = term, `Keep` = AppendEntries, `Elect` =
RequestVote (docs/glossary.md).

Rules:
- An entry is committed once a majority of the journal's keepers has it on disk. Only then are
  waiters told (`kept`), and only then does anything follow from it (`then`).
- A keeper answers for the entries on its disk, never for those on their way there.
- A home that hears of a higher epoch is deposed: everybody who waits gets `Deposed`.
- All news for one keeper, of whatever journals, goes in one message; while that message is under
  way the next one gathers. So a busy home costs a keeper few syncs, and an idle home costs nothing:
  there are no heartbeats here, since the failure detector decides whether a home is alive.
- A copy that is given up leaves its promise behind. Without that promise, an old home could make a
  replaced peer agree to its entries once more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..config import Config
from ..membership.members import Members, State
from ..wire.entries import Journaled, KeepersChosen, keepers_in
from ..wire.messages import Contact, Entry, Keep, Kept, Member, Slice, Stored
from ..wire.rpc import CallFailed, Refused, Rpc
from .placement import Where, spread, where, would_part
from .replica import CONFIGS, Replica, forced, majority, next_epoch, odd
from .storage import ReplicaStorage, Write

Then = Callable[[], None]


class Deposed(Exception):
    """This peer is not the workflow's home any more."""


@dataclass(slots=True)
class Leadership:
    """What the home of a journal knows beyond its own copy."""

    epoch: int
    synced: int = 0  # entries on this peer's own disk
    have: dict[bytes, int] = field(default_factory=dict)  # entries on the other keepers' disks
    sent: dict[bytes, int] = field(default_factory=dict)  # believed to be there: send on from here
    told: dict[bytes, int] = field(default_factory=dict)  # how many they know to be committed
    tail: deque[Entry] = field(default_factory=deque)  # the newest entries
    waiters: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    then: deque[tuple[int, Then]] = field(default_factory=deque)
    syncing: tuple[asyncio.Future[None], list[int]] | None = None
    alone: bool = True  # born here and on no other disk yet
    end_written: bool = False  # this peer's own disk knows that the workflow has ended
    parting: dict[bytes, int] = field(default_factory=dict)  # ex-keepers → the entry that says so
    strangers: set[bytes] = field(default_factory=set)  # peers that can't keep this journal
    turns: Counter[bytes] = field(default_factory=Counter)  # how often each came or went as keeper

    def release_waiters(self, committed: int) -> None:
        while self.waiters and self.waiters[0][0] <= committed:
            _, future = self.waiters.popleft()
            if not future.done():
                future.set_result(None)


@dataclass(slots=True)
class _Courier:
    """The sender to one keeper: which journals have news for it."""

    dirty: dict[str, None] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Keeping:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        storage: ReplicaStorage,
        clock: Callable[[], float],
        rng: random.Random,
        config: Config,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.config = config
        self.members = members
        self.rng = rng
        self.rpc = rpc
        self.storage = storage
        self.replicas: dict[str, Replica] = {}
        self.leads: dict[str, Leadership] = {}
        self.on_deposed: Callable[[str], None] = lambda workflow: None
        self.on_committed: Callable[[str], None] = lambda workflow: None
        self.on_vacant: Callable[[str], None] = lambda workflow: None  # its home is not known
        self.on_followed: Callable[[str], None] = lambda workflow: None
        self.on_keeper_back: Callable[[str], None] = lambda workflow: None
        self.on_news: Callable[[str], None] = lambda workflow: None  # of the set of its keepers
        self.complete: Callable[[Replica, Leadership], bool] = lambda replica, lead: True
        self.on_company: Callable[[], None] = lambda: None  # one more journal to look after
        self.on_doubt: Callable[[Contact], None] = lambda contact: None
        self.on_dropped: Callable[[str], None] = lambda workflow: None  # the copy on this peer
        # an ended journal leaves memory; its copy names its keepers
        self.on_put_away: Callable[[Replica], None] = lambda replica: None
        self._clock = clock
        self._couriers: dict[bytes, _Courier] = {}
        self._closing: set[str] = set()  # copies that are being removed from the disk
        rpc.on(Keep, self._keep)
        members.listen(self._member_changed, at_stake=self.replicas)

    def load(self) -> None:
        """After a start: this peer is home of nothing until the keepers agree on it anew."""
        for replica in self.storage.unfinished():
            self.replicas[replica.workflow] = replica

    def copy(self, workflow: str) -> Replica | None:
        """This peer's copy, from memory or from the disk."""
        return self.replicas.get(workflow) or self.storage.replica(workflow)

    # ----------------------------------------------------------------- as a home

    def choose(self, workflow: str) -> tuple[bytes, ...]:
        """Keepers for a new journal: this peer and others (`spread`). Their number is odd: as many
        as are configured, if so many peers are alive."""
        me = self.rpc.me.id
        alive = [m for m in self.members.here() if m.state == State.ALIVE]
        wanted = odd(min(self.config.keepers, len(alive)))
        if wanted == 1:
            return (me,)
        own = [where(m) for m in alive if m.contact.id == me]
        others = [where(m) for m in alive if m.contact.id != me]
        return (me, *spread(workflow, own, others, wanted - 1, self.config.overlay))

    def places(self, keepers: Iterable[bytes]) -> list[Where]:
        """Machine and site of each keeper that is a known member."""
        return [where(m) for m in map(self.members.get, keepers) if m is not None]

    def create(
        self, workflow: str, contents: Iterable[Journaled], patient: bool, named: bool
    ) -> tuple[float, asyncio.Future[None]]:
        """A new journal, with this peer as its home: first its keepers, then these entries.
        `named`: its id was not drawn just now, so there may have been a workflow of that name.

        Returns its time, and a future for when it is on this peer's own disk. The other keepers
        hear of it only then: if the disk refuses it and it is abandoned, nothing is left
        anywhere."""
        keepers = self.choose(workflow)
        before = self.storage.remains(workflow).promised if named else 0
        epoch = next_epoch(before, self.rpc.me.id)
        replica = Replica(workflow, promised=epoch, home=self.rpc.me.id)
        self.replicas[workflow] = replica
        lead = self.leads[workflow] = Leadership(epoch)
        at = self._clock()
        first = KeepersChosen(keepers=keepers)
        entries = tuple(
            Entry(seq, epoch, at, content.kind, content.packed())
            for seq, content in enumerate([first, *contents])
        )
        for entry in entries:
            replica.add(entry)
            lead.tail.append(entry)
        alone = len(keepers) == 1
        if not alone:
            self.on_company()
        done = self.storage.first(Write(workflow, epoch, None, entries), patient and alone)
        self._sync(replica, lead, done)
        return at, done

    def abandon(self, workflow: str) -> None:
        """Its first entries never got onto this disk, and so onto no other."""
        self.leads.pop(workflow, None)
        replica = self.replicas.pop(workflow, None)
        if replica is not None:
            self._closing.add(workflow)  # until then a new journal of that name would go with it
            gone = Write(workflow, replica.promised, forget=True, position=replica.floor)
            done = self.storage.write([gone], soon=True)
            done.add_done_callback(lambda _: self._closing.discard(workflow))

    def is_closing(self, workflow: str) -> bool:
        """The copy of that name is being removed from the disk."""
        return workflow in self._closing

    def append(
        self,
        workflow: str,
        content: Journaled,
        soon: bool = False,
        then: Then | None = None,
        at: float | None = None,
    ) -> float:
        """Writes an entry and returns its time: `at`, or now. `then` is called when a majority has
        the entry; if that never happens, it is never called."""
        replica, lead = self.replicas[workflow], self.leads[workflow]
        at = self._clock() if at is None else at
        entry = Entry(replica.count, lead.epoch, at, content.kind, content.packed())
        replica.add(entry)
        lead.tail.append(entry)
        if then is not None:
            lead.then.append((replica.count, then))
        done = self.storage.write([Write(workflow, lead.epoch, None, (entry,))], soon)
        self._sync(replica, lead, done)
        if not lead.alone:
            self._tell_keepers(replica)
        self.counts["entries"] += 1
        return at

    def is_home(self, workflow: str) -> bool:
        return workflow in self.leads

    def epoch(self, workflow: str) -> int:
        lead = self.leads.get(workflow)
        return lead.epoch if lead else 0

    def is_kept(self, workflow: str) -> bool:
        """This peer is its home, and all that was appended so far is on a majority's disks."""
        return workflow in self.leads and self.replicas[workflow].all_committed

    async def kept(self, workflow: str) -> None:
        """Returns when all that was appended so far is on a majority's disks; else `Deposed`."""
        lead = self.leads.get(workflow)
        if lead is None:
            copy = self.storage.replica(workflow)
            if copy is not None and copy.over:
                return
            raise Deposed(workflow)
        replica = self.replicas[workflow]
        if replica.all_committed:
            return
        self.storage.write([])  # there is a waiter: sync now, not soon
        if lead.waiters and lead.waiters[-1][0] == replica.count:
            future = lead.waiters[-1][1]
        else:
            future = asyncio.get_running_loop().create_future()
            lead.waiters.append((replica.count, future))
        await asyncio.shield(future)

    def follows(self, workflow: str) -> bytes | None:
        """The home that this peer's copy follows, empty if it is not known; None without a copy."""
        replica = self.replicas.get(workflow)
        return None if replica is None else replica.home

    def company(self) -> set[bytes]:
        """The keepers of this home's journals, and the homes of the journals kept on this peer."""
        keepers = {k for w in self.leads for k in self.replicas[w].keepers}
        return keepers | {r.home for r in self.replicas.values() if r.home}

    def unkept(self, workflow: str) -> str:
        """In words: why entries of this home are not committed, while that is so."""
        replica = self.replicas.get(workflow)
        if replica is None or replica.all_committed:
            return ""
        count = len(replica.keepers)
        here = sum(self.members.is_here(k) for k in replica.keepers)
        if here >= majority(count):
            return ""
        are, needed = "is" if here == 1 else "are", majority(count)
        return (
            f"only {here} of the {count} peers that keep its journal {are} here; it needs {needed}"
        )

    def committed(self, workflow: str) -> int:
        replica = self.replicas.get(workflow)
        return replica.committed if replica else 0

    def _sync(self, replica: Replica, lead: Leadership, done: asyncio.Future[None]) -> None:
        """One callback for a batch that gets onto the disk, however many of a journal's entries
        are in it."""
        if lead.syncing is not None and lead.syncing[0] is done:
            lead.syncing[1][0] = replica.count
            return
        reached = [replica.count]
        lead.syncing = done, reached
        done.add_done_callback(lambda done: self._synced(replica, lead, done, reached[0]))

    def _synced(
        self, replica: Replica, lead: Leadership, done: asyncio.Future[None], count: int
    ) -> None:
        if done.cancelled() or done.exception() or self.leads.get(replica.workflow) is not lead:
            return
        lead.synced = max(lead.synced, count)
        if lead.alone:
            lead.alone = False
            self._tell_keepers(replica)
        self.advance(replica, lead)

    def advance(self, replica: Replica, lead: Leadership) -> None:
        """A keeper's disk has more entries: perhaps a majority has them now."""
        me = self.rpc.me.id
        have = [lead.synced if k == me else lead.have.get(k, 0) for k in replica.keepers]
        reached = replica.agreed(have, lead.epoch)
        if reached <= replica.committed:
            return
        was_over, before = replica.over, replica.committed
        replica.committed = reached
        lead.release_waiters(reached)
        if replica.over and not was_over:
            done = self.storage.write([Write(replica.workflow, lead.epoch, over=True)], soon=True)
            done.add_done_callback(lambda _: self._ended(replica, lead))
            self._tell_keepers(replica)  # so that they need not ask again
        self.on_committed(replica.workflow)
        while lead.then and lead.then[0][0] <= reached:
            lead.then.popleft()[1]()
        if before <= replica.configs[-1][0] < reached:
            self._keepers_agreed(replica, lead)
        self._trim(replica, lead)

    def _keepers_agreed(self, replica: Replica, lead: Leadership) -> None:
        """The newest set of keepers is committed."""
        if self.leads.get(replica.workflow) is lead:
            for keeper in lead.parting:
                self.tell(keeper, replica.workflow)
            self.on_news(replica.workflow)

    def _ended(self, replica: Replica, lead: Leadership) -> None:
        lead.end_written = True
        self.let_go(replica, lead)

    def let_go(self, replica: Replica, lead: Leadership) -> None:
        """When the workflow has ended and a majority knows, the disks have it and memory needs it
        no more. A keeper that was away asks when it is back, and is told."""
        if not replica.over or self.leads.get(replica.workflow) is not lead:
            return
        if not self.complete(replica, lead):
            return  # a keeper is gone, and another one has to come first
        if lead.synced < replica.count or not lead.end_written:
            return  # the disk must give back exactly what memory knows
        if self._end_is_known(replica, lead):
            del self.leads[replica.workflow], self.replicas[replica.workflow]
            self.on_put_away(replica)

    def _end_is_known(self, replica: Replica, lead: Leadership) -> bool:
        """By every keeper that is here, and by a majority of them all."""
        others = [k for k in replica.keepers if k != self.rpc.me.id]
        here = [k for k in others if self.members.is_here(k)]
        known = sum(lead.told.get(k, 0) >= replica.ended_at_count for k in here)
        return known == len(here) and known + 1 >= majority(len(replica.keepers))

    def _trim(self, replica: Replica, lead: Leadership) -> None:
        me = self.rpc.me.id
        kept = [lead.have.get(k, 0) for k in replica.keepers if k != me]
        least = min(lead.synced, min(kept, default=replica.committed))
        tail = lead.tail
        while tail and (
            tail[0].seq < least
            or (len(tail) > self.config.tail_entries_max and tail[0].seq < lead.synced)
        ):
            tail.popleft()

    def depose(self, workflow: str) -> None:
        lead = self.leads.pop(workflow, None)
        if lead is None:
            return
        self.counts["deposed"] += 1
        replica = self.replicas[workflow]
        if replica.home == self.rpc.me.id:
            replica.home = b""
        for _, future in lead.waiters:
            if not future.done():
                future.set_exception(Deposed(workflow))
                future.exception()
        self.on_deposed(workflow)
        if not replica.home:
            self.on_vacant(workflow)

    def changes(self, workflow: str, keepers: tuple[bytes, ...]) -> None:
        """Writes a new set of keepers. For each peer that comes or goes, forgets what was known of
        its copy."""
        lead, replica = self.leads[workflow], self.replicas[workflow]
        for peer in set(keepers) ^ set(replica.keepers):
            lead.turns[peer] += 1
            lead.have.pop(peer, None)
            lead.told.pop(peer, None)
            lead.parting.pop(peer, None)
            if peer in keepers:
                lead.sent[peer] = 0
            else:
                lead.parting[peer] = replica.count
        self.append(workflow, KeepersChosen(keepers=keepers))

    def lead(self, workflow: str, epoch: int) -> Leadership:
        """A majority has granted this epoch; its first entry tells all the keepers."""
        replica = self.replicas[workflow]
        replica.home = self.rpc.me.id
        lead = self.leads[workflow] = Leadership(epoch, synced=replica.count, alone=False)
        lead.end_written = replica.over
        for keeper in replica.keepers:
            lead.sent[keeper] = replica.count
        self.counts["homes_taken"] += 1
        return lead

    # ----------------------------------------------------------------- to the keepers

    def _tell_keepers(self, replica: Replica) -> None:
        for keeper in (*replica.keepers, *self.leads[replica.workflow].parting):
            if keeper != self.rpc.me.id:
                self.tell(keeper, replica.workflow)

    def tell(self, keeper: bytes, workflow: str) -> None:
        courier = self._couriers.get(keeper)
        if courier is None:
            courier = self._couriers[keeper] = _Courier()
        courier.dirty[workflow] = None
        if courier.task is None:
            courier.task = asyncio.ensure_future(self._deliver(keeper, courier))

    async def _deliver(self, keeper: bytes, courier: _Courier) -> None:
        """Until the keeper has everything. One that is away gets the rest when it is back."""
        delay_s = 0.1
        loop = asyncio.get_running_loop()
        rounds, sent_at = 0, 0.0
        try:
            await asyncio.sleep(0)  # whatever else is appended in this loop iteration goes along
            while courier.dirty:
                if rounds >= self.config.keep_burst:  # news keeps coming: gather more for each sync
                    await asyncio.sleep(sent_at + self.config.keep_gap_s - loop.time())
                rounds, sent_at = rounds + 1, loop.time()
                contact = self.members.contact(keeper)
                if contact is None or not self.members.is_here(keeper):
                    return
                slices = self._slices(keeper, courier)
                if not slices:
                    continue
                if await self._send(contact, slices):
                    delay_s = 0.1
                else:
                    for unsent, _ in slices:
                        courier.dirty[unsent.workflow] = None
                    await asyncio.sleep(delay_s * (0.75 + self.rng.random() / 2))
                    delay_s = min(1.0, delay_s * 2)
        finally:
            del self._couriers[keeper]

    def _slices(self, keeper: bytes, courier: _Courier) -> list[tuple[Slice, int]]:
        """Each with the keeper's turn: an answer to an earlier turn does not count any more."""
        slices: list[tuple[Slice, int]] = []
        left = self.config.keep_bytes_max
        while courier.dirty and left > 0 and len(slices) < self.config.keep_slices_max:
            workflow = next(iter(courier.dirty))
            del courier.dirty[workflow]
            lead, replica = self.leads.get(workflow), self.replicas.get(workflow)
            if lead is None or replica is None:
                continue
            piece = self._slice(keeper, lead, replica, left)
            if piece is not None:
                left -= 100 + sum(len(entry.body) + 60 for entry in piece.entries)
                slices.append((piece, lead.turns[keeper]))
        return slices

    def _slice(
        self, keeper: bytes, lead: Leadership, replica: Replica, bytes_max: int
    ) -> Slice | None:
        """The next entries of a journal for this keeper; None: it needs nothing now."""
        if keeper in lead.parting:
            end = lead.parting[keeper] + 1
            if replica.committed < end:
                return None  # it is told when that is agreed on
        elif keeper in replica.keepers:
            end = replica.count
        else:
            return None
        start = min(lead.sent.get(keeper, 0), end)
        entries = self._stretch(lead, replica, start, end, bytes_max)
        last = keeper in lead.parting and start + len(entries) == end
        if not entries and not last and not self._has_news(replica, lead, keeper):
            return None
        before_epoch = replica.epoch_at(start - 1)
        committed = min(replica.committed, end)
        return Slice(replica.workflow, lead.epoch, start, before_epoch, committed, entries, last)

    def _has_news(self, replica: Replica, lead: Leadership, keeper: bytes) -> bool:
        """Even without entries for it: it should say what it has, or hear that the end is
        committed."""
        untold = lead.told.get(keeper, 0) < replica.committed
        return keeper not in lead.have or (untold and replica.over)

    def _stretch(
        self, lead: Leadership, replica: Replica, start: int, end: int, bytes_max: int
    ) -> tuple[Entry, ...]:
        """Entries from `start` on, from memory if they are there; at least one if there is any."""
        if start >= end:
            return ()
        if not lead.tail or lead.tail[0].seq > start:
            end = min(end, lead.tail[0].seq if lead.tail else lead.synced)
            return tuple(self.storage.entries(replica.workflow, start, end, bytes_max))
        entries: list[Entry] = []
        for entry in lead.tail:
            if start <= entry.seq < end:
                bytes_max -= len(entry.body) + 60
                if entries and bytes_max < 0:
                    break
                entries.append(entry)
        return tuple(entries)

    async def _send(self, contact: Contact, slices: list[tuple[Slice, int]]) -> bool:
        loop = asyncio.get_running_loop()
        doubt = loop.call_later(self.config.keep_doubt_s, self.on_doubt, contact)
        try:
            message = Keep.of(tuple(piece for piece, _ in slices))
            answer = await self.rpc.call(contact, message, Kept, self.config.keep_timeout_s)
        except CallFailed:
            self.counts["keeps_failed"] += 1
            return False
        finally:
            doubt.cancel()
        for (sent, turn), stored in zip(slices, answer.stored, strict=False):
            if stored.workflow == sent.workflow:
                self._stored(contact.id, sent, turn, stored)
        return True

    def _stored(self, keeper: bytes, sent: Slice, turn: int, stored: Stored) -> None:
        """A keeper's answer for one journal."""
        lead, replica = self.leads.get(sent.workflow), self.replicas.get(sent.workflow)
        if lead is None or replica is None or lead.epoch != sent.epoch:
            return
        if lead.turns[keeper] != turn:
            self.tell(keeper, sent.workflow)
        elif self._refused(replica, lead, keeper, sent, stored):
            return
        elif keeper in lead.parting:
            lead.sent[keeper] = stored.entries
            if sent.last:
                del lead.parting[keeper]
            else:
                self.tell(keeper, sent.workflow)
        else:
            self._accepted(replica, lead, keeper, sent, stored)

    def _refused(
        self, replica: Replica, lead: Leadership, keeper: bytes, sent: Slice, stored: Stored
    ) -> bool:
        """True if the keeper took nothing; then this also does what follows from that."""
        if stored.refusal == "exists" and replica.committed:
            lead.strangers.add(keeper)  # it keeps another journal of this name
            self.on_news(sent.workflow)
        elif forced(stored.epoch) > forced(lead.epoch):
            # It follows a home that went on without a majority, or that would have. This home has a
            # majority without it. (What becomes of the two lines: `lines`.)
            lead.strangers.add(keeper)
            lead.parting.pop(keeper, None)
            self.on_news(sent.workflow)
        elif stored.epoch > lead.epoch or stored.refusal in ("epoch", "exists"):
            replica.home = b""
            self.depose(sent.workflow)
        elif stored.refusal:
            lead.sent[keeper] = min(stored.entries, sent.before)
            lead.have.setdefault(keeper, 0)
            self.tell(keeper, sent.workflow)
        else:
            return False
        return True

    def _accepted(
        self, replica: Replica, lead: Leadership, keeper: bytes, sent: Slice, stored: Stored
    ) -> None:
        lead.have[keeper] = max(lead.have.get(keeper, 0), stored.entries)
        lead.sent[keeper] = max(lead.sent.get(keeper, 0), stored.entries)
        lead.told[keeper] = max(lead.told.get(keeper, 0), sent.committed)
        self.advance(replica, lead)
        if lead.sent[keeper] < replica.count:
            self.tell(keeper, sent.workflow)
        elif replica.over:
            self.let_go(replica, lead)

    # ----------------------------------------------------------------- as a keeper

    async def _keep(self, sender: Contact, message: Keep) -> Kept:
        for piece in message.slices:  # before anything changes: all slices are taken, or none
            self._check(piece)
        contact = self.members.contact(sender.id)
        if contact is not None:
            self.rpc.line(contact)  # this peer wants to know when a home ends
        writes: list[Write] = []
        stored = [self._take(sender.id, piece, writes) for piece in message.slices]
        # even if there are none: entries of an earlier message may not be on disk yet
        await self.storage.write(writes)
        for piece, answer in zip(message.slices, stored, strict=True):
            if not answer.refusal:
                self._put_away(piece)
        return Kept.of(tuple(stored))

    def _check(self, piece: Slice) -> None:
        in_order = all(e.seq == piece.before + i for i, e in enumerate(piece.entries))
        if not in_order or any(e.epoch > piece.epoch for e in piece.entries):
            raise Refused("protocol", "the entries of a journal are out of order")
        if any(not keepers_in(e.body) for e in piece.entries if e.kind in CONFIGS):
            raise Refused("protocol", "a journal needs at least one keeper")
        if piece.workflow in self._closing:
            raise Refused("busy", "the copy of that journal is being removed")

    def _put_away(self, piece: Slice) -> None:
        """If this slice, which is on disk now, was the last one for this copy."""
        replica = self.replicas.get(piece.workflow)
        if replica is None or piece.workflow in self.leads:
            return
        if piece.last and replica.promised == piece.epoch:
            self.drop(piece.workflow)
        elif replica.over and replica.promised == piece.epoch:
            # Nothing more is to come, and the disk has all of it, the promise too. (Another home
            # may have been promised a higher epoch meanwhile: that promise may not be on the disk
            # yet, and must not be forgotten before it is.)
            del self.replicas[piece.workflow]
            self.on_put_away(replica)

    def _take(self, home: bytes, piece: Slice, writes: list[Write]) -> Stored:
        workflow = piece.workflow
        copy = self.copy(workflow)
        replica = copy or self.storage.remains(workflow)
        refusal = self._refuses_namesake(replica, piece) or _refuses(replica, piece)
        if not refusal and copy is None and not _begins(piece):
            refusal = "gap"
        if refusal:
            return Stored(workflow, replica.promised, 0, refusal)
        if copy is None:
            self.on_company()
        return self._follow(home, replica, piece, writes)

    def _refuses_namesake(self, replica: Replica, piece: Slice) -> str:
        """Why nothing is taken, if the slice begins another journal than this copy is of."""
        if not _begins(piece):
            return ""
        birth = piece.entries[0].epoch
        other = replica.count and birth != replica.birth
        if other and self.makes_way(replica):
            return "gap"  # and from the beginning again
        if birth in replica.voided:
            return "exists"  # its end was agreed on here
        if other and forced(piece.epoch) <= forced(replica.last_epoch):
            # Born twice, by one key at two peers: the journal that was here first stays. The epochs
            # that it has seen are of no interest to the other one.
            return "exists"
        return ""

    def _follow(self, home: bytes, replica: Replica, piece: Slice, writes: list[Write]) -> Stored:
        """Takes what a home sends, and adds to `writes` whatever has to get onto the disk."""
        workflow = piece.workflow
        self.replicas[workflow] = replica
        replica.home = home
        if piece.epoch > replica.promised:
            self.depose(workflow)
        promises = piece.epoch > replica.promised
        replica.promised = piece.epoch
        was_over = replica.over
        taken = replica.take(piece)
        self.on_followed(workflow)
        over = replica.over and not was_over
        if promises or taken.entries or taken.cut_at is not None or over:
            writes.append(Write(workflow, piece.epoch, taken.cut_at, taken.entries, over))
        self.counts["entries_kept"] += len(taken.entries)
        return Stored(workflow, piece.epoch, taken.agreed, taken.refusal)

    def makes_way(self, replica: Replica) -> bool:
        """Drops this copy for another workflow of the same name, if the submission of its own
        workflow broke off: nobody was ever told that one was accepted.

        Its promise stays. How far it was is remembered by its birth: no copy of it that knows less
        of its end is ever voted for or taken again. (Its position among the entries says nothing
        about a journal of another birth.)"""
        workflow = replica.workflow
        if not replica.over or workflow in self.leads or not self.storage.is_void(workflow):
            return False
        self.replicas[workflow] = replica
        self.drop(workflow, voided=replica.birth)
        return True

    def drop(self, workflow: str, back_to: int | None = None, voided: int = 0) -> None:
        """Removes this copy, which is one too many. Its promise stays, and how far it was, or that
        it is void. If it is of a line that does not hold (`lines`), what stays is of the era of the
        line that does."""
        replica = self.replicas.get(workflow)
        if replica is None or workflow in self.leads or workflow in self._closing:
            return
        self.counts["copies_dropped"] += 1
        self.on_followed(workflow)
        self.on_dropped(workflow)
        self._closing.add(workflow)
        gone = Write(
            workflow,
            replica.promised,
            forget=True,
            position=replica.floor if voided else replica.position,
            back_to=back_to,
            voided=voided,
        )
        done = self.storage.write([gone])
        done.add_done_callback(lambda _: self._dropped(workflow))

    def _dropped(self, workflow: str) -> None:
        self._closing.discard(workflow)
        self.replicas.pop(workflow, None)
        self.on_dropped(workflow)  # (it may have been read from the disk meanwhile)

    # ----------------------------------------------------------------- members come and go

    def _member_changed(self, old: Member | None, new: Member) -> None:
        peer, alive = new.contact.id, new.state == State.ALIVE
        restarted = old is not None and old.boot != new.boot
        if not alive or restarted:
            self._doubt_home(peer, gone=restarted or new.state >= State.DEAD)
        if alive:
            self._keeper_back(peer)
        if alive and not restarted and old is not None and old.state == State.SUSPECT:
            self._trust_home(peer)
        self._keepers_changed(new, restarted)

    def _doubt_home(self, peer: bytes, gone: bool) -> None:
        for replica in list(self.replicas.values()):
            if replica.home == peer:
                if gone:
                    replica.home = b""
                self.on_vacant(replica.workflow)

    def _trust_home(self, peer: bytes) -> None:
        """The suspicion was wrong."""
        for replica in list(self.replicas.values()):
            if replica.home == peer:
                self.on_followed(replica.workflow)

    def _keeper_back(self, peer: bytes) -> None:
        for replica in list(self.replicas.values()):
            if peer in replica.keepers and not replica.home:
                self.on_keeper_back(replica.workflow)

    def _keepers_changed(self, new: Member, restarted: bool) -> None:
        """For this home's journals: the member keeps them, or may become their keeper."""
        peer = new.contact.id
        for workflow, lead in list(self.leads.items()):
            keepers = self.replicas[workflow].keepers
            if peer in keepers or len(keepers) < self.config.keepers or self._parts(keepers, new):
                self.on_news(workflow)
            if peer in keepers and new.state == State.ALIVE:
                if restarted:
                    lead.sent[peer] = lead.have.get(peer, 0)
                self.tell(peer, workflow)

    def _parts(self, keepers: tuple[bytes, ...], new: Member) -> bool:
        """With this member as a keeper, fewer keepers would share a machine or a site."""
        me, places = self.rpc.me.id, self.places(keepers)
        return new.state == State.ALIVE and would_part(me, places, where(new))

    async def close(self) -> None:
        tasks = [c.task for c in self._couriers.values() if c.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _begins(piece: Slice) -> bool:
    """It has a journal's first entry."""
    return bool(piece.entries) and not piece.before


def _refuses(replica: Replica, piece: Slice) -> str:
    """Why a copy takes nothing of a slice of its own journal; empty: it takes it."""
    if piece.epoch < replica.promised:
        return "epoch"
    later = forced(piece.epoch) > forced(replica.last_epoch)
    if (replica.over or replica.may_be_over) and later and not replica.shows_end(piece):
        # an end that was agreed on holds against a home that went on without a majority
        return "gap" if piece.before else "exists"
    return ""
