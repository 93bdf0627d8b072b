"""The keeping of journals: as their home, and as a keeper for other homes.

Rules:
- An entry counts once a majority of the journal's keepers has it on disk; only then do waiters hear
  of it (`kept`), and only then does what follows from it happen (`then`).
- A keeper answers for what is on its disk, never for what is on its way there.
- A home that hears of a higher epoch is none any more: everybody who waits hears `Deposed`.
- All that a home has for one keeper goes in one message, whatever journals it is of; while that is
  under way the next one gathers. So a busy home costs a keeper few syncs, and an idle one nothing:
  whether a home lives is the failure detector's to say, there are no heartbeats here.
- A copy that is given up leaves its promise behind. Without that, a peer that was replaced could be
  made to agree once more to what an old home says.
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
    have: dict[bytes, int] = field(default_factory=dict)  # on the other keepers' disks
    sent: dict[bytes, int] = field(default_factory=dict)  # believed to be there: what to go on from
    told: dict[bytes, int] = field(default_factory=dict)  # how many they know to be committed
    tail: deque[Entry] = field(default_factory=deque)  # the newest entries
    waiters: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    then: deque[tuple[int, Then]] = field(default_factory=deque)
    syncing: tuple[asyncio.Future[None], list[int]] | None = None
    alone: bool = True  # born here and on no other disk yet
    end_written: bool = False  # this peer's own disk knows that it is over
    parting: dict[bytes, int] = field(default_factory=dict)  # ex-keepers → the entry that says so
    strangers: set[bytes] = field(default_factory=set)  # that can't keep this one
    turns: Counter[bytes] = field(default_factory=Counter)  # how often each came or went as keeper


@dataclass(slots=True)
class _Courier:
    """To one keeper: which journals have news for it."""

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
        self.on_company: Callable[[], None] = lambda: None  # there is a journal more to look after
        self.on_doubt: Callable[[Contact], None] = lambda contact: None
        self.on_dropped: Callable[[str], None] = lambda workflow: None  # the copy here
        # of an ended journal that memory lets go of: its keepers
        self.on_put_away: Callable[[Replica], None] = lambda replica: None
        self._clock = clock
        self._couriers: dict[bytes, _Courier] = {}
        self._closing: set[str] = set()  # copies on their way from the disk
        rpc.on(Keep, self._keep)
        members.listen(self._member_changed, at_stake=self.replicas)

    def load(self) -> None:
        """After a start: nobody is home of anything until the keepers agree on it anew."""
        for replica in self.storage.unfinished():
            self.replicas[replica.workflow] = replica

    # ----------------------------------------------------------------- as a home

    def choose(self, workflow: str) -> tuple[bytes, ...]:
        """This peer and others: an odd number, as many as wanted and there (`place`)."""
        me = self.rpc.me.id
        alive = [m for m in self.members.here() if m.state == State.ALIVE]
        wanted = odd(min(self.config.keepers, len(alive)))
        if wanted == 1:
            return (me,)
        mine = [where(m) for m in alive if m.contact.id == me]
        others = [where(m) for m in alive if m.contact.id != me]
        return (me, *spread(workflow, mine, others, wanted - 1, self.config.overlay))

    def places(self, keepers: Iterable[bytes]) -> list[Where]:
        """Of those that are known."""
        return [where(m) for m in map(self.members.get, keepers) if m is not None]

    def found(
        self, workflow: str, said: Iterable[Journaled], patient: bool, named: bool
    ) -> tuple[float, asyncio.Future[None]]:
        """A new journal, whose home this is: its keepers, then these entries. `named`: its id was
        not drawn just now, and there may have been one of that name.

        Its time, and when it is on this peer's own disk. The others hear of it then: a disk that
        refuses it leaves nothing anywhere, once it is abandoned."""
        keepers = self.choose(workflow)
        before = self.storage.remains(workflow).promised if named else 0
        epoch = next_epoch(before, self.rpc.me.id)
        replica = Replica(workflow, promised=epoch, home=self.rpc.me.id)
        self.replicas[workflow] = replica
        lead = self.leads[workflow] = Leadership(epoch)
        at = self._clock()
        first = KeepersChosen(keepers=keepers)
        entries = tuple(
            Entry(seq, epoch, at, one.kind, one.packed()) for seq, one in enumerate([first, *said])
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
            self._closing.add(workflow)  # until then another of that name would go with it
            gone = Write(workflow, replica.promised, forget=True, position=replica.floor)
            done = self.storage.write([gone], soon=True)
            done.add_done_callback(lambda _: self._closing.discard(workflow))

    def is_closing(self, workflow: str) -> bool:
        """What was here of that name is on its way from the disk."""
        return workflow in self._closing

    def append(
        self,
        workflow: str,
        said: Journaled,
        soon: bool = False,
        then: Then | None = None,
        at: float | None = None,
    ) -> float:
        """An entry's time: `at`, or now. `then` is called when a majority has it; never, if that
        never is."""
        replica, lead = self.replicas[workflow], self.leads[workflow]
        at = self._clock() if at is None else at
        entry = Entry(replica.count, lead.epoch, at, said.kind, said.packed())
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

    async def kept(self, workflow: str) -> None:
        """All that was appended so far is on a majority's disks; or `Deposed`."""
        lead = self.leads.get(workflow)
        if lead is None:
            copy = self.storage.replica(workflow)
            if copy is not None and copy.over:
                return
            raise Deposed(workflow)
        replica = self.replicas[workflow]
        if replica.committed >= replica.count:
            return
        self.storage.write([])  # somebody waits: now, not soon
        if lead.waiters and lead.waiters[-1][0] == replica.count:
            future = lead.waiters[-1][1]
        else:
            future = asyncio.get_running_loop().create_future()
            lead.waiters.append((replica.count, future))
        await asyncio.shield(future)

    def follows(self, workflow: str) -> bytes | None:
        """The home of a copy here, empty if that is not known; None if there is no copy."""
        replica = self.replicas.get(workflow)
        return None if replica is None else replica.home

    def company(self) -> set[bytes]:
        """Those who keep journals of this home, and the homes of journals kept here."""
        found = {k for w in self.leads for k in self.replicas[w].keepers}
        return found | {r.home for r in self.replicas.values() if r.home}

    def unkept(self, workflow: str) -> str:
        """In words: why what its home writes does not count, while that is so."""
        replica = self.replicas.get(workflow)
        if replica is None or replica.committed >= replica.count:
            return ""
        count = len(replica.keepers)
        here = sum(self.members.is_here(k) for k in replica.keepers)
        if here >= majority(count):
            return ""
        return f"only {here} of the {count} keepers of its journal are here, a majority is needed"

    def committed(self, workflow: str) -> int:
        replica = self.replicas.get(workflow)
        return replica.committed if replica else 0

    def _sync(self, replica: Replica, lead: Leadership, done: asyncio.Future[None]) -> None:
        """One look when a batch is on disk, however many of a journal's entries were in it."""
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
        """Somebody's disk has more: perhaps a majority has."""
        me = self.rpc.me.id
        have = [lead.synced if k == me else lead.have.get(k, 0) for k in replica.keepers]
        reached = replica.agreed(have, lead.epoch)
        if reached <= replica.committed:
            return
        was_over, before = replica.over, replica.committed
        replica.committed = reached
        while lead.waiters and lead.waiters[0][0] <= reached:
            _, future = lead.waiters.popleft()
            if not future.done():
                future.set_result(None)
        if replica.over and not was_over:
            done = self.storage.write([Write(replica.workflow, lead.epoch, over=True)], soon=True)
            done.add_done_callback(lambda _: self._ended(replica, lead))
            self._tell_keepers(replica)  # that it is: nobody needs to ask again
        self.on_committed(replica.workflow)
        while lead.then and lead.then[0][0] <= reached:
            lead.then.popleft()[1]()
        if before <= replica.configs[-1][0] < reached and self.leads.get(replica.workflow) is lead:
            for keeper in lead.parting:
                self.tell(keeper, replica.workflow)
            self.on_news(replica.workflow)
        self._trim(replica, lead)

    def _ended(self, replica: Replica, lead: Leadership) -> None:
        lead.end_written = True
        self.let_go(replica, lead)

    def let_go(self, replica: Replica, lead: Leadership) -> None:
        """It is over, and a majority knows: the disks have it, and memory needs it no more.

        A keeper that was away asks when it is back, and is told."""
        if not replica.over or self.leads.get(replica.workflow) is not lead:
            return
        if not self.complete(replica, lead):
            return  # a keeper is gone, and another one is to come first
        if lead.synced < replica.count or not lead.end_written:
            return  # what comes back from the disk must be what is known here
        others = [k for k in replica.keepers if k != self.rpc.me.id]
        here = [k for k in others if self.members.is_here(k)]
        known = sum(lead.told.get(k, 0) >= replica.ended_at_count for k in here)
        if known == len(here) and known + 1 >= majority(len(replica.keepers)):
            del self.leads[replica.workflow], self.replicas[replica.workflow]
            self.on_put_away(replica)

    def _trim(self, replica: Replica, lead: Leadership) -> None:
        me = self.rpc.me.id
        kept = [lead.have.get(k, 0) for k in replica.keepers if k != me]
        least = min(kept, default=replica.committed)
        tail = lead.tail
        while tail and (
            tail[0].seq < min(least, lead.synced)
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
        """Who came and who goes: what was known of their copies is not any more."""
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
        """A majority has granted this epoch: the first entry of it says so to everybody."""
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
        """Until it has all. One that is away hears the rest when it is back."""
        delay_s = 0.1
        loop = asyncio.get_running_loop()
        rounds, sent_at = 0, 0.0
        try:
            await asyncio.sleep(0)  # what is appended in this round goes along
            while courier.dirty:
                if rounds >= self.config.keep_burst:  # no end of it: a sync for more at once
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
                    for one, _ in slices:
                        courier.dirty[one.workflow] = None
                    await asyncio.sleep(delay_s * (0.75 + self.rng.random() / 2))
                    delay_s = min(1.0, delay_s * 2)
        finally:
            del self._couriers[keeper]

    def _slices(self, keeper: bytes, courier: _Courier) -> list[tuple[Slice, int]]:
        """Each with the keeper's turn: an answer to a former one counts no more."""
        found: list[tuple[Slice, int]] = []
        left = self.config.keep_bytes_max
        while courier.dirty and left > 0 and len(found) < self.config.keep_slices_max:
            workflow = next(iter(courier.dirty))
            del courier.dirty[workflow]
            lead, replica = self.leads.get(workflow), self.replicas.get(workflow)
            if lead is None or replica is None:
                continue
            if keeper not in replica.keepers and keeper not in lead.parting:
                continue
            end = replica.count
            if keeper in lead.parting:
                end = lead.parting[keeper] + 1
                if replica.committed < end:
                    continue  # it is told when that is agreed on
            start = min(lead.sent.get(keeper, 0), end)
            entries = self._stretch(lead, replica, start, end, left)
            last = keeper in lead.parting and start + len(entries) == end
            if not entries and not last and not self._has_news(replica, lead, keeper):
                continue
            left -= 100 + sum(len(entry.body) + 60 for entry in entries)
            before_epoch = replica.epoch_at(start - 1)
            committed = min(replica.committed, end)
            one = Slice(workflow, lead.epoch, start, before_epoch, committed, entries, last)
            found.append((one, lead.turns[keeper]))
        return found

    def _has_news(self, replica: Replica, lead: Leadership, keeper: bytes) -> bool:
        """Without any entry for it: that it should say what it has, or that something counts."""
        untold = lead.told.get(keeper, 0) < replica.committed
        return keeper not in lead.have or (untold and replica.over)

    def _stretch(
        self, lead: Leadership, replica: Replica, start: int, end: int, bytes_max: int
    ) -> tuple[Entry, ...]:
        """Entries from there on, from memory if they are there; at least one if there is any."""
        if start >= end:
            return ()
        if not lead.tail or lead.tail[0].seq > start:
            end = min(end, lead.tail[0].seq if lead.tail else lead.synced)
            return tuple(self.storage.entries(replica.workflow, start, end, bytes_max))
        found: list[Entry] = []
        for entry in lead.tail:
            if start <= entry.seq < end:
                bytes_max -= len(entry.body) + 60
                if found and bytes_max < 0:
                    break
                found.append(entry)
        return tuple(found)

    async def _send(self, contact: Contact, slices: list[tuple[Slice, int]]) -> bool:
        loop = asyncio.get_running_loop()
        doubt = loop.call_later(self.config.keep_doubt_s, self.on_doubt, contact)
        try:
            message = Keep.of(tuple(one for one, _ in slices))
            answer = await self.rpc.call(contact, message, Kept, self.config.keep_timeout_s)
        except CallFailed:
            self.counts["keeps_failed"] += 1
            return False
        finally:
            doubt.cancel()
        for (one, turn), stored in zip(slices, answer.stored, strict=False):
            if stored.workflow == one.workflow:
                self._stored(contact.id, one, turn, stored)
        return True

    def _stored(self, keeper: bytes, sent: Slice, turn: int, stored: Stored) -> None:
        lead, replica = self.leads.get(sent.workflow), self.replicas.get(sent.workflow)
        if lead is None or replica is None or lead.epoch != sent.epoch:
            return
        if lead.turns[keeper] != turn:
            self.tell(keeper, sent.workflow)
        elif stored.refusal == "exists" and replica.committed:
            lead.strangers.add(keeper)  # it keeps another of this name
            self.on_news(sent.workflow)
        elif forced(stored.epoch) > forced(lead.epoch):
            # it follows a home that went on without a majority, or would have: this one has a
            # majority without it (what becomes of the two: `lines`)
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
        elif keeper in lead.parting:
            lead.sent[keeper] = stored.entries
            if sent.last:
                del lead.parting[keeper]
            else:
                self.tell(keeper, sent.workflow)
        else:
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
        for found in message.slices:  # before anything is changed: all of it is taken or nothing
            in_order = all(e.seq == found.before + i for i, e in enumerate(found.entries))
            if not in_order or any(e.epoch > found.epoch for e in found.entries):
                raise Refused("protocol", "entries out of their order")
            if any(not keepers_in(e.body) for e in found.entries if e.kind in CONFIGS):
                raise Refused("protocol", "a journal without keepers")
            if found.workflow in self._closing:
                raise Refused("busy", "the copy is being put away")
        contact = self.members.contact(sender.id)
        if contact is not None:
            self.rpc.line(contact)  # the end of a home is of interest here
        writes: list[Write] = []
        stored = [self._take(sender.id, found, writes) for found in message.slices]
        # also without any: what is here since an earlier message may not be on disk yet
        await self.storage.write(writes)
        for found, answer in zip(message.slices, stored, strict=True):
            replica = self.replicas.get(found.workflow)
            if replica is None or found.workflow in self.leads or answer.refusal:
                continue
            if found.last and replica.promised == found.epoch:
                self.drop(found.workflow)
            elif replica.over and replica.promised == found.epoch:
                # Nothing more is to come, and the disk has it: also what was promised. (Another
                # home may have been promised a higher epoch meanwhile: that may not be on the disk
                # yet, and must not be forgotten before it is.)
                del self.replicas[found.workflow]
                self.on_put_away(replica)
        return Kept.of(tuple(stored))

    def _take(self, home: bytes, found: Slice, writes: list[Write]) -> Stored:
        workflow = found.workflow
        replica = self.replicas.get(workflow) or self.storage.replica(workflow)
        known = replica is not None
        replica = replica or self.storage.remains(workflow)
        first = found.entries[0] if found.entries and not found.before else None
        other = first is not None and replica.count and first.epoch != replica.birth
        if other and self.makes_way(replica):
            return Stored(workflow, replica.promised, 0, "gap")  # and from the beginning again
        if first is not None and first.epoch in replica.voided:
            return Stored(workflow, replica.promised, 0, "exists")  # its end was agreed on here
        if other and forced(found.epoch) <= forced(replica.last_epoch):
            # Born twice, by one key at two peers: the first one here stays. Which epochs it has
            # seen is of no interest to the other.
            return Stored(workflow, replica.promised, 0, "exists")
        if found.epoch < replica.promised:
            return Stored(workflow, replica.promised, 0, "epoch")
        later = forced(found.epoch) > forced(replica.last_epoch)
        if replica.over and later and not replica.shows_end(found):
            # an end that was agreed on holds against a home that went on without a majority
            return Stored(workflow, replica.promised, 0, "gap" if found.before else "exists")
        if not known:
            if first is None:
                return Stored(workflow, replica.promised, 0, "gap")
            self.on_company()
        self.replicas[workflow] = replica
        replica.home = home
        if found.epoch > replica.promised:
            self.depose(workflow)
        news = found.epoch > replica.promised
        replica.promised = found.epoch
        was_over = replica.over
        taken = replica.take(found)
        self.on_followed(workflow)
        over = replica.over and not was_over
        if news or taken.entries or taken.cut_at is not None or over:
            writes.append(Write(workflow, found.epoch, taken.cut_at, taken.entries, over))
        self.counts["entries_kept"] += len(taken.entries)
        return Stored(workflow, found.epoch, taken.agreed, taken.refusal)

    def makes_way(self, replica: Replica) -> bool:
        """Another workflow of the same name is here for one whose submission broke off: of that one
        nobody was told anything. What was promised stays promised; and how far it was is told by
        its birth: no copy of it that knows less of its end is ever voted for again, or taken. (Its
        place among the entries says nothing about a journal of another birth.)"""
        workflow = replica.workflow
        if not replica.over or workflow in self.leads or not self.storage.is_void(workflow):
            return False
        self.replicas[workflow] = replica
        self.drop(workflow, voided=replica.birth)
        return True

    def drop(self, workflow: str, back_to: int | None = None, voided: int = 0) -> None:
        """This copy is one too many. What was promised stays, and how far it was, or that it is
        void; unless it is of a line that does not hold (`lines`): what stays then is of the era
        that does."""
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

    # ----------------------------------------------------------------- who is there

    def _member_changed(self, old: Member | None, new: Member) -> None:
        peer = new.contact.id
        anew = old is not None and old.boot != new.boot
        if new.state != State.ALIVE or anew:
            for replica in list(self.replicas.values()):
                if replica.home == peer:
                    if anew or new.state >= State.DEAD:
                        replica.home = b""
                    self.on_vacant(replica.workflow)
        if new.state == State.ALIVE:
            for replica in list(self.replicas.values()):
                if peer in replica.keepers and not replica.home:
                    self.on_keeper_back(replica.workflow)
        if new.state == State.ALIVE and not anew and old is not None and old.state == State.SUSPECT:
            for replica in list(self.replicas.values()):
                if replica.home == peer:
                    self.on_followed(replica.workflow)
        for workflow, lead in list(self.leads.items()):
            keepers = self.replicas[workflow].keepers
            if peer in keepers or len(keepers) < self.config.keepers or self._parts(keepers, new):
                self.on_news(workflow)
            if peer in keepers and new.state == State.ALIVE:
                if anew:
                    lead.sent[peer] = lead.have.get(peer, 0)
                self.tell(peer, workflow)

    def _parts(self, keepers: tuple[bytes, ...], new: Member) -> bool:
        """With it as a keeper, fewer would fall together."""
        me, places = self.rpc.me.id, self.places(keepers)
        return new.state == State.ALIVE and would_part(me, places, where(new))

    async def close(self) -> None:
        tasks = [c.task for c in self._couriers.values() if c.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
