"""One keeper's copy of one journal: the rules of Raft without I/O, in a group for each workflow.

In Raft's words: copy = log, epoch = term, home = leader, keeper = voter, `Candidacy` and `Vote` =
RequestVote and its reply, `Slice` and `Stored` = AppendEntries and its reply (docs/glossary.md).

- An *epoch* is a home's term of office. Of two epochs the higher one holds. A keeper that has
  promised one follows no lower one, and its promise is on its disk before anybody is told. An
  epoch's number has its candidate in it, so no two candidates ever share one.
- Entries are taken only where they continue this copy: same sequence number, same epoch before
  them. So two copies that have one entry in common have all entries before it in common.
- The next home may cut off entries that a home has not got onto a majority, but never entries that
  are on one: a candidate needs the votes of a majority, and nobody votes for a copy that is behind
  its own.
- A home counts copies only of entries of its own epoch, and these commit the older ones before
  them. An older epoch's entry on a majority may still be overwritten, unless an entry of the home's
  own epoch follows it there (Raft, section 5.4.2).
- The set of keepers is an entry too, in force as soon as it is written. It changes by one keeper at
  a time, so majorities before and after have a peer in common.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..wire.entries import EntryError, HomeForced, keepers_in, parts_in, read_as
from ..wire.messages import Candidacy, Entry, Slice

TAG_BITS = 32
#: a home that goes on without a majority takes an epoch so far above that no other catches up
FORCED_STEP = 2**14
#: Each keeper would begin an era of its own, by its tag: two that never heard of each other may
#: not even agree on the set of keepers.
FORCED_LINES = 2**12
EPOCH_MAX = 2**63 - 1  # the largest integer of a database
CONFIGS = ("keepers", "forced")
PARTS = ("submitted", "document")
#: the first entry names a journal's keepers, the second is its submission, or the first part of it
SUBMITTED_SEQ = 1


def next_epoch(known: int, me: bytes) -> int:
    """Above every known epoch, and different from any other peer's."""
    return ((shown(known) + 1) << TAG_BITS) | zlib.crc32(me)


def forced_epoch(known: int, me: bytes) -> int | None:
    """The first epoch of an era that no other keeper would begin: two keepers that go on without
    each other, and without a majority, never share one. None: there were too many eras already."""
    tag = zlib.crc32(me)
    era = (forced(known) // FORCED_LINES + 1) * FORCED_LINES + tag % FORCED_LINES
    epoch = first_of(era) | tag
    return epoch if epoch <= EPOCH_MAX else None


def shown(epoch: int) -> int:
    """An epoch's number, for people."""
    return epoch >> TAG_BITS


def forced(epoch: int) -> int:
    """An epoch's era: how often a home of its line went on without a majority."""
    return shown(epoch) // FORCED_STEP


def first_of(era: int) -> int:
    """Higher than any epoch of an earlier era."""
    return (era * FORCED_STEP) << TAG_BITS


def begins_era(epoch: int) -> bool:
    """True if a home goes on without a majority, from its own copy; not if it is elected."""
    return forced(epoch) > 0 and shown(epoch) % FORCED_STEP == 0


def in_era(epoch: int, last_epoch: int) -> bool:
    """May a copy whose last entry is of `last_epoch` lead in `epoch`? Only if both are of one era,
    or if this epoch begins one. No older log has the entries of a forced home; a home that led in
    its era without them would commit other entries in their place."""
    return begins_era(epoch) or forced(epoch) == forced(last_epoch)


def majority(count: int) -> int:
    return count // 2 + 1


def odd(count: int) -> int:
    """The largest odd number up to `count`: one keeper more would survive no more deaths."""
    return count - 1 + count % 2


def _committed(entry: Entry) -> int:
    """How many entries were committed when a home went on without a majority, as far as it knew."""
    try:
        return read_as(HomeForced, entry.body).committed
    except EntryError:
        return 0


def _cut_rows(rows: Any, seq: int) -> None:
    """Removes the rows, which begin with an entry's number, from that entry on."""
    while rows and rows[-1][0] >= seq:
        rows.pop()


@dataclass(slots=True)
class Taken:
    """What a slice changed."""

    cut_at: int | None = None  # this copy lost its entries from here on
    entries: tuple[Entry, ...] = ()  # and got these
    agreed: int = 0  # so many now agree with the home's
    refusal: str = ""


@dataclass(slots=True)
class Replica:
    workflow: str
    promised: int = 0
    count: int = 0  # entries of this copy
    #: where each epoch's entries begin: its first sequence, and the epoch
    starts: list[tuple[int, int]] = field(default_factory=list)
    configs: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    committed: int = 0  # entries known to be on a majority
    home: bytes = b""  # the peer that this copy follows; empty: none is known
    ended_at_count: int = 0  # with so many entries committed, it is over
    #: last epoch and count of an earlier copy on this peer, which was given up: a voter must not
    #: forget what it once had, or an old home could come back by its vote
    floor: tuple[int, int] = (0, 0)
    #: homes that went on without a majority: at which entry, in which epoch, entries committed then
    forced_at: list[tuple[int, int, int]] = field(default_factory=list)
    whole_at_count: int = 0  # with so many entries all of its submission is here
    broken_at: int | None = None  # an entry of another home that came in before that
    #: births of journals of this name whose submission broke off, by agreement, and that made way
    voided: frozenset[int] = frozenset()
    #: a majority of its keepers is in a later era. None of those has an end that is here: with it,
    #: they would have made way for no such era
    outrun: bool = False

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
        """How far this copy is, or the earlier one on this peer was."""
        return max((self.last_epoch, self.count), self.floor)

    @property
    def caught_up(self) -> bool:
        """With the earlier copy on this peer. Until then this copy lacks entries that the peer once
        answered for, and may know an old set of keepers: it may not vote for itself, either."""
        return (self.last_epoch, self.count) >= self.floor

    @property
    def over(self) -> bool:
        return 0 < self.ended_at_count <= self.committed

    @property
    def all_committed(self) -> bool:
        return self.committed >= self.count

    @property
    def may_be_over(self) -> bool:
        """A majority may have its end, and users may have been told of it, without this copy
        knowing. Until its keepers have found out, it makes way for no line of a later era."""
        return self.committed < self.ended_at_count and self.whole and not self.outrun

    @property
    def whole(self) -> bool:
        """This copy has the whole submission: it can run, and may have been acknowledged."""
        return self.broken_at is None and 0 < self.whole_at_count <= self.count

    @property
    def void(self) -> bool:
        """It ended as half a submission, so no user was ever told of this line."""
        whole = self.broken_at is None and 0 < self.whole_at_count < self.ended_at_count
        return self.over and not whole

    def epoch_at(self, seq: int) -> int:
        """The epoch of one entry; 0 if there is no such entry."""
        if not 0 <= seq < self.count:
            return 0
        return self.starts[bisect_right(self.starts, (seq, 2**63)) - 1][1]

    # ----------------------------------------------------------------- following

    def take(self, piece: Slice) -> Taken:
        """From a home whose epoch is not below the promised one (the caller has checked that)."""
        gap_at = self._gap_at(piece)
        if gap_at is not None:
            return Taken(refusal="gap", agreed=gap_at)
        fresh = list(piece.entries)
        while fresh and self.epoch_at(fresh[0].seq) == fresh[0].epoch:
            fresh.pop(0)
        cut_at = fresh[0].seq if fresh and fresh[0].seq < self.count else None
        if cut_at is not None:
            if cut_at < self.committed and forced(piece.epoch) > forced(self.last_epoch):
                self.committed = cut_at  # its home went on without the majority that had these
            self.cut(cut_at)
        for entry in fresh:
            self.add(entry)
        agreed = piece.before + len(piece.entries)
        self.committed = max(self.committed, min(piece.committed, agreed))
        return Taken(cut_at, tuple(fresh), agreed)

    def _gap_at(self, piece: Slice) -> int | None:
        """If a slice does not continue this copy: the entry that the home should go on from."""
        if piece.before > self.count:
            return self.count
        if piece.before and self.epoch_at(piece.before - 1) != piece.before_epoch:
            # go back over the whole epoch that differs: one round trip for each, not for each entry
            return self.starts[bisect_right(self.starts, (piece.before - 1, 2**63)) - 1][0]
        return None

    def add(self, entry: Entry) -> None:
        assert entry.seq == self.count, f"entry {entry.seq} behind {self.count}"
        if not self.starts or self.starts[-1][1] != entry.epoch:
            self.starts.append((entry.seq, entry.epoch))
        self.note(entry)
        self.count += 1

    def note(self, entry: Entry) -> None:
        """Remembers what an entry says about the journal itself."""
        if entry.kind in CONFIGS:
            self.configs.append((entry.seq, keepers_in(entry.body)))
            if entry.kind == "forced":
                self.forced_at.append((entry.seq, entry.epoch, _committed(entry)))
        elif entry.kind == "ended":
            self.ended_at_count = entry.seq + 1
        elif entry.kind == "submitted":
            self.whole_at_count = entry.seq + parts_in(entry.body)
        if entry.kind not in PARTS and self.broken_at is None and entry.seq < self.whole_at_count:
            self.broken_at = entry.seq  # the rest will never come

    def cut(self, seq: int) -> None:
        assert seq >= self.committed, "what a majority has is never cut off"
        self.count = seq
        for rows in (self.starts, self.configs, self.forced_at):
            _cut_rows(rows, seq)
        if self.ended_at_count > seq:
            self.ended_at_count = 0
        if seq <= SUBMITTED_SEQ:
            self.whole_at_count = 0
        if self.broken_at is not None and self.broken_at >= seq:
            self.broken_at = None

    @property
    def line(self) -> int:
        """The era of this copy's line. If it is over, the era in which its end was agreed on: a
        home that goes on without a majority only to get it copied changes nothing about that."""
        if not self.over:
            return forced(self.last_epoch)
        era = forced(self.epoch_at(self.ended_at_count - 1))
        for seq, epoch, committed in self.forced_at:
            if seq >= self.ended_at_count > committed:
                era = forced(epoch)
        return era

    def shows_end(self, piece: Slice) -> bool:
        """The slice is of a line that has the same end as this copy. (Entries of one epoch and
        place are the same everywhere, and so are all entries before them.)"""
        at = self.ended_at_count - 1
        if piece.before > at:
            known = piece.before <= self.count
            return known and self.epoch_at(piece.before - 1) == piece.before_epoch
        entries = piece.entries[at - piece.before :]
        return bool(entries) and entries[0].epoch == self.epoch_at(at)

    # ----------------------------------------------------------------- voting

    def why_not(self, asked: Candidacy) -> str:
        """Why this keeper may not vote for a candidate; empty if it may."""
        if asked.epoch <= self.promised:
            return f"epoch {shown(self.promised)} has been promised already"
        if not in_era(asked.epoch, asked.last_epoch):
            return "its copy is from before its home went on without a majority"
        if self.count and asked.birth != self.birth:
            return "it is another workflow of the same name"
        if asked.birth in self.voided:
            return "its submission broke off, by agreement"
        if (asked.last_epoch, asked.entries) < self.position:
            return "its copy is behind this one"
        return ""

    def excludes(self, candidate: bytes, asked: Candidacy) -> bool:
        """The candidate is no keeper any more, by a majority's agreement: it may give up its copy.

        Only a copy with all the candidate's entries can tell: one that stayed behind knows an old
        set, which may lack today's keepers. (A copy whose last entry is of a later epoch, or that
        is longer in the same one, has every committed entry of the other. But a copy of another
        workflow of the same name says nothing about this one.)"""
        if asked.entries and asked.birth != self.birth:
            return False
        ahead = (self.last_epoch, self.count) >= (asked.last_epoch, asked.entries)
        # (if a journal is over, one copy less loses nothing: the promise stays)
        return (self.config_agreed or self.over) and candidate not in self.keepers and ahead

    # ----------------------------------------------------------------- leading

    def agreed(self, have: Iterable[int], epoch: int) -> int:
        """How many entries are committed, if the keepers have so many of this home's entries."""
        counts = sorted(have, reverse=True)
        reached = counts[majority(len(counts)) - 1]
        if reached > self.committed and self.epoch_at(reached - 1) == epoch:
            return reached
        return self.committed
