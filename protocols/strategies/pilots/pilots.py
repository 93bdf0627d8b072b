"""The strategy `pilots`: homes post units to a site's master pilot, whose pilots rank and run them.

After seed 003 (late-binding overlays). `site` determines the master, `master` and `pilot` are the
two sides of a round, `assignment` and `ranking` the computations in it. This module is the third
side: the home that wants its units run.

Beyond the paper: rounds follow events, lists travel as differences, the assignment is exact, a lost
master delays tasks only until its death is known, and no queue in the middle is required.

Rules:
- Similar units that read the same files form one line, with a number. A line goes to the master of
  the site it needs, or of the site that holds most of its files, or of this peer's own site; if it
  gets no capacity there for a while, to the masters of all sites. Leases that are offered twice are
  returned at once.
- A new master is sent everything; the same master only the changes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...capacity.matching import explain
from ...config import Config
from ...membership.members import Members
from ...wire.messages import AttemptKey, Capacity, Contact, Member, Needs, ReturnLeases
from ...wire.rpc import CallFailed, Rpc
from ..base import Estimate, OnPlaced, Placement, Unit
from ..local import place_here
from ..waiting import Group, GroupKey, Waiting
from .config import PilotsConfig
from .messages import PostUnits, Seats, UnitsPosted, Wanting
from .site import SiteView

UNITS_PER_MESSAGE = 1000
GATHER_S = 0.0
AGAIN_S = 0.2
_NO_NEEDS = Needs()


@dataclass(slots=True)
class _Line:
    id: int
    key: GroupKey
    site: str
    settled: int = 0
    spilled: bool = False  # it has been posted to the masters of all sites
    offered_at: float = 0.0


@dataclass(slots=True)
class _Desk:
    """What has been posted to one master."""

    site: str
    master: bytes = b""
    told: dict[int, tuple[int, int]] = field(default_factory=dict)  # line → wanted, settled
    said_at: float = 0.0
    failed: str = ""
    not_before: float = 0.0
    pilots: int = 0

    def note(self, rows: list[Wanting]) -> None:
        for w in rows:
            if w.wanted > w.settled:
                self.told[w.id] = (w.wanted, w.settled)
            else:
                self.told.pop(w.id, None)

    def post_again(self, why: str, not_before: float) -> None:
        """The master may lack anything: post all of it again."""
        self.failed, self.not_before = why, not_before
        self.told = {}


#: wanted and settled, of that line and group
_Wanted = tuple[tuple[int, int], _Line, Group]


class Pilots:
    name = "pilots"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        site: SiteView,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._site = site
        self._config = config
        self._own = config.of(PilotsConfig)
        self._on_placed = on_placed
        self._estimate = estimate
        self._waiting = Waiting(estimate, by_avoid=True, by_reads=True)
        self._lines: dict[GroupKey, _Line] = {}
        self._ids: dict[int, _Line] = {}
        self._desks: dict[str, _Desk] = {}
        self._next_id = rng.getrandbits(48)
        self._wake = asyncio.Event()
        rpc.on(Seats, self._seats)
        members.listen(self._member_changed, at_stake=self._waiting.groups)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        first = not self._waiting
        self._waiting.add(units, self._now())
        if first and not any(group.reads for group in self._waiting.groups.values()):
            known = self._members.count
            placed, _ = place_here(
                self.name, self._waiting, self._rpc, self._members.me, known, self._estimate
            )
            if placed:
                self._on_placed(placed)
        if self._waiting:
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)
        self._wake.set()

    def waiting_for(self, key: AttemptKey) -> str | None:
        group = self._waiting.group_of(key)
        return None if group is None else self._explain(group)

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """Pilots announce this to their master; but a run time may have become known."""
        if self._waiting.has_unknown_runtimes:
            self._wake.set()

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            busy = self._waiting or any(desk.told for desk in self._desks.values())
            try:
                async with asyncio.timeout(self._pause_s() if busy else None):
                    await self._wake.wait()
                await asyncio.sleep(GATHER_S)
            except TimeoutError:
                pass
            self._wake.clear()
            await self._post_all()

    def _pause_s(self) -> float:
        now = self._now()
        due = [d.not_before for d in self._desks.values() if d.failed and d.not_before > now]
        return max(0.02, min([self._own.spill_s / 2, *(at - now for at in due)]))

    # ----------------------------------------------------------------- posting

    async def _post_all(self) -> None:
        now = self._now()
        self._waiting.regroup()
        masters = self._site.masters()
        wanted = self._wanted(masters, now)
        self._forget_lines()
        calls = []
        for site, master in masters.items():
            desk = self._desk(site, master)
            if desk.not_before <= now:
                calls.append(self._post(desk, self._changes(desk, wanted[site], now), now))
        for site in [site for site in self._desks if site not in masters]:
            del self._desks[site]
        await asyncio.gather(*calls)

    def _wanted(self, masters: dict[str, bytes], now: float) -> dict[str, dict[int, _Wanted]]:
        """The lines for each site's master."""
        wanted: dict[str, dict[int, _Wanted]] = {site: {} for site in masters}
        for group in list(self._waiting.groups.values()):
            line = self._line(group, masters, now)
            spill = now - max(line.offered_at, group.oldest_at) > self._own.spill_s
            line.spilled = line.spilled or (spill and group.needs.site is None)
            counts = (line.settled + group.left, line.settled)
            for site in masters if line.spilled else (line.site,):
                if site in wanted:
                    wanted[site][line.id] = (counts, line, group)
        return wanted

    def _forget_lines(self) -> None:
        """Forget the lines that nothing waits in, once no master has them any more."""
        for key in [key for key in self._lines if key not in self._waiting.groups]:
            line = self._lines[key]
            if not any(line.id in desk.told for desk in self._desks.values()):
                del self._lines[key], self._ids[line.id]

    def _desk(self, site: str, master: bytes) -> _Desk:
        desk = self._desks.setdefault(site, _Desk(site))
        if master != desk.master:
            desk.master, desk.told, desk.not_before = master, {}, 0.0
            desk.said_at = -1e9
        return desk

    def _changes(self, desk: _Desk, wanted: dict[int, _Wanted], now: float) -> list[Wanting]:
        """What this master does not know yet: the lines that changed, and those that ended."""
        rows = [
            self._wanting(line, group, now)
            for line_id, (counts, line, group) in wanted.items()
            if desk.told.get(line_id) != counts
        ]
        ended = (line_id for line_id in desk.told if line_id not in wanted)
        return rows + [Wanting(line_id, _NO_NEEDS, 0, 0) for line_id in ended]

    def _line(self, group: Group, masters: dict[str, bytes], now: float) -> _Line:
        line = self._lines.get(group.key)
        if line is None:
            self._next_id += 1
            line = _Line(self._next_id, group.key, self._site_for(group, masters), offered_at=now)
            self._lines[group.key] = line
            self._ids[line.id] = line
        return line

    def _site_for(self, group: Group, masters: dict[str, bytes]) -> str:
        if group.needs.site is not None:
            return group.needs.site
        near = Counter(
            member.traits.site
            for peer in group.top.near
            if (member := self._members.get(peer)) is not None and member.traits.site in masters
        )
        return near.most_common(1)[0][0] if near else self._site.name

    def _wanting(self, line: _Line, group: Group, now: float) -> Wanting:
        top = group.top
        return Wanting(
            id=line.id,
            needs=group.needs,
            wanted=line.settled + group.left,
            settled=line.settled,
            runtime_s=self._estimate(top),
            deadline_in_s=None if top.deadline_at is None else top.deadline_at - now,
            waited_s=max(0.0, now - group.oldest_at),
            hangs_s=min(1e8, max(0.0, top.rank)),
            reads=tuple((digest[:8], size) for digest, size in group.reads),
            avoid=tuple(sorted(group.avoid))[:8],
            rank=top.ranked_by,
            owner=top.owner[:64],
        )

    async def _post(self, desk: _Desk, rows: list[Wanting], now: float) -> None:
        """Posts the changes to this master; or, every so often, that this home is still there."""
        contact = self._members.contact(desk.master)
        due = now - desk.said_at >= self._own.post_s
        if contact is None or not (rows or (due and desk.told)):
            return
        anew = not desk.told
        for start in range(0, max(1, len(rows)), UNITS_PER_MESSAGE):
            some = rows[start : start + UNITS_PER_MESSAGE]
            desk.note(some)
            message = PostUnits.of(tuple(some), len(desk.told), anew and start == 0)
            self.counts["posts"] += 1
            try:
                answer = await self._rpc.call(contact, message, UnitsPosted, 1.0)
            except CallFailed as error:
                desk.post_again(str(error), self._now() + AGAIN_S)
                return
            desk.said_at, desk.failed, desk.pilots = self._now(), "", answer.pilots
            if answer.again and start + UNITS_PER_MESSAGE >= len(rows):
                desk.post_again("its list is incomplete", self._now() + AGAIN_S)

    def _explain(self, group: Group) -> str:
        unmet = explain(self._members.here(), group.needs)
        line = self._lines.get(group.key)
        if unmet is not None or line is None:
            return unmet or group.reason
        desk = self._desks.get(line.site)
        if line.site not in self._site.masters():
            return f"site {line.site} has no peer at the moment"
        if desk is not None and desk.failed:
            return f"the peer that assigns tasks at site {line.site} does not answer: {desk.failed}"
        if line.spilled:
            return "all suitable peers of all sites are busy"
        peers = desk.pilots if desk is not None else 0
        return f"all suitable peers of site {line.site} are busy (it has {peers})"

    # ----------------------------------------------------------------- offers

    def _seats(self, sender: Contact, message: Seats) -> None:
        line = self._ids.get(message.id)
        group = self._group_for(line) if line is not None else None
        if line is not None:
            line.settled += len(message.leases) + message.short
            line.offered_at = self._now()
        record = Placement(
            self.name,
            [(sender.id, len(message.leases), "")],
            known=self._members.count,
            why=f"assigned to this peer in round {message.round % 100_000} of master"
            f" {message.master.hex()[:8]}, ranked {message.rank:.6g}",
        )
        placed, unused = self._waiting.use(group, sender, message.leases, record)
        self.counts["offered"] += len(message.leases)
        self.counts["unused"] += len(unused)
        self.counts["short"] += message.short
        if unused:
            self._rpc.tell(sender, ReturnLeases(leases=tuple(unused)))
        if group is not None:
            if placed:
                group.oldest_at = self._now()
            self._waiting.forget_if_empty(group)
        self._wake.set()
        if placed:
            self._on_placed(placed)

    def _group_for(self, line: _Line) -> Group | None:
        """The group of this line; or, if its units' run times have become known, another one with
        the same needs, files and peers to avoid."""
        group = self._waiting.groups.get(line.key)
        if group is not None:
            return group
        needs, _, avoid, reads = line.key
        same = (needs, avoid, reads)
        groups = self._waiting.groups.values()
        return next((g for g in groups if (g.needs, g.avoid, g.reads) == same), None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
