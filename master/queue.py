"""The task queue: workflows enacted here, their tasks pulled by the sites' master pilots in bulk.

It is a home like any peer's, with a journal of its own and nobody to share it with, whose targets
are sites: tasks are placed by one criterion, the site that asks. What is finer is the site's own
business.

Rules:
- A task that was given out is at its site until its outcome came, its loss was reported, or a new
  master of the site does not have it. The journal says so before the task is on its way.
- Two requests with one number are one request, and one of before the last is none.
- A site that says nothing for long is lost, with all that it had.
- A site is asked for by one set of pilots at a time: another cluster under the same name, or the
  other half of a site that is cut in two, is refused for as long as the first is heard of.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from valence.peer.storage import QUEUE
from valence.protocols.capacity.admission import NO_DEADLINE_S
from valence.protocols.capacity.matching import explain, unmet
from valence.protocols.consensus.keeping import Deposed
from valence.protocols.engine.home import Home
from valence.protocols.engine.run import Run, TaskState
from valence.protocols.strategies.base import (
    READ_BYTES_MIN,
    Estimate,
    Placed,
    Placement,
    Strategy,
    Unit,
)
from valence.protocols.strategies.shares import Shares
from valence.protocols.tasks import Tasks
from valence.protocols.wire.entries import AttemptsStarted, StartedAttempt
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Contact,
    File,
    Member,
    Needs,
    Outcome,
    Placing,
    PulledTasks,
    PullTasks,
    StillHeld,
    Unheld,
    Work,
)
from valence.protocols.wire.rpc import Refused
from valence.workflow.model import Workflow

log = logging.getLogger("valence.queue")

SITE_LOST_S = 120.0
LOOK_S = 5.0
OTHERS_S = 30.0
WORKS_MAX = 1000
FILES_MAX = 200_000
SITES_MAX = 1000
NEEDS_MAX = 1000
PASSED_MAX = 5000  # units that are looked at in vain, for one request

Row = tuple[float, int, Unit]


def site_id(name: str) -> bytes:
    """In the journal a site stands where else a peer does."""
    return hashlib.blake2b(f"site:{name}".encode(), digest_size=20).digest()


class _Heaps:
    """Units that wait: owners take turns, and of each what is due first comes first."""

    def __init__(self, shares: Shares, cost: Callable[[Unit], float]) -> None:
        self._shares = shares
        self._cost = cost  # core-seconds, as expected
        self._by_owner: dict[str, list[Row]] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    def push(self, row: Row) -> None:
        heapq.heappush(self._by_owner.setdefault(row[2].owner, []), row)

    def pop(self) -> Row:
        owner = self._shares.next(self._by_owner)
        heap = self._by_owner[owner]
        row = heapq.heappop(heap)
        if not heap:
            del self._by_owner[owner]
        self._shares.give(owner, self._cost(row[2]))
        return row

    def refund(self, row: Row) -> None:
        self._shares.give(row[2].owner, -self._cost(row[2]))

    def back(self, row: Row) -> None:
        """It was not taken after all."""
        self.refund(row)
        self.push(row)


@dataclass(slots=True)
class SiteState:
    name: str
    token: int = 0
    number: int = -1
    answer: PulledTasks | None = None
    heard_at: float = 0.0
    pilots: dict[bytes, Member] = field(default_factory=dict)
    to_end: dict[AttemptKey, None] = field(default_factory=dict)
    given: int = 0
    done: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    known: dict[Needs, bool] = field(default_factory=dict)  # which needs some pilot meets
    #: where attempts are within the site, or what they wait for there, in its own words
    whereabouts: dict[AttemptKey, str] = field(default_factory=dict)

    def suits(self, needs: Needs) -> bool:
        """Some pilot could run it; a site of which nothing is known, may."""
        found = self.known.get(needs)
        if found is None:
            if len(self.known) > NEEDS_MAX:
                self.known.clear()
            pilots = self.pilots.values()
            found = not pilots or any(not unmet(m.capacity, m.traits, needs) for m in pilots)
            self.known[needs] = found
        return found


class Pulled:
    """A strategy that waits to be asked."""

    name = "queue"

    def __init__(
        self, sites: dict[str, SiteState], now: Callable[[], float], estimate: Estimate
    ) -> None:
        self._sites = sites
        self._now = now
        self._estimate = estimate
        self._units: dict[AttemptKey, Unit] = {}
        self._shares = Shares()
        self._heaps: dict[str | None, _Heaps] = defaultdict(
            lambda: _Heaps(self._shares, self._cost)
        )
        self._order = 0
        self._near = 0  # units whose files are known to be somewhere

    def __len__(self) -> int:
        return len(self._units)

    def add(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.key not in self._units:
                self._units[unit.key] = unit
                self._near += bool(unit.near)
                self._order += 1
                no_deadline = self._now() + NO_DEADLINE_S
                due_at = no_deadline if unit.deadline_at is None else unit.deadline_at
                self._shares.waits(unit.owner)
                self._heaps[unit.needs.site].push((due_at - unit.rank, self._order, unit))

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            if key in self._units:
                self._forget(self._units[key])

    def take(self, site: SiteState, count: int) -> list[Unit]:
        """The next ones for this site: all whose files it has, so that it may choose for which of
        its pilots; of the others as many as it has room for; and only if that is not enough, some
        whose files are elsewhere."""
        found: list[Unit] = []
        others: list[Row] = []
        elsewhere: list[Row] = []
        spare = count
        for which in (site.name, None):
            heap = self._heaps[which]
            passed: list[Row] = []
            while heap and len(found) < WORKS_MAX and len(passed) < PASSED_MAX:
                row = heap.pop()
                unit = row[2]
                if self._units.get(unit.key) is not unit:
                    heap.refund(row)  # it was withdrawn
                    continue
                if not site.suits(unit.needs):
                    passed.append(row)
                elif unit.near and any(peer in site.pilots for peer in unit.near):
                    found.append(unit)
                elif unit.near and which is None and len(self._sites) > 1:
                    elsewhere.append(row)
                elif len(others) < spare:
                    others.append(row)
                else:
                    passed.append(row)
                    if not self._near:
                        break
            for row in passed:
                heap.back(row)
        for row in (*others, *elsewhere):
            if spare > 0:
                found.append(row[2])
                spare -= 1
            else:
                self._heaps[row[2].needs.site].back(row)
        for unit in found:
            self._forget(unit)
        return found

    def _cost(self, unit: Unit) -> float:
        return max(1, unit.needs.capacity.millicores) / 1000 * (self._estimate(unit) or 1.0)

    def _forget(self, unit: Unit) -> None:
        del self._units[unit.key]
        self._shares.leaves(unit.owner)
        self._near -= bool(unit.near)

    def waiting_for(self, key: AttemptKey) -> str | None:
        unit = self._units.get(key)
        if unit is None:
            return None
        wanted = unit.needs.site
        sites = [s for s in self._sites.values() if wanted in (None, s.name)]
        if not sites:
            where = f"site {wanted}" if wanted else "any site"
            return f"it is in the queue; no master pilot of {where} has asked for tasks"
        pilots = [member for site in sites for member in site.pilots.values()]
        if pilots and (reason := explain(pilots, unit.needs)) is not None:
            return f"it is in the queue; it {reason}"
        now = self._now()
        said = ", ".join(
            f"{s.name} ({len(s.pilots)} pilots, heard {now - s.heard_at:.0f} s ago)"
            for s in sites[:5]
        )
        owners = self._shares.owners
        even = f", of {owners} owners who share the slots evenly" if owners > 1 else ""
        waiting = f"it is in the queue, {len(self._units)} wait{even}"
        return f"{waiting}; a site pulls it when it has room: {said}"

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class Sites:
    """A home's targets, where these are sites: they ask, and nobody asks them."""

    near_bytes_min = READ_BYTES_MIN

    def __init__(self, home: Home) -> None:
        self.sites: dict[str, SiteState] = {}
        self.known_files: OrderedDict[bytes, File] = OrderedDict()  # that works were given
        self.counts: Counter[str] = Counter()
        self._home = home
        self._began = False
        self._tasks = Tasks()
        self.pulled = Pulled(self.sites, lambda: asyncio.get_running_loop().time(), home.estimate)
        home.use(self.pulled)

    # ----------------------------------------------------------------- as targets

    def refusal(self, workflow: Workflow) -> str:
        gangs = any(task.gang for task in workflow.tasks.values())
        return "tasks for several peers at once are submitted to a peer" if gangs else ""

    def strategy(self, run: Run) -> Strategy | None:
        return self.pulled

    def settle(self) -> None:
        """Whoever is there, asks."""

    def resume(self, run: Run) -> None:
        """What was given out is at its site: its master says whether that is still so."""

    def _is_alive(self, pilot: bytes) -> bool:
        return any(pilot in site.pilots for site in self.sites.values())

    def is_held(self, file: File | None) -> bool:
        if file is None:
            return False
        return (
            file.hash in self._home.blobs
            or not self.sites
            or any(map(self._is_alive, file.holders))
        )

    def keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        """What the user came for is fetched from the pilot that made it."""
        for task in changed:
            for made in task.won.outputs if task.won else ():
                if made.name in run.final_files and made.hash not in self._home.blobs:
                    self._tasks.spawn(self._fetch_final(run, made))

    async def _fetch_final(self, run: Run, made: File) -> None:
        for _, error in (await self._home.transfer.fetch_all([made], run.id)).errors:
            log.info("no copy of %s here: %s", made.name, error)

    def abort(self, run: Run, peer: bytes, keys: list[AttemptKey]) -> None:
        for site in self.sites.values():
            if site_id(site.name) == peer:
                site.to_end.update(dict.fromkeys(keys))

    def called(self, peer: bytes) -> str:
        sites = (site.name for site in self.sites.values() if site_id(site.name) == peer)
        return next((f"site {name}" for name in sites), peer.hex())

    def waiting_for(self, run: Run, task: TaskState) -> str:
        attempt = task.attempt(task.number) if task.state == "running" else None
        for site in self.sites.values() if attempt is not None else ():
            if attempt is not None and site_id(site.name) == attempt.peer:
                words = site.whereabouts.get(AttemptKey(run.id, task.id, attempt.number))
                return f"it is at site {site.name}" + (f": {words}" if words else "")
        return ""

    def held_too(self, file: File) -> File:
        """Whoever reads it may be at another site, of another cluster, and asks here: what this
        queue does not have it fetches from the site that has."""
        self.known_files[file.hash] = file
        self.known_files.move_to_end(file.hash)
        if len(self.known_files) > FILES_MAX:
            self.known_files.popitem(last=False)
        return file._replace(url=f"{QUEUE}:/v1/blobs/sha256:{file.hash.hex()}")

    def find_file(self, hash: bytes) -> File | None:
        """A file that some work here reads; after a start, by looking through what runs."""
        found = self.known_files.get(hash)
        if found is not None:
            return found
        for run in self._home.active():
            for name in (*run.staged, *run.workflow.producers):
                file = run.file(name)
                if file is not None and file.hash == hash:
                    self.held_too(file)
                    return file
        return None

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        return {site_id(name) for name in self.sites}

    # ----------------------------------------------------------------- being asked

    async def pull(self, message: PullTasks) -> PulledTasks:
        site = self.sites.get(message.site)
        if site is None:
            if len(self.sites) >= SITES_MAX:
                raise Refused("overload", f"there are {SITES_MAX} sites already")
            site = self.sites[message.site] = SiteState(message.site)
        if not self._ready():
            raise Refused("starting", "the queue has just been started, and reads its journals")
        self.counts["requests"] += 1
        async with site.turn:
            now = asyncio.get_running_loop().time()
            if message.anew and now - site.heard_at < OTHERS_S and self._are_others(site, message):
                self.counts["others"] += 1
                asks = f"other peers ask as site {site.name}: if these are another cluster's"
                raise Refused("site", f"{asks}, start them with another --site")
            site.heard_at = now
            if message.token != site.token and not message.anew:
                return PulledTasks(again=True)
            if message.token == site.token and message.request <= site.number and site.answer:
                # one of before, that was long on its way, is nobody's any more
                self.counts["repeats"] += 1
                return site.answer if message.request == site.number else PulledTasks()
            answer = await self._pull(site, message)
            site.token, site.number, site.answer = message.token, message.request, answer
            return answer

    def _are_others(self, site: SiteState, message: PullTasks) -> bool:
        if message.token == site.token or not site.pilots or not message.pilots:
            return False
        return all(member.contact.id not in site.pilots for member in message.pilots)

    def _ready(self) -> bool:
        """All that was on the disk at the start is being gone on with: before that, nobody can say
        which of a site's attempts are wanted."""
        if not self._began:
            replicas = self._home.journal.keeping.replicas
            self._began = self._home.given.settled and all(
                replica.over or workflow_id in self._home.runs.active
                for workflow_id, replica in replicas.items()
            )
        return self._began

    async def _pull(self, site: SiteState, message: PullTasks) -> PulledTasks:
        if message.pilots or message.dead:
            site.known.clear()
        if message.pilots:
            site.pilots = {m.contact.id: m for m in message.pilots}
        for pilot in message.dead:
            site.pilots.pop(pilot, None)
        if message.whereabouts is not None:
            site.whereabouts = {k: words for words, keys in message.whereabouts for k in keys}
        kept = await self._ended_at(site, message.outcomes)
        self._home.lost([(key, reason) for key, reason in message.lost])
        if message.anew:
            held = {*message.held, *(ended.key for _, ended in message.outcomes)}
            gone = [key for key in self.given_to(site) if key not in held]
            self._home.lost(
                [(k, f"it is not at site {site.name} any more") for k in gone], begun=False
            )
            for run in self._home.active():
                with self._home.deciding(run) as decide:
                    decide.place_ready()
        # who begins anew gets nothing: it may be a master of before, whose word was late
        units = [] if message.anew else self.pulled.take(site, min(WORKS_MAX, message.want))
        works = await self._give(site, units)
        ended, site.to_end = tuple(site.to_end), {}
        self.counts["given"] += len(works)
        self.counts["outcomes"] += len(message.outcomes)
        return PulledTasks(works=tuple(works), kept=tuple(kept), ended=ended)

    def given_to(self, site: SiteState) -> list[AttemptKey]:
        """As the journals say."""
        mine = site_id(site.name)
        return [
            AttemptKey(run.id, task.id, attempt.number)
            for run in self._home.active()
            for task in run.tasks.values()
            if task.state == "running"
            for attempt in task.attempts
            if attempt.state == "running" and attempt.peer == mine
        ]

    async def _ended_at(
        self, site: SiteState, outcomes: Iterable[tuple[bytes, Outcome]]
    ) -> list[AttemptKey]:
        """Those that count now; of workflows that nobody knows any more, too."""
        by_run: dict[str, list[Outcome]] = defaultdict(list)
        kept: list[AttemptKey] = []
        for pilot, ended in outcomes:
            if self._home.knows(ended.key.workflow):
                made = tuple(file._replace(holders=(pilot,)) for file in ended.outputs)
                await self._home.reception.keep_enclosed(ended)
                by_run[ended.key.workflow].append(ended._replace(outputs=made, by=pilot))
            elif self._home.journal.keeping.follows(ended.key.workflow) is None:
                kept.append(ended.key)
        for workflow_id, some in by_run.items():
            run = self._home.runs.active.get(workflow_id)
            if run is not None:
                self._home.take(
                    run, site_id(site.name), [e for e in some if e.key.task in run.tasks]
                )
        counted = await self._home.reception.counted(by_run)
        site.done += len(counted)
        return [*kept, *counted]

    async def _give(self, site: SiteState, units: list[Unit]) -> list[Work]:
        """Journaled before anybody hears of it."""
        contact = Contact(site_id(site.name), "", 0)
        by_run: dict[str, list[Placed]] = defaultdict(list)
        why = f"the master pilot of site {site.name} asked for tasks"
        record = Placement(self.pulled.name, known=len(site.pilots), why=why)
        for unit in units:
            if self._home.placements.is_pending(unit.key):
                by_run[unit.key.workflow].append(Placed(unit, contact, 0, record))
        works: list[Work] = []
        for workflow_id, rows in by_run.items():
            run = self._home.runs.active[workflow_id]
            keys = [one.unit.key for one in rows]
            attempts = tuple(StartedAttempt(k.task, k.number, contact.id, 0) for k in keys)
            said = AttemptsStarted(placement=record.to_row(), attempts=attempts)
            with self._home.deciding(run) as decide:
                decide.write(said)
        for workflow_id, rows in by_run.items():
            try:
                await self._home.journal.kept(workflow_id)
            except Deposed:
                continue
            mine = self._home.runs.active.get(workflow_id)
            for one in rows if mine is not None else ():
                assert mine is not None
                work = self._home.placements.make_work(mine, one)
                if work is not None:
                    works.append(work._replace(placing=self._placing(mine, one.unit)))
        site.given += len(works)
        return works

    def _placing(self, run: Run, unit: Unit) -> Placing:
        """What the site's own placement is to know."""
        now = asyncio.get_running_loop().time()
        tried = run.tasks[unit.key.task].attempts
        failed = dict.fromkeys(a.ran_at for a in tried if a.state in ("failed", "lost"))
        pilots = {pilot for site in self.sites.values() for pilot in site.pilots}
        return Placing(
            min(1e8, max(0.0, unit.rank)),
            None if unit.deadline_at is None else unit.deadline_at - now,
            unit.ranked_by,
            tuple(peer for peer in failed if peer in pilots)[-8:],
        )

    async def unheld(self, message: StillHeld) -> Unheld:
        return await self._home.reception.still_held(Contact(bytes(20), "", 0), message)

    async def close(self) -> None:
        await self._tasks.close()

    async def watch(self) -> None:
        """Sites that have fallen silent."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            for site in list(self.sites.values()):
                if now - site.heard_at > SITE_LOST_S:
                    lost = self.given_to(site)
                    site.pilots, site.token, site.answer = {}, 0, None
                    site.known.clear()
                    if lost:
                        log.warning("site %s is silent: %d tasks are lost", site.name, len(lost))
                        self._home.lost([(key, f"site {site.name} fell silent") for key in lost])
                    elif now - site.heard_at > 10 * SITE_LOST_S:
                        del self.sites[site.name]
