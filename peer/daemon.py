"""One peer, put together: every part, how they know each other, how it starts and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import random
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack

from valence.protocols.config import PRESETS
from valence.protocols.data.transfer import Transfer
from valence.protocols.engine.enactment import Enactment
from valence.protocols.engine.gateway import Gateway
from valence.protocols.engine.home import Home
from valence.protocols.engine.targets import Peers, Targets
from valence.protocols.membership.liveness import Liveness
from valence.protocols.membership.members import Members, State
from valence.protocols.overlay.overlays import MADE_BY
from valence.protocols.ports import DatabaseError
from valence.protocols.records import Records
from valence.protocols.strategies.service import Work
from valence.protocols.wire.messages import Capacity, Contact, Hello, Member, Traits, Welcome
from valence.protocols.wire.rpc import CallFailed, Refused, Rpc

from .attempt import Limits, LocalLauncher
from .blobs import DiskBlobs
from .database import Database
from .http import Http
from .identity import Identity, tls_contexts, write_private
from .journal_storage import SqliteJournalStorage
from .link import NOBODY, Link
from .metrics import Metrics
from .nursery import adopt_orphans
from .outbox_storage import SqliteOutboxStorage
from .processes import LocalProcesses
from .queue import QueueClient
from .routes import VERSION
from .sandbox import NoSandbox, Sandbox
from .seal import Seal
from .settings import Settings
from .storage import ExternalStorage
from .tokens import Tokens
from .users import NoUsers, Users

log = logging.getLogger("valence.peer")

SEEDS_MAX = 64
SEEDS_GREETED = 8
REGREET_S_MIN, REGREET_S_MAX = 5.0, 300.0
REMEMBERED_PEERS = 50
HELLO_TIMEOUT_S = 1.0
QUICK_GRACE_S = 0.5
FAREWELL_S = 2.0
HOUSEKEEPING_S = 600.0
SETTLE_S, SETTLE_S_MAX = 0.5, 10.0
RESTART_S_MIN, RESTART_S_MAX = 0.2, 30.0
SOUND_S = 60.0  # what ran so long has not failed in a row
FAILURES_MAX = 10
#: no user's input comes near these, and without them others would rely on a peer that is none
ESSENTIAL = ("liveness", "gossip", "elections")


class AlreadyRunning(Exception):
    """Another daemon uses this data directory."""


class Daemon:
    what = "peer"
    runs_tasks = True

    def __init__(self, settings: Settings, nursery: socket.socket) -> None:
        self._settings = settings
        self._nursery = nursery
        self._config = dataclasses.replace(
            PRESETS[settings.preset],
            keepers=settings.keepers,
            majority_lost_s=settings.majority_lost,
            overlay=settings.overlay,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.exit_code = 0
        self.restarts: Counter[str] = Counter()  # of its parts, after errors
        self._stop = asyncio.Event()
        self._moved = asyncio.Event()  # somebody came, went or is doubted
        self._grace_s = settings.grace
        self._queue = QueueClient(settings) if settings.queue else None
        self._data = settings.data.absolute()  # the nursery goes from directory to directory
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyRunning(f"a peer is running in {self._data} already") from None

    # ----------------------------------------------------------------- starting

    async def start(self) -> None:
        settings, config, data = self._settings, self._config, self._data
        adopt_orphans()
        users = self._users() if self.runs_tasks else None
        sandbox = self._sandbox(users) if self.runs_tasks else None
        self._rng = rng = random.Random(os.urandom(16))
        identity = Identity.load(data)
        self.database = Database(data / "peer.db")
        boot = await self._count_boot()
        tls = tls_contexts(identity, settings.cluster_key, data)
        seal = Seal(identity.id, settings.cluster_key, time.time)
        self.link = Link(seal, tls, identity.id, config)
        port = await self._listen()
        host = socket.gethostbyname(settings.advertise or _reachable(settings.host, settings.join))
        if host.startswith("127.") and not settings.host.startswith(("127.", "localhost")):
            log.warning("others are told %s, which only this machine reaches: --advertise", host)
        me = Contact(id=identity.id, host=host, port=port)

        self.rpc = Rpc(me, self.link, rng, config)
        self.rpc.on_error = lambda where, error: log.error("serving %s", where, exc_info=error)
        capacity = self._capacity()
        traits = Traits(
            arch=settings.arch(),
            os=settings.os_name(),
            site=settings.site,
            speed=settings.speed,
            labels=settings.labels,
            software=settings.software,
        )
        self.metrics = Metrics()
        http_port = self._known_port("http_port", settings.http_port)
        url = settings.http_advertise or self._url(http_port)
        member = Member(
            contact=me, http=url, capacity=capacity, traits=traits, boot=boot, version=VERSION
        )
        self.members = Members(member, config)
        self.overlay = MADE_BY[config.overlay](self.rpc, rng, config)
        self.overlay.is_alive = self.members.is_alive
        self.liveness = Liveness(self.rpc, self.members, rng, config)
        self.records = Records(self.rpc, self.overlay, rng, config)
        self.blobs = DiskBlobs(data, settings.disk, settings.blob_max)
        self.transfer = self.make_transfer(
            self.rpc, self.blobs, self.members, self.records, time.time, rng
        )
        storage = ExternalStorage(settings, self.blobs)
        self.transfer.from_origin = storage.fetch
        self.processes = LocalProcesses(self._nursery, data, users or _as_this_peer)
        limits = Limits(memory_bytes=capacity.memory_bytes, disk_bytes=settings.disk)
        parts = (self.processes, self.blobs, self.transfer)
        workshop = LocalLauncher(data, *parts, settings.log_max, sandbox, limits)
        self.enactment = Enactment(
            rpc=self.rpc,
            members=self.members,
            liveness=self.liveness,
            records=self.records,
            journals=SqliteJournalStorage(self.database, time.time),
            outbox=SqliteOutboxStorage(self.database, time.time),
            blobs=self.blobs,
            transfer=self.transfer,
            workshop=workshop,
            clock=time.time,
            rng=rng,
            config=config,
            storage=storage,
            exchange=self._queue.exchange if self._queue is not None else None,
            targets=self.make_targets,
            gateway=self.make_gateway,
        )
        self.http = self.make_http(
            gateway=self.enactment.gateway,
            blobs=self.blobs,
            transfer=self.transfer,
            metrics=self.metrics,
            tokens=Tokens(settings.token, settings.revoked, time.time),
            requests_max=settings.requests_max,
            peer=identity.id.hex(),
            blob_arrived=self.enactment.home.inputs.blob_arrived,
            clock=time.time,
        )
        self._measure()
        self.rpc.on(Hello, self._hello)
        self.rpc.on_heard = self.overlay.saw
        self.rpc.on_unreachable = self.liveness.suspect
        self.link.on_broken = self.liveness.broke
        self.members.listen(self._member_changed)
        self.enactment.load()
        await self._listen_http(http_port, url)
        self.link.receive = self.rpc.received  # not before: who asks is told where HTTP is served
        self._tell_where(port)
        for name, work in (
            ("liveness", self.liveness.run),
            ("gossip", self.liveness.gossip),
            ("overlay", self.overlay.refresh),
            ("records", self.records.run),
            ("handing over", self.records.hand_over),
            *self.enactment.works(),
            ("join", self._join),
            ("settle", self._settle),
            ("housekeeping", self._housekeep),
            ("preloading", self._preload),
        ):
            self._run(name, work)
        log.info(
            "%s %s is up: %s, HTTP %s",
            self.what,
            identity.id.hex()[:8],
            _at(me),
            self.members.me.http,
        )

    def _sandbox(self, users: Users | None) -> Sandbox | None:
        """As set; by default wherever it works, and where it does not that is said."""
        wanted = self._settings.sandbox
        if wanted == "off":
            return None
        try:
            return Sandbox.find(self._data, users("") if users is not None else None)
        except NoSandbox as error:
            if wanted != "auto":
                raise
            log.warning(
                "TASKS RUN WITHOUT A SANDBOX: %s. They can read what their user can; let only "
                "people submit whom you trust, or set it right (docs/security.md)",
                error,
            )
            return None

    def _users(self) -> Users | None:
        """No task runs as root, nor as this peer where it may choose."""
        if os.geteuid() != 0:
            return None
        self._data.chmod(0o711)  # what is in there is closed by itself
        try:
            return Users.find(self._data)
        except NoUsers as error:
            self._data.chmod(0o700)
            if not self._settings.root_tasks:
                raise ValueError(
                    f"tasks would run as root: {error}. Start it as another user, use a Python "
                    "that other users may run, or allow it with --root-tasks"
                ) from None
            log.warning("TASKS RUN AS ROOT, as --root-tasks allows: %s", error)
            return None

    def _capacity(self) -> Capacity:
        settings = self._settings
        return Capacity(
            millicores=settings.capacity_millicores(),
            memory_bytes=settings.capacity_memory_bytes(),
            disk_bytes=settings.disk,
            gpus=settings.gpus,
        )

    # what a task queue has in other ways

    def make_transfer(self, *parts: Any) -> Transfer:
        return Transfer(*parts)

    def make_targets(self, home: Home) -> Targets:
        return Peers(home)

    def make_gateway(self, *parts: Any) -> Gateway:
        return Gateway(*parts)

    def make_http(self, **parts: Any) -> Http:
        return Http(**parts)

    async def _count_boot(self) -> int:
        """How often this peer has started: others tell its lives apart by it."""
        rows = self.database.read("select value from meta where key = 'boot'")
        boot = (int(rows[0][0]) if rows else 0) + 1
        await self.database.write([("insert or replace into meta values ('boot', ?)", (boot,))])
        return boot

    def _known_port(self, name: str, wanted: int) -> int:
        """As set, or the one it had before: others remember it there."""
        if wanted:
            return wanted
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((self._data / "peer.json").read_text())[name])
        return 0

    async def _listen(self) -> int:
        wanted = self._known_port("port", self._settings.port)
        try:
            return await self.link.open(self._settings.host, wanted)
        except OSError:
            if self._settings.port or not wanted:
                raise
            return await self.link.open(self._settings.host, 0)

    async def _listen_http(self, wanted: int, url: str) -> None:
        try:
            port = await self.http.start(self._settings.http_host, wanted)
        except OSError:
            if self._settings.http_port or not wanted:
                raise
            port = await self.http.start(self._settings.http_host, 0)
        if not self._settings.http_advertise:
            url = self._url(port)
        self.members.describe(url)
        self._http_port = port

    def _url(self, port: int) -> str:
        host = _reachable(self._settings.http_host, self._settings.join)
        return f"http://{host}:{port}"

    def _tell_where(self, port: int) -> None:
        """For tools on this machine."""
        me = self.members.me
        found = {
            "id": me.contact.id.hex(),
            "pid": os.getpid(),
            "address": _at(me.contact),
            "port": port,
            "http": me.http,
            "http_port": self._http_port,
        }
        write_private(self._data / "peer.json", json.dumps(found).encode())

    def _run(self, name: str, work: Work) -> None:
        task = asyncio.ensure_future(self._keep_running(name, work))
        task.set_name(name)
        self._tasks.append(task)

    async def _keep_running(self, name: str, work: Work) -> None:
        """An error in one part is told, and that part begun again, ever later while it goes on
        failing: no part takes the peer with it. Without those that make it a peer it gives up."""
        failures = 0
        while True:
            began = self._now()
            try:
                await work()
                return
            except Exception:
                self.restarts[name] += 1
                log.critical("%s ended by an error, and is begun again", name, exc_info=True)
            failures = 0 if self._now() - began >= SOUND_S else failures + 1
            if failures >= FAILURES_MAX and name in ESSENTIAL:
                log.critical("%s can't be kept running: this peer gives up", name)
                self.exit_code = 1
                self.stop(QUICK_GRACE_S)
                return
            await asyncio.sleep(min(RESTART_S_MAX, RESTART_S_MIN * 2 ** min(failures, 20)))

    # ----------------------------------------------------------------- joining

    async def _join(self) -> None:
        """Greet some seeds until one answers, and again, ever more rarely, those that are not
        known: two halves of a cluster that began apart find each other so."""
        delay_s, again_s = 0.1, REGREET_S_MIN
        while True:
            alone = self.members.count <= 1
            known = {(m.contact.host, m.contact.port) for m in self.members.all()}
            seeds = await self._seeds()
            if alone:
                chosen = seeds[:SEEDS_GREETED]
            else:  # one is enough: it knows its half of the cluster
                chosen = [seed for seed in seeds if seed not in known][:1]
            answers = await asyncio.gather(*map(self._greet, chosen))
            if any(answers):
                delay_s, again_s = 0.5, REGREET_S_MIN
                await self.overlay.find(self.rpc.me.id)
            elif alone and delay_s > 1 and self._settings.join:
                listed = ", ".join(self._settings.join)
                log.warning("no answer from %s: is the address, is the cluster key right?", listed)
            if alone:
                await asyncio.sleep(delay_s)
                delay_s = min(5.0, delay_s * 1.5)
                continue
            await self._until_alone(again_s * (0.75 + 0.5 * self._rng.random()))
            again_s = min(REGREET_S_MAX, again_s * 2)

    async def _until_alone(self, limit_s: float) -> None:
        """Or until it is time to look for others again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.members.count > 1:
                    self._moved.clear()
                    await self._moved.wait()

    async def _settle(self) -> None:
        """A home goes on when it knows who else is there, or that nobody is to be expected."""
        expected = bool(self._settings.join or self.database.read("select 1 from peers limit 1"))
        somebody = asyncio.Event()
        self.members.listen(lambda old, new: somebody.set())
        if expected and self.members.count <= 1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S_MAX):
                    await somebody.wait()
        if expected and self.enactment.keeping.replicas:
            await asyncio.sleep(SETTLE_S)  # the first answer brings the list of all others
        self.enactment.settle()

    async def _seeds(self) -> list[tuple[str, int]]:
        loop = asyncio.get_running_loop()
        found: dict[tuple[str, int], None] = {}
        for seed in self._settings.join:
            host, _, port = seed.rpartition(":")
            try:
                rows = await loop.getaddrinfo(host, int(port), family=socket.AF_INET)
            except OSError as error:
                log.info("%s can't be resolved yet: %s", host, error)
                continue
            for row in rows:
                found[(str(row[4][0]), int(row[4][1]))] = None
        for (body,) in self.database.read("select member from peers limit ?", (SEEDS_MAX,)):
            host, remembered = msgpack.unpackb(body)
            found[(host, remembered)] = None
        found.pop((self.rpc.me.host, self.rpc.me.port), None)
        listed = list(found)
        self._rng.shuffle(listed)
        return listed

    async def _greet(self, address: tuple[str, int]) -> bool:
        somebody = Contact(id=NOBODY, host=address[0], port=address[1])
        hello = Hello(member=self.members.me, overlay=self._config.overlay)
        try:
            answer = await self.rpc.call(somebody, hello, Welcome, HELLO_TIMEOUT_S)
        except Refused as error:
            log.error("%s:%d does not take this peer in: %s", *address, error)
            return False
        except CallFailed:
            return False
        self.members.apply(answer.member, self._now())
        self.overlay.saw(answer.member.contact)
        await self.liveness.sync(answer.member.contact)
        return True

    def _hello(self, sender: Contact, message: Hello) -> Welcome:
        mine = self._config.overlay
        if message.overlay != mine:
            raise Refused("overlay", f"this cluster is on --overlay {mine}: all of its peers are")
        self.members.apply(message.member, self._now())
        return Welcome(member=self.members.me)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._moved.set()
        was_here = old is not None and old.state <= State.SUSPECT
        if new.state >= State.DEAD:
            self.overlay.gone(new.contact.id)
            self.rpc.gone(new.contact.id)
            if was_here:
                what = "left" if new.state == State.LEFT else "is dead"
                log.info("peer %s %s", new.contact.id.hex()[:8], what)
        elif new.state == State.ALIVE:
            self.overlay.saw(new.contact)
            if not was_here:
                self.records.joined(new.contact)

    async def _preload(self) -> None:
        """What strategies load late, as it takes long."""
        wanted = [one for s in self.enactment.services.values() for one in s.preloads()]
        await asyncio.gather(*(self._load(event, load) for event, load in wanted))
        await asyncio.Event().wait()

    @staticmethod
    async def _load(wanted: asyncio.Event, load: Callable[[], None]) -> None:
        await wanted.wait()
        await asyncio.to_thread(load)

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            await self._remember_peers()
            await asyncio.sleep(HOUSEKEEPING_S * (0.75 + 0.5 * self._rng.random()))
            before = time.time() - self._settings.retention
            try:
                tombstones = time.time() - self._config.tombstone_s
                forgotten = await self.enactment.journal.storage.forget(before, tombstones)
                dropped = self.blobs.drop_older_than(before)
            except (DatabaseError, OSError) as error:
                log.error("housekeeping: %s", error)
                continue
            if forgotten or dropped:
                log.info("retention: %d workflows, %d files dropped", forgotten, dropped)

    async def _remember_peers(self) -> None:
        """Addresses to return to, should the seeds be gone."""
        others = [m for m in self.members.here() if m.contact.id != self.rpc.me.id]
        rows = self._rng.sample(others, min(len(others), REMEMBERED_PEERS))
        if not rows:
            return
        statements: list[tuple[str, tuple[Any, ...]]] = [("delete from peers", ())]
        for m in rows:
            packed = msgpack.packb([m.contact.host, m.contact.port])
            statements.append(("insert into peers values (?, ?)", (m.contact.id, packed)))
        with contextlib.suppress(DatabaseError):
            await self.database.write(statements)  # type: ignore[arg-type]

    # ----------------------------------------------------------------- living and leaving

    def stop(self, grace_s: float | None = None) -> None:
        if self._stop.is_set():
            self.enactment.executor.hurry.set()
        elif grace_s is not None:
            self._grace_s = min(self._grace_s, grace_s)
        self._stop.set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.stop, QUICK_GRACE_S)
        await self._stop.wait()

    async def leave(self) -> None:
        """Stop accepting, finish or hand back, say goodbye."""
        active = len(self.enactment.home.active())
        alone = self.members.count == 1
        where = "when this peer is back" if alone else "at their other keepers"
        log.info("leaving%s", f"; {active} workflows go on {where}" * bool(active))
        await self.enactment.leave(self._grace_s)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(self.records.hand_on(), self.liveness.leave())
        except TimeoutError:
            log.warning("not everybody heard the goodbye")

    async def close(self) -> None:
        await self.http.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.enactment.close()
        await self.transfer.close()
        if self._queue is not None:
            await self._queue.close()
        await self.liveness.close()
        await self.rpc.close()
        await self.link.close()
        await self.processes.close()
        await self.database.close()
        os.close(self._lock)

    # ----------------------------------------------------------------- metrics

    def _measure(self) -> None:
        add, show = self.metrics.counters, self.metrics.gauges
        counts = self.rpc.counts
        numbers = [name for name in counts.__slots__ if name != "by_kind"]
        add("calls", "Calls between peers", lambda: {n: getattr(counts, n) for n in numbers})
        add("messages", "Messages sent, by kind", lambda: dict(counts.by_kind))
        add("link", "Datagrams and frames", lambda: dict(self.link.counts))
        add("home", "What this peer enacted", lambda: dict(self.enactment.home.counts))
        add(
            "executor",
            "What this peer ran",
            lambda: {**self.enactment.executor.counts, "spawned": self.processes.spawned},
        )
        transfer = self.transfer
        add(
            "transfer",
            "Bytes moved between peers, chunks that were wrong",
            lambda: dict(transfer.counts + transfer.swarm.counts),
        )
        add(
            "cache",
            "Files that made room, and results that were let go of",
            lambda: dict(self.blobs.cache.counts + self.enactment.retention.counts),
        )
        add("http", "HTTP answers by status", lambda: dict(self.http.counts))
        add(
            "disk",
            "Writes and syncs of the database, journal entries",
            lambda: {
                "syncs": self.database.syncs,
                "writes": self.database.writes,
            },
        )
        add(
            "keeping",
            "Journals, as home and as keeper",
            lambda: dict(self.enactment.keeping.counts),
        )
        for service in self.enactment.services.values():
            for metric in service.metrics():
                add(metric.name, metric.help, metric.counts)
        add("relay", "What went to and from a queue", lambda: dict(self.enactment.relay.counts))
        add(
            "restarts", "Parts of this peer begun again after an error", lambda: dict(self.restarts)
        )
        add("process", "What this process used: seconds of a core, wake-ups", _process)
        show("members", "Peers known, by state", self._members_by_state)
        show(
            "capacity",
            "Free capacity of this peer, and what uses it",
            lambda: {
                "free_millicores": self.enactment.admission.free.millicores,
                "free_memory_bytes": self.enactment.admission.free.memory_bytes,
                "running": self.enactment.admission.running,
                "queued": self.enactment.admission.queued,
                "blob_bytes": self.blobs.used_bytes,
                "blobs": len(self.blobs),
                "workflows": len(self.enactment.home.active()),
            },
        )

    def _members_by_state(self) -> dict[str, float]:
        found: dict[str, float] = dict.fromkeys((s.name.lower() for s in State), 0)
        for member in self.members.all():
            found[State(member.state).name.lower()] += 1
        return found

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _as_this_peer(owner: str) -> tuple[int, int]:
    return -1, -1


def _process() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 6),
        "wakeups": used.ru_nvcsw,
        "preemptions": used.ru_nivcsw,
    }


def _at(contact: Contact) -> str:
    return f"{contact.host}:{contact.port}"


def _reachable(host: str, seeds: tuple[str, ...]) -> str:
    """An address others can use, for one that means "all of mine".

    The one this machine would speak from to a seed, else to anybody: connecting a datagram socket
    asks the routing table and sends nothing.
    """
    if host not in ("0.0.0.0", "", "::"):
        return host
    for target in (*(seed.rpartition(":")[0] for seed in seeds), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((target, 9))
            return str(udp.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
