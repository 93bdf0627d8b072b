"""An in-memory network with faults, all drawn from one seed: a run is its seed.

Latency, loss, duplication and therefore reordering; peers and islands that are cut off; links that
are cut in one direction or clogged. Bytes go in and bytes come out, as in a real network: codec and
calls run unchanged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from valence.protocols.config import LAN, Config
from valence.protocols.membership.liveness import Liveness
from valence.protocols.membership.members import Members
from valence.protocols.overlay.overlays import MADE_BY
from valence.protocols.records import Records
from valence.protocols.wire.messages import Capacity, Contact, Hello, Member, Traits, Welcome
from valence.protocols.wire.rpc import CallFailed, Rpc

from .calls import ObservedRpc
from .loop import NOBODY, Life


@dataclass(slots=True)
class Faults:
    latency_s: float = 0.002
    jitter_s: float = 0.002
    loss: float = 0.0
    duplication: float = 0.0
    straggling: float = 0.0  # share of the messages that are late
    straggling_s: float = 2.0  # by up to this much


class Network:
    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.sent = 0
        self.cut: set[bytes] = set()  # peers: nothing goes to or from them
        self.cut_links: set[tuple[bytes, bytes]] = (
            set()
        )  # nothing goes from the first to the second
        self.island: set[bytes] = set()  # peers cut off from all others, not from each other
        self.clogged: dict[
            tuple[bytes, bytes], float
        ] = {}  # seconds that a message takes longer this way
        self.closed: set[bytes] = set()  # peers whose process has ended; their hosts still answer
        self.muted: set[bytes] = set()  # dead peers whose messages in flight are lost with them
        self._lines: dict[bytes, set[bytes]] = {}
        self._ends: dict[tuple[str, int], SimWire] = {}

    def wire(self, contact: Contact) -> SimWire:
        end = SimWire(self, contact)
        self._ends[(contact.host, contact.port)] = end
        return end

    def carry(self, sender: Contact, to: Contact, payload: bytes) -> None:
        self.sent += 1
        rng, faults = self.rng, self.faults
        copies = 2 if rng.random() < faults.duplication else 1
        for _ in range(copies):
            if rng.random() < faults.loss:
                continue
            delay_s = faults.latency_s + rng.random() * faults.jitter_s
            if rng.random() < faults.straggling:
                delay_s += rng.random() * faults.straggling_s
            if self.clogged:
                end = self._ends.get((to.host, to.port))
                if end is not None:
                    delay_s += self.clogged.get((sender.id, end.contact.id), 0.0)
            loop = asyncio.get_running_loop()
            address = (to.host, to.port)
            loop.call_later(delay_s, self._arrive, sender, address, payload, context=NOBODY)

    def forget(self, contact: Contact) -> None:
        del self._ends[contact.host, contact.port]
        self._lines.pop(contact.id, None)

    async def knock(self, sender: Contact, to: Contact) -> bool:
        faults, way = self.faults, (sender.id, to.id)
        await asyncio.sleep(2 * faults.latency_s + self.clogged.get(way, 0.0))
        lost = self.rng.random() < 2 * faults.loss
        return to.id in self.closed and not lost and self._way(*way) and self._way(to.id, sender.id)

    def line(self, a: bytes, b: bytes) -> None:
        for end, other in ((a, b), (b, a)):
            self._lines.setdefault(end, set()).add(other)

    def close(self, peer: bytes) -> None:
        """Its process ends: its host tells all peers that have a stream to it, or knock."""
        self.closed.add(peer)
        others = sorted(self._lines.pop(peer, ()))
        ends = {end.contact.id: end for end in self._ends.values()}
        for other in others:
            if other not in ends:
                continue  # that peer is long gone
            self._lines[other].discard(peer)
            loop = asyncio.get_running_loop()
            loop.call_later(self.faults.latency_s, self._broke, peer, ends[other], context=NOBODY)

    def _broke(self, peer: bytes, end: SimWire) -> None:
        if self._way(peer, end.contact.id):
            self._deliver(end, end.on_broken, peer)

    def _way(self, sender: bytes, to: bytes) -> bool:
        if sender in self.cut or to in self.cut or (sender, to) in self.cut_links:
            return False
        if sender in self.muted:
            return False
        return (sender in self.island) == (to in self.island)

    def _arrive(self, sender: Contact, address: tuple[str, int], payload: bytes) -> None:
        end = self._ends.get(address)
        if end is None or end.rpc is None:
            return
        if not self._way(sender.id, end.contact.id):
            return
        self._deliver(end, end.rpc.received, sender, payload)

    def _deliver(self, end: SimWire, what: Callable[..., None], *arguments: object) -> None:
        life = end.life
        if life is None:
            what(*arguments)
        elif life.stopped:  # keep it until the peer resumes
            loop = asyncio.get_running_loop()
            loop.call_soon(what, *arguments, context=life.context)
        elif not life.dead:
            life.context.run(what, *arguments)


class SimWire:
    def __init__(self, network: Network, contact: Contact) -> None:
        self.contact = contact
        self.rpc: Rpc | None = None
        self.life: Life | None = None
        self.on_broken: Callable[[bytes], None] = lambda peer: None
        self._network = network

    def send(self, to: Contact, payload: bytes) -> None:
        self._network.carry(self.contact, to, payload)

    async def knock(self, to: Contact) -> bool:
        return await self._network.knock(self.contact, to)

    def line(self, to: Contact) -> None:
        self._network.line(self.contact.id, to.id)


class SimPeer:
    """The substrate of one peer: calls, members, failure detection, overlay, records."""

    def __init__(
        self,
        network: Network,
        index: int,
        config: Config = LAN,
        capacity: Capacity | None = None,
        traits: Traits | None = None,
        boot: int = 1,
        life: Life | None = None,
    ) -> None:
        rng = random.Random(network.rng.getrandbits(64))
        peer_id = random.Random(f"peer {index}").randbytes(20)
        self.contact = Contact(id=peer_id, host=f"10.0.{index // 250}.{index % 250}", port=7000)
        wire = network.wire(self.contact)
        self.network = network
        self.config = config
        self.rng = rng
        self.rpc = ObservedRpc(self.contact, wire, rng, config)
        wire.rpc = self.rpc
        wire.life = life
        self.capacity = capacity or Capacity(millicores=2000, memory_bytes=2**30)
        self.traits = traits or Traits(arch="x86_64", os="linux", site="here")
        member = Member(
            contact=self.contact,
            http=f"http://{self.contact.host}",
            capacity=self.capacity,
            traits=self.traits,
            boot=boot,
        )
        self.members = Members(member, config)
        self.overlay = MADE_BY[config.overlay](self.rpc, rng, config)
        self.overlay.is_alive = self.members.is_alive
        self.liveness = Liveness(self.rpc, self.members, rng, config)
        self.records = Records(self.rpc, self.overlay, rng, config)
        self.errors: list[BaseException] = []
        self.rpc.on_error = lambda where, error: self.errors.append(error)
        self.rpc.on_heard = self.overlay.saw
        self.rpc.on_unreachable = self.liveness.suspect
        wire.on_broken = self.liveness.broke
        self.rpc.on(Hello, self._hello)
        self.members.listen(self._changed)
        self._tasks = [
            asyncio.ensure_future(work)
            for work in (
                self.liveness.run(),
                self.liveness.gossip(),
                self.overlay.refresh(),
                self.records.run(),
                self.records.hand_over(),
            )
        ]

    def _hello(self, sender: Contact, message: Hello) -> Welcome:
        self.members.apply(message.member, asyncio.get_running_loop().time())
        return Welcome(member=self.members.me)

    def _changed(self, old: Member | None, new: Member) -> None:
        if new.state >= 2:
            self.overlay.gone(new.contact.id)
        elif new.state == 0:
            self.overlay.saw(new.contact)
            if old is None or old.state >= 2:
                self.records.joined(new.contact)

    async def join(self, other: SimPeer) -> None:
        while True:
            try:
                hello = Hello(member=self.members.me)
                answer = await self.rpc.call(other.contact, hello, Welcome, 1.0)
                break
            except CallFailed:
                await asyncio.sleep(0.1)
        self.members.apply(answer.member, asyncio.get_running_loop().time())
        await self.liveness.sync(other.contact)
        await self.overlay.find(self.contact.id)

    async def crash(self) -> None:
        self.network.cut.add(self.contact.id)
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.liveness.close()
        await self.rpc.close()


async def cluster(network: Network, count: int, config: Config = LAN) -> list[SimPeer]:
    """Peers that have all joined through the first one."""
    peers = [SimPeer(network, index, config) for index in range(count)]
    for peer in peers[1:]:
        await peer.join(peers[0])
    return peers
