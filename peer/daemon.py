"""One peer, put together: makes every part, connects them, starts them, and leaves the cluster."""

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
from .booking_storage import SqliteBookingStorage
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
SOUND_S = 60.0  # a part that ran this long ends its row of failures
FAILURES_MAX = 10
#: no user's input reaches these; without them, others would rely on a peer that does not work
ESSENTIAL = ("liveness", "gossip", "elections")


class AlreadyRunning(Exception):
    """Another daemon uses this data directory."""


class Daemon:
    """All parts of one peer."""

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
        self.restarts: Counter[str] = Counter()  # of parts that ended by an error
        self._stop = asyncio.Event()
        self._moved = asyncio.Event()  # a peer joined, is gone or is suspected
        self._grace_s = settings.grace
        self._queue = QueueClient(settings) if settings.queue else None
        self._data = settings.data.absolute()  # the nursery changes its working directory
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyRunning(
                f"{self._data} is in use by another peer (choose another directory with `--data`)"
            ) from None

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
            log.warning(
                "other machines can't reach this peer: it advertises %s; set --advertise", host
            )
        me = Contact(id=identity.id, host=host, port=port)

        self.rpc = Rpc(me, self.link, rng, config)
        self.rpc.on_error = lambda where, error: log.error(
            "answering %s failed", where, exc_info=error
        )
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
            bookings=SqliteBookingStorage(self.database),
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
        self.link.receive = self.rpc.received  # not before: answers contain the HTTP address
        self._write_addresses(port)
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
        """As set; by default wherever it works, with a warning where it does not."""
        wanted = self._settings.sandbox
        if wanted == "off":
            return None
        try:
            return Sandbox.find(self._data, users("") if users is not None else None)
        except NoSandbox as error:
            if wanted != "auto":
                raise NoSandbox(f"no sandbox for tasks: {error}") from None
            log.warning(
                "TASKS RUN WITHOUT A SANDBOX: %s. A task can read all files that its user can "
                "read: give tokens only to people you trust, or fix it (docs/security.md)",
                error,
            )
            return None

    def _users(self) -> Users | None:
        """No task runs as root; if this peer is root, none runs as the peer's own user either."""
        if os.geteuid() != 0:
            return None
        self._data.chmod(0o711)  # everything in it has modes of its own
        try:
            return Users.find(self._data)
        except NoUsers as error:
            self._data.chmod(0o700)
            if not self._settings.root_tasks:
                raise ValueError(
                    f"tasks would run as root: {error}. Start the peer as another user, use a "
                    "Python that other users can run, or allow it with `--root-tasks`"
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

    # overridden by a task queue's daemon

    def make_transfer(self, *parts: Any) -> Transfer:
        return Transfer(*parts)

    def make_targets(self, home: Home) -> Targets:
        return Peers(home)

    def make_gateway(self, *parts: Any) -> Gateway:
        return Gateway(*parts)

    def make_http(self, **parts: Any) -> Http:
        return Http(**parts)

    async def _count_boot(self) -> int:
        """How often this peer has started: other peers use it to recognize a restart."""
        rows = self.database.read("select value from meta where key = 'boot'")
        boot = (int(rows[0][0]) if rows else 0) + 1
        await self.database.write([("insert or replace into meta values ('boot', ?)", (boot,))])
        return boot

    def _known_port(self, name: str, wanted: int) -> int:
        """The port as set, or the one it had before: other peers remember its old address."""
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

    def _write_addresses(self, port: int) -> None:
        """`peer.json`, for tools on this machine."""
        me = self.members.me
        addresses = {
            "id": me.contact.id.hex(),
            "pid": os.getpid(),
            "address": _at(me.contact),
            "port": port,
            "http": me.http,
            "http_port": self._http_port,
        }
        write_private(self._data / "peer.json", json.dumps(addresses).encode())

    def _run(self, name: str, work: Work) -> None:
        task = asyncio.ensure_future(self._keep_running(name, work))
        task.set_name(name)
        self._tasks.append(task)

    async def _keep_running(self, name: str, work: Work) -> None:
        """Restart a part that ended by an error, after a delay that grows while it keeps failing.

        No part takes the peer down with it; only if an essential one can't be kept running, the
        peer gives up."""
        failures = 0
        while True:
            began = self._now()
            try:
                await work()
                return
            except Exception:
                self.restarts[name] += 1
                log.critical("%s ended by an error and is restarted", name, exc_info=True)
            failures = 0 if self._now() - began >= SOUND_S else failures + 1
            if failures >= FAILURES_MAX and name in ESSENTIAL:
                log.critical("%s can't be kept running: this peer stops", name)
                self.exit_code = 1
                self.stop(QUICK_GRACE_S)
                return
            await asyncio.sleep(min(RESTART_S_MAX, RESTART_S_MIN * 2 ** min(failures, 20)))

    # ----------------------------------------------------------------- joining

    async def _join(self) -> None:
        """Greet some seeds until one answers; after that, greet unknown seeds ever more rarely, so
        that two halves of a cluster that started apart find each other."""
        delay_s, again_s = 0.1, REGREET_S_MIN
        while True:
            alone = self.members.count <= 1
            if await self._greet_seeds(alone):
                delay_s, again_s = 0.5, REGREET_S_MIN
                await self.overlay.find(self.rpc.me.id)
            elif alone and delay_s > 1 and self._settings.join:
                listed = ", ".join(self._settings.join)
                log.warning("no answer from %s: check --join and the cluster key", listed)
            if alone:
                await asyncio.sleep(delay_s)
                delay_s = min(5.0, delay_s * 1.5)
                continue
            await self._until_alone(again_s * (0.75 + 0.5 * self._rng.random()))
            again_s = min(REGREET_S_MAX, again_s * 2)

    async def _greet_seeds(self, alone: bool) -> bool:
        """True if one of them answered."""
        known = {(m.contact.host, m.contact.port) for m in self.members.all()}
        seeds = await self._seeds()
        if alone:
            chosen = seeds[:SEEDS_GREETED]
        else:  # one is enough: it knows its half of the cluster
            chosen = [seed for seed in seeds if seed not in known][:1]
        return any(await asyncio.gather(*map(self._greet, chosen)))

    async def _until_alone(self, limit_s: float) -> None:
        """Wait until this peer is alone, or until it is time to look for other peers again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.members.count > 1:
                    self._moved.clear()
                    await self._moved.wait()

    async def _settle(self) -> None:
        """A home resumes its work when it knows the other peers, or that there are none."""
        expected = bool(self._settings.join or self.database.read("select 1 from peers limit 1"))
        changed = asyncio.Event()
        self.members.listen(lambda old, new: changed.set())
        if expected and self.members.count <= 1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S_MAX):
                    await changed.wait()
        if expected and self.enactment.keeping.replicas:
            await asyncio.sleep(SETTLE_S)  # the first answer brings the list of all peers
        self.enactment.settle()

    async def _seeds(self) -> list[tuple[str, int]]:
        loop = asyncio.get_running_loop()
        addresses: dict[tuple[str, int], None] = {}  # in order
        for seed in self._settings.join:
            host, _, port = seed.rpartition(":")
            try:
                rows = await loop.getaddrinfo(host, int(port), family=socket.AF_INET)
            except OSError as error:
                log.info("can't resolve %s yet: %s", host, error.strerror or error)
                continue
            for row in rows:
                addresses[(str(row[4][0]), int(row[4][1]))] = None
        for (body,) in self.database.read("select member from peers limit ?", (SEEDS_MAX,)):
            host, remembered = msgpack.unpackb(body)
            addresses[(host, remembered)] = None
        addresses.pop((self.rpc.me.host, self.rpc.me.port), None)
        seeds = list(addresses)
        self._rng.shuffle(seeds)
        return seeds

    async def _greet(self, address: tuple[str, int]) -> bool:
        seed = Contact(id=NOBODY, host=address[0], port=address[1])
        hello = Hello(member=self.members.me, overlay=self._config.overlay)
        try:
            answer = await self.rpc.call(seed, hello, Welcome, HELLO_TIMEOUT_S)
        except Refused as error:
            log.error("the peer at %s:%d refused this peer: %s", *address, error)
            return False
        except CallFailed:
            return False
        self.members.apply(answer.member, self._now())
        self.overlay.saw(answer.member.contact)
        await self.liveness.sync(answer.member.contact)
        return True

    def _hello(self, sender: Contact, message: Hello) -> Welcome:
        overlay = self._config.overlay
        if message.overlay != overlay:
            text = f"this cluster runs with `--overlay {overlay}`, and yours is {message.overlay}"
            raise Refused("overlay", f"{text}; all peers need the same")
        self.members.apply(message.member, self._now())
        return Welcome(member=self.members.me)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._moved.set()
        was_alive = old is not None and old.state <= State.SUSPECT
        if new.state >= State.DEAD:
            self.overlay.gone(new.contact.id)
            self.rpc.gone(new.contact.id)
            if was_alive:
                verb = "has left" if new.state == State.LEFT else "has died"
                log.info("peer %s %s", new.contact.id.hex()[:8], verb)
        elif new.state == State.ALIVE:
            self.overlay.saw(new.contact)
            if not was_alive:
                self.records.joined(new.contact)

    async def _preload(self) -> None:
        """Load modules that strategies need late, as loading takes long."""
        rows = [row for s in self.enactment.services.values() for row in s.preloads()]
        await asyncio.gather(*(self._load(event, load) for event, load in rows))
        await asyncio.Event().wait()

    @staticmethod
    async def _load(needed: asyncio.Event, load: Callable[[], None]) -> None:
        await needed.wait()
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
                log.error("old workflows and files can't be removed, trying again later: %s", error)
                continue
            if forgotten or dropped:
                log.info("retention: removed %d workflows and %d files", forgotten, dropped)

    async def _remember_peers(self) -> None:
        """Save addresses to join again at the next start, in case the seeds are gone by then."""
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
        """Stop accepting work, finish or hand back attempts, and tell the other peers."""
        active = len(self.enactment.home.active())
        alone = self.members.count == 1
        where = "when this peer is back" if alone else "at other peers"
        log.info("leaving%s", f"; {active} workflows continue {where}" * bool(active))
        await self.enactment.leave(self._grace_s)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(self.records.hand_on(), self.liveness.leave())
        except TimeoutError:
            log.warning("some peers may not know that this peer has left, and will detect it")

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
        add("home", "Workflows managed by this peer", lambda: dict(self.enactment.home.counts))
        add(
            "executor",
            "Attempts that this peer ran",
            lambda: {**self.enactment.executor.counts, "spawned": self.processes.spawned},
        )
        transfer = self.transfer
        add(
            "transfer",
            "Bytes moved between peers, corrupt chunks",
            lambda: dict(transfer.counts + transfer.swarm.counts),
        )
        add(
            "cache",
            "Files evicted, and results released",
            lambda: dict(self.blobs.cache.counts + self.enactment.retention.counts),
        )
        add("http", "HTTP answers by status", lambda: dict(self.http.counts))
        add(
            "disk",
            "Writes and syncs of the database",
            lambda: {
                "syncs": self.database.syncs,
                "writes": self.database.writes,
            },
        )
        add(
            "keeping",
            "Workflow journals and their replicas",
            lambda: dict(self.enactment.keeping.counts),
        )
        for service in self.enactment.services.values():
            for metric in service.metrics():
                add(metric.name, metric.help, metric.counts)
        add("relay", "Tasks exchanged with a task queue", lambda: dict(self.enactment.relay.counts))
        add("restarts", "Parts of this peer restarted after errors", lambda: dict(self.restarts))
        add("process", "CPU seconds and context switches of this process", _process)
        show("members", "Peers known, by state", self._members_by_state)
        show(
            "capacity",
            "Free and used capacity of this peer",
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
        counts: dict[str, float] = dict.fromkeys((s.name.lower() for s in State), 0)
        for member in self.members.all():
            counts[State(member.state).name.lower()] += 1
        return counts

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
    """An address that others can use, in place of one that means "all of this machine's".

    It is the address from which this machine would send to a seed, or else to any host: connecting
    a datagram socket asks the routing table and sends nothing.
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
