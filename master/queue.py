"""The task queue: enacts workflows whose tasks the sites' master pilots pull in bulk.

It is a home like any peer's, except that it shares its journal with nobody and that its targets
are sites: a task is placed at a site that asks for tasks, and the site decides which peer runs it.

Rules:
- A task that was handed out is at its site until its outcome arrives, its loss is reported, or a
  new master of the site does not have it. The journal says so before the task is on its way.
- Two requests with the same number are one request; a request older than the last one is ignored.
- A site that is silent for long is lost, with all its tasks.
- One set of pilots at a time asks for a site: another cluster under the same name, or the other
  half of a partitioned site, is refused as long as the first set asks.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import heapq
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
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
SITES_NAMED_MAX = 5
NEEDS_MAX = 1000
PASSED_MAX = 5000  # units that one request looks at in vain

Row = tuple[float, int, Unit]


def site_id(name: str) -> bytes:
    """The id of a site, which the journal has in place of a peer's."""
    return hashlib.blake2b(f"site:{name}".encode(), digest_size=20).digest()


class _Heaps:
    """Waiting units: owners take turns, and each owner's most urgent unit comes first."""

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
        """The unit was not taken after all."""
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
    known: dict[Needs, bool] = field(default_factory=dict)  # needs → some pilot meets them
    #: where attempts are within the site, or what they wait for there, in the site's words
    whereabouts: dict[AttemptKey, str] = field(default_factory=dict)

    def suits(self, needs: Needs) -> bool:
        """Some pilot meets these needs; or no pilot is known yet."""
        suits = self.known.get(needs)
        if suits is None:
            if len(self.known) > NEEDS_MAX:
                self.known.clear()
            pilots = self.pilots.values()
            suits = not pilots or any(not unmet(m.capacity, m.traits, needs) for m in pilots)
            self.known[needs] = suits
        return suits


class _Fit(enum.Enum):
    """How a waiting unit fits the site that asks."""

    LOCAL = enum.auto()  # the site holds its files
    NEUTRAL = enum.auto()  # no other site is preferable
    REMOTE = enum.auto()  # another site holds its files
    SURPLUS = enum.auto()  # the site has asked for no more
    UNSUITED = enum.auto()  # no pilot of the site could run it


class Pulled:
    """The strategy of a task queue: units wait until a site asks for them."""

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
        """The next units for this site: all whose files it has, so that it may choose a pilot for
        each; of the others as many as it has capacity for; and only if these are too few, some
        whose files are at other sites."""
        rows: dict[_Fit, list[Row]] = {fit: [] for fit in _Fit}
        for wanted_site in (site.name, None):
            self._sort(self._heaps[wanted_site], site, count, rows)
        others = [*rows[_Fit.NEUTRAL], *rows[_Fit.REMOTE]]
        for row in others[count:]:
            self._heaps[row[2].needs.site].back(row)
        taken = [row[2] for row in (*rows[_Fit.LOCAL], *others[:count])]
        for unit in taken:
            self._forget(unit)
        return taken

    def _sort(self, heap: _Heaps, site: SiteState, count: int, rows: dict[_Fit, list[Row]]) -> None:
        """Moves units, the most urgent first, from the heap to the rows of those that fit."""
        passed: list[Row] = []
        while heap and len(rows[_Fit.LOCAL]) < WORKS_MAX and len(passed) < PASSED_MAX:
            row = heap.pop()
            unit = row[2]
            if self._units.get(unit.key) is not unit:
                heap.refund(row)  # it was withdrawn
                continue
            fit = self._fit(unit, site, full=len(rows[_Fit.NEUTRAL]) >= count)
            is_passed = fit in (_Fit.SURPLUS, _Fit.UNSUITED)
            (passed if is_passed else rows[fit]).append(row)
            if fit is _Fit.SURPLUS and not self._near:
                break
        for row in passed:
            heap.back(row)

    def _fit(self, unit: Unit, site: SiteState, full: bool) -> _Fit:
        if not site.suits(unit.needs):
            return _Fit.UNSUITED
        if unit.near and any(peer in site.pilots for peer in unit.near):
            return _Fit.LOCAL
        if unit.near and unit.needs.site is None and len(self._sites) > 1:
            return _Fit.REMOTE
        return _Fit.SURPLUS if full else _Fit.NEUTRAL

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
            return f"it is queued: no peer of {where} has asked for tasks yet"
        pilots = [member for site in sites for member in site.pilots.values()]
        if pilots and (reason := explain(pilots, unit.needs)) is not None:
            return f"it is queued: it {reason}"
        return self._waits_for(sites)

    def _waits_for(self, sites: list[SiteState]) -> str:
        now = self._now()
        named = ", ".join(
            f"{s.name} ({len(s.pilots)} peers, last heard of {now - s.heard_at:.0f} s ago)"
            for s in sites[:SITES_NAMED_MAX]
        )
        owners = self._shares.owners
        shares = f" of {owners} users, who get equal shares" if owners > 1 else ""
        waiting = f"it is one of {len(self._units):,} queued tasks{shares}"
        return f"{waiting}; a site takes it when it has free capacity: {named}"

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class Sites:
    """The targets of a task queue's home: sites, which ask for tasks themselves."""

    near_bytes_min = READ_BYTES_MIN
    may_promise = False

    def __init__(self, home: Home) -> None:
        self.sites: dict[str, SiteState] = {}
        self.known_files: OrderedDict[bytes, File] = OrderedDict()  # inputs of works
        self.counts: Counter[str] = Counter()
        self._home = home
        self._began = False
        self._tasks = Tasks()
        self.pulled = Pulled(self.sites, lambda: asyncio.get_running_loop().time(), home.estimate)
        home.use(self.pulled)

    # ----------------------------------------------------------------- as targets

    def refusal(self, workflow: Workflow) -> str:
        gangs = any(task.gang for task in workflow.tasks.values())
        text = "a task queue can't run tasks for several peers at once; submit this to a peer"
        return text if gangs else ""

    def strategy(self, run: Run) -> Strategy | None:
        return self.pulled

    def settle(self) -> None:
        """Sites that are there will ask."""

    def resume(self, run: Run) -> None:
        """Attempts are at their sites: the next request of a new master says which still are."""

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
        """Final results are fetched from the pilots that made them."""
        for task in changed:
            for output in task.won.outputs if task.won else ():
                if output.name in run.final_files and output.hash not in self._home.blobs:
                    self._tasks.spawn(self._fetch_final(run, output))

    async def _fetch_final(self, run: Run, output: File) -> None:
        for _, error in (await self._home.transfer.fetch_all([output], run.id)).errors:
            log.info("the final file %s was not fetched: %s", output.name, error)

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
        """The file with the address of this queue: its reader may be at another site, in another
        cluster, and asks here. Files that the queue does not have it fetches from their site."""
        self.known_files[file.hash] = file
        self.known_files.move_to_end(file.hash)
        if len(self.known_files) > FILES_MAX:
            self.known_files.popitem(last=False)
        return file._replace(url=f"{QUEUE}:/v1/blobs/sha256:{file.hash.hex()}")

    def find_file(self, digest: bytes) -> File | None:
        """A file that some task here reads; after a start it is looked up in running workflows."""
        known = self.known_files.get(digest)
        if known is not None:
            return known
        for run in self._home.active():
            for name in (*run.staged, *run.workflow.producers):
                file = run.file(name)
                if file is not None and file.hash == digest:
                    self.held_too(file)
                    return file
        return None

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        return {site_id(name) for name in self.sites}

    # ----------------------------------------------------------------- being asked

    async def pull(self, message: PullTasks) -> PulledTasks:
        site = self._site(message.site)
        if not self._ready():
            raise Refused("starting", "the task queue is starting, and still reads its journals")
        self.counts["requests"] += 1
        async with site.turn:
            now = asyncio.get_running_loop().time()
            if message.anew and now - site.heard_at < OTHERS_S:
                self._refuse_others(site, message)
            site.heard_at = now
            if message.token != site.token and not message.anew:
                return PulledTasks(again=True)
            if message.token == site.token and message.request <= site.number and site.answer:
                # an older request was delayed on its way: nobody waits for its answer any more
                self.counts["repeats"] += 1
                return site.answer if message.request == site.number else PulledTasks()
            answer = await self._pull(site, message)
            site.token, site.number, site.answer = message.token, message.request, answer
            return answer

    def _site(self, name: str) -> SiteState:
        site = self.sites.get(name)
        if site is None:
            if len(self.sites) >= SITES_MAX:
                raise Refused("overload", f"the task queue serves {SITES_MAX:,} sites, its limit")
            site = self.sites[name] = SiteState(name)
        return site

    def _refuse_others(self, site: SiteState, message: PullTasks) -> None:
        if message.token == site.token or not site.pilots or not message.pilots:
            return
        if all(member.contact.id not in site.pilots for member in message.pilots):
            self.counts["others"] += 1
            text = f"other peers already ask for tasks as site {site.name}"
            raise Refused("site", f"{text}; start those of another cluster with another --site")

    def _ready(self) -> bool:
        """All workflows on the disk at the start have been taken up: before that, nobody can say
        which of a site's attempts are wanted."""
        if not self._began:
            replicas = self._home.journal.keeping.replicas
            self._began = self._home.outstanding.settled and all(
                replica.over or workflow_id in self._home.runs.active
                for workflow_id, replica in replicas.items()
            )
        return self._began

    async def _pull(self, site: SiteState, message: PullTasks) -> PulledTasks:
        self._heard_from(site, message)
        kept = await self._ended_at(site, message.outcomes)
        self._home.lost([(key, reason) for key, reason in message.lost])
        if message.anew:
            self._new_master(site, message)
        # a new master gets nothing yet: it may be a former one whose message was delayed
        units = [] if message.anew else self.pulled.take(site, min(WORKS_MAX, message.want))
        works = await self._give(site, units)
        ended, site.to_end = tuple(site.to_end), {}
        self.counts["given"] += len(works)
        self.counts["outcomes"] += len(message.outcomes)
        return PulledTasks(works=tuple(works), kept=tuple(kept), ended=ended)

    def _heard_from(self, site: SiteState, message: PullTasks) -> None:
        if message.pilots or message.dead:
            site.known.clear()
        if message.pilots:
            site.pilots = {m.contact.id: m for m in message.pilots}
        for pilot in message.dead:
            site.pilots.pop(pilot, None)
        if message.whereabouts is not None:
            site.whereabouts = {k: words for words, keys in message.whereabouts for k in keys}

    def _new_master(self, site: SiteState, message: PullTasks) -> None:
        """Attempts that the site does not have any more are lost."""
        held = {*message.held, *(ended.key for _, ended in message.outcomes)}
        gone = [key for key in self.given_to(site) if key not in held]
        reason = f"it is not at site {site.name} any more"
        self._home.lost([(key, reason) for key in gone], begun=False)
        for run in self._home.active():
            with self._home.deciding(run) as decide:
                decide.place_ready()

    def given_to(self, site: SiteState) -> list[AttemptKey]:
        """The attempts at this site, as the journals say."""
        target = site_id(site.name)
        return [
            AttemptKey(run.id, task.id, attempt.number)
            for run in self._home.active()
            for task in run.tasks.values()
            if task.state == "running"
            for attempt in task.attempts
            if attempt.state == "running" and attempt.peer == target
        ]

    async def _ended_at(
        self, site: SiteState, outcomes: Iterable[tuple[bytes, Outcome]]
    ) -> list[AttemptKey]:
        """Takes outcomes. Returns those that are committed now, and those of workflows that nobody
        knows any more."""
        by_run: dict[str, list[Outcome]] = defaultdict(list)
        kept: list[AttemptKey] = []
        for pilot, ended in outcomes:
            if self._home.knows(ended.key.workflow):
                outputs = tuple(file._replace(holders=(pilot,)) for file in ended.outputs)
                await self._home.reception.keep_enclosed(ended)
                by_run[ended.key.workflow].append(ended._replace(outputs=outputs, by=pilot))
            elif self._home.journal.keeping.follows(ended.key.workflow) is None:
                kept.append(ended.key)
        for workflow_id, some in by_run.items():
            run = self._home.runs.active.get(workflow_id)
            if run is not None:
                known = [ended for ended in some if ended.key.task in run.tasks]
                self._home.take(run, site_id(site.name), known)
        committed = await self._home.reception.counted(by_run)
        site.done += len(committed)
        return [*kept, *committed]

    async def _give(self, site: SiteState, units: list[Unit]) -> list[Work]:
        """The works for these units; journaled before the site hears of them."""
        contact = Contact(site_id(site.name), "", 0)
        by_run: dict[str, list[Placed]] = defaultdict(list)
        why = f"site {site.name} asked for tasks"
        record = Placement(self.pulled.name, known=len(site.pilots), why=why)
        for unit in units:
            if self._home.placements.is_pending(unit.key):
                by_run[unit.key.workflow].append(Placed(unit, contact, 0, record))
        works: list[Work] = []
        for workflow_id, rows in by_run.items():
            keys = [row.unit.key for row in rows]
            attempts = tuple(StartedAttempt(k.task, k.number, contact.id, 0) for k in keys)
            entry = AttemptsStarted(placement=record.to_row(), attempts=attempts)
            with self._home.deciding(self._home.runs.active[workflow_id]) as decide:
                decide.write(entry)
        for workflow_id, rows in by_run.items():
            try:
                await self._home.journal.kept(workflow_id)
            except Deposed:
                continue
            run = self._home.runs.active.get(workflow_id)
            if run is not None:
                works += self._works(run, rows)
        site.given += len(works)
        return works

    def _works(self, run: Run, rows: list[Placed]) -> Iterator[Work]:
        for row in rows:
            work = self._home.placements.make_work(run, row)
            if work is not None:
                yield work._replace(placing=self._placing(run, row.unit))

    def _placing(self, run: Run, unit: Unit) -> Placing:
        """Facts that the site needs for its own placement."""
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
        """Gives up sites that are silent."""
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
                        self._home.lost([(key, f"site {site.name} is silent") for key in lost])
                    elif now - site.heard_at > 10 * SITE_LOST_S:
                        del self.sites[site.name]
