"""One keeper's copy of one journal, as rules without I/O. After Raft, a group for each workflow.

- An *epoch* is a home's time of office. Of two epochs the higher holds; a keeper that has promised
  one follows no lower one, and a promise is on its disk before it is told. An epoch's number has
  its candidate in it, so no two candidates ever share one.
- Entries are taken only where they continue what is here: same sequence, same epoch before them.
  So two copies that have one entry in common have all before it in common.
- What a home has not got onto a majority may be cut off by the next one; what it has may not: a
  candidate needs the votes of a majority, and nobody votes for a copy that is behind its own.
- A home counts copies only of entries of its own epoch (older ones are carried by those): an entry
  of an older epoch on a majority may still be overwritten, one below an own entry may not.
- Who the keepers are is an entry too, in force as soon as it is written. One change at a time, of
  one keeper: majorities before and after have a peer in common.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..wire.entries import EntryError, HomeForced, Submitted, keepers_in, read_as
from ..wire.messages import Candidacy, Entry, Slice

TAG_BITS = 32
#: a home that goes on without a majority counts on from so far above that no other catches up
FORCED_STEP = 2**14
#: Each keeper would begin an era of its own, by its tag: two that never heard of each other may not
#: even agree on who the keepers are.
FORCED_LINES = 2**12
EPOCH_MAX = 2**63 - 1  # as a database has it
CONFIGS = ("keepers", "forced")
PARTS = ("submitted", "document")
#: the first entry says who keeps a journal, the second is its submission, or the first part of it
SUBMITTED_SEQ = 1


def next_epoch(known: int, me: bytes) -> int:
    """Above all that is known, and no other peer's."""
    return ((shown(known) + 1) << TAG_BITS) | zlib.crc32(me)


def forced_epoch(known: int, me: bytes) -> int | None:
    """The first of an era that no other keeper would begin: two that go on without each other, and
    without a majority, do not share one. None: there were too many eras already."""
    tag = zlib.crc32(me)
    era = (forced(known) // FORCED_LINES + 1) * FORCED_LINES + tag % FORCED_LINES
    epoch = first_of(era) | tag
    return epoch if epoch <= EPOCH_MAX else None


def shown(epoch: int) -> int:
    """For people: how manieth it is."""
    return epoch >> TAG_BITS


def forced(epoch: int) -> int:
    """How often a home of this line of epochs went on without a majority."""
    return shown(epoch) // FORCED_STEP


def first_of(era: int) -> int:
    """No epoch of an earlier era is as high."""
    return (era * FORCED_STEP) << TAG_BITS


def begins_era(epoch: int) -> bool:
    """Of a home that goes on without a majority, from its own copy; not of one that is elected."""
    return forced(epoch) > 0 and shown(epoch) % FORCED_STEP == 0


def in_era(epoch: int, last_epoch: int) -> bool:
    """A copy whose last entry is of that epoch may lead in this one: it is of the same era, or this
    begins one. What a forced home wrote is in no log of before; a home that led in its era without
    that would count other entries in its place."""
    return begins_era(epoch) or forced(epoch) == forced(last_epoch)


def majority(count: int) -> int:
    return count // 2 + 1


def odd(count: int) -> int:
    """At most so many: an even one more outlives no more deaths."""
    return count - 1 + count % 2


def _committed(entry: Entry) -> int:
    """How many entries counted when a home went on without a majority, as far as it knew."""
    try:
        return read_as(HomeForced, entry.body).committed
    except EntryError:
        return 0


def _parts(entry: Entry) -> int:
    """Entries that a submission takes: this one, and those with the rest of its document."""
    try:
        return read_as(Submitted, entry.body).parts
    except EntryError:
        return 1


@dataclass(slots=True)
class Taken:
    """What became of a slice: to be cut from here on, to be written, and how many now agree."""

    cut_at: int | None = None
    entries: tuple[Entry, ...] = ()
    agreed: int = 0
    refusal: str = ""


@dataclass(slots=True)
class Replica:
    workflow: str
    promised: int = 0
    count: int = 0  # entries here
    #: where each epoch's entries begin: its first sequence, and the epoch
    starts: list[tuple[int, int]] = field(default_factory=list)
    configs: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    committed: int = 0  # entries known to be on a majority
    home: bytes = b""  # whom this copy follows; empty: nobody is known
    ended_at_count: int = 0  # with so many entries committed, it is over
    #: last epoch and count of a copy that was here before and was given up: who votes must not
    #: forget what it once had, or a home from before it left could come back by its vote
    floor: tuple[int, int] = (0, 0)
    #: homes that went on without a majority: where, in which epoch, what counted by then
    forced_at: list[tuple[int, int, int]] = field(default_factory=list)
    whole_at_count: int = 0  # with so many entries all of its submission is here
    broken_at: int | None = None  # unless an entry of another home has come in between, here
    #: births of journals of this name that broke off, which was agreed on, and made way here
    voided: frozenset[int] = frozenset()

    @property
    def keepers(self) -> tuple[bytes, ...]:
        return self.configs[-1][1] if self.configs else ()

    @property
    def config_agreed(self) -> bool:
        return bool(self.configs) and self.configs[-1][0] < self.committed

    @property
    def last_epoch(self) -> int:
        return self.starts[-1][1] if self.starts else 0

    @property
    def birth(self) -> int:
        return self.epoch_at(0)

    @property
    def position(self) -> tuple[int, int]:
        """How far this copy is, or the one before it was."""
        return max((self.last_epoch, self.count), self.floor)

    @property
    def caught_up(self) -> bool:
        """With the copy that was here before. Until then this one knows less than what this very
        peer once answered for, and an old set of keepers: it may not vote for itself, either."""
        return (self.last_epoch, self.count) >= self.floor

    @property
    def over(self) -> bool:
        return 0 < self.ended_at_count <= self.committed

    @property
    def whole(self) -> bool:
        """All of its submission is here: it can run, and may have been acknowledged."""
        return self.broken_at is None and 0 < self.whole_at_count <= self.count

    @property
    def void(self) -> bool:
        """It ended as half a submission: of this line nobody was told anything."""
        whole = self.broken_at is None and 0 < self.whole_at_count < self.ended_at_count
        return self.over and not whole

    def epoch_at(self, seq: int) -> int:
        """Of one entry; 0 where there is none."""
        if not 0 <= seq < self.count:
            return 0
        return self.starts[bisect_right(self.starts, (seq, 2**63)) - 1][1]

    # ----------------------------------------------------------------- following

    def take(self, found: Slice) -> Taken:
        """From a home whose epoch is not below what was promised (the caller has seen to that)."""
        if found.before > self.count:
            return Taken(refusal="gap", agreed=self.count)
        if found.before and self.epoch_at(found.before - 1) != found.before_epoch:
            # go back over the whole epoch that differs: one round trip for each, not for each entry
            start = self.starts[bisect_right(self.starts, (found.before - 1, 2**63)) - 1][0]
            return Taken(refusal="gap", agreed=start)
        fresh = list(found.entries)
        while fresh and self.epoch_at(fresh[0].seq) == fresh[0].epoch:
            fresh.pop(0)
        cut_at = fresh[0].seq if fresh and fresh[0].seq < self.count else None
        if cut_at is not None:
            if cut_at < self.committed and forced(found.epoch) > forced(self.last_epoch):
                self.committed = cut_at  # its home went on without the majority that this was on
            self.cut(cut_at)
        for entry in fresh:
            self.add(entry)
        agreed = found.before + len(found.entries)
        self.committed = max(self.committed, min(found.committed, agreed))
        return Taken(cut_at, tuple(fresh), agreed)

    def add(self, entry: Entry) -> None:
        assert entry.seq == self.count, f"entry {entry.seq} behind {self.count}"
        if self.last_epoch != entry.epoch or not self.starts:
            self.starts.append((entry.seq, entry.epoch))
        self.note(entry)
        self.count += 1

    def note(self, entry: Entry) -> None:
        """What an entry says of the copy itself."""
        if entry.kind in CONFIGS:
            self.configs.append((entry.seq, keepers_in(entry.body)))
            if entry.kind == "forced":
                self.forced_at.append((entry.seq, entry.epoch, _committed(entry)))
        elif entry.kind == "ended":
            self.ended_at_count = entry.seq + 1
        elif entry.kind == "submitted":
            self.whole_at_count = entry.seq + _parts(entry)
        if entry.kind not in PARTS and self.broken_at is None and entry.seq < self.whole_at_count:
            self.broken_at = entry.seq  # the rest never will come

    def cut(self, seq: int) -> None:
        assert seq >= self.committed, "what a majority has is never cut off"
        self.count = seq
        while self.starts and self.starts[-1][0] >= seq:
            self.starts.pop()
        while self.configs and self.configs[-1][0] >= seq:
            self.configs.pop()
        while self.forced_at and self.forced_at[-1][0] >= seq:
            self.forced_at.pop()
        if self.ended_at_count > seq:
            self.ended_at_count = 0
        if seq <= SUBMITTED_SEQ:
            self.whole_at_count = 0
        if self.broken_at is not None and self.broken_at >= seq:
            self.broken_at = None

    @property
    def line(self) -> int:
        """The era of the line that this copy is of; of one that is over, the era in which its end
        was agreed on: a home that goes on without a majority only to have it copied changes nothing
        about it."""
        if not self.over:
            return forced(self.last_epoch)
        era = forced(self.epoch_at(self.ended_at_count - 1))
        for seq, epoch, committed in self.forced_at:
            if seq >= self.ended_at_count > committed:
                era = forced(epoch)
        return era

    def shows_end(self, found: Slice) -> bool:
        """A slice is of a line that has the end which this copy has. (What comes before an entry
        of one epoch and place is the same everywhere.)"""
        at = self.ended_at_count - 1
        if found.before > at:
            known = found.before <= self.count
            return known and self.epoch_at(found.before - 1) == found.before_epoch
        entries = found.entries[at - found.before :]
        return bool(entries) and entries[0].epoch == self.epoch_at(at)

    # ----------------------------------------------------------------- voting

    def why_not(self, asked: Candidacy) -> str:
        """Empty: this keeper may vote for it."""
        if asked.epoch <= self.promised:
            return f"epoch {shown(self.promised)} is promised already"
        if not in_era(asked.epoch, asked.last_epoch):
            return "its copy is of before its home went on without a majority"
        if self.count and asked.birth != self.birth:
            return "it is another workflow of the same name"
        if asked.birth in self.voided:
            return "its submission broke off, as was agreed on"
        if (asked.last_epoch, asked.entries) < self.position:
            return "its copy is behind this one"
        return ""

    def excludes(self, candidate: bytes, asked: Candidacy) -> bool:
        """It is no keeper any more, which a majority agreed on: it may give up its copy.

        Only who has all that it has can know: a copy that stayed behind knows an old set, in which
        those of today may not be. (One whose last entry is of a later epoch, or that is longer in
        the same one, has every entry of the other's that counts. But not of another workflow of
        the same name: what became of that one, no copy of this one tells.)"""
        if asked.entries and asked.birth != self.birth:
            return False
        ahead = (self.last_epoch, self.count) >= (asked.last_epoch, asked.entries)
        # (of a journal that is over, any copy more or less loses nothing: it keeps its promise)
        return (self.config_agreed or self.over) and candidate not in self.keepers and ahead

    # ----------------------------------------------------------------- leading

    def agreed(self, have: Iterable[int], epoch: int) -> int:
        """How many entries are on a majority, if each keeper has that many of this home's."""
        counts = sorted(have, reverse=True)
        reached = counts[majority(len(counts)) - 1]
        if reached > self.committed and self.epoch_at(reached - 1) == epoch:
            return reached
        return self.committed
