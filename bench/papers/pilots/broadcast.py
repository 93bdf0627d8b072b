"""The reach of a broadcast when pilots are dead without anybody knowing, or when messages are lost,
and the number of messages per node."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from sim.loop import run_out
from sim.network import Faults, Network
from valence.protocols.strategies.pilots.config import PilotsConfig
from valence.protocols.strategies.pilots.messages import Line, TaskList
from valence.protocols.strategies.pilots.pilot import HIGH, LOW
from valence.protocols.strategies.pilots.service import PilotsService
from valence.protocols.wire.messages import Message, Needs

from .field import FIELD, Node, nodes


async def _broadcast(count: int, dead: float, loss: float, seed: int) -> dict[str, float]:
    network = Network(seed)
    own = PilotsConfig(round_s=4.0)
    config = FIELD.having(own)
    made = nodes(network, count, config, None, ("site",), seed)
    rng = random.Random(seed)
    gone = rng.sample(made[1:], int(dead * count))
    for node in gone:
        network.cut.add(node.rpc.me.id)
    alive = [node for node in made if node not in gone]
    sent: Counter[bytes] = Counter()
    received: Counter[bytes] = Counter()
    regions: dict[bytes, set[tuple[bytes, bytes]]] = {}
    for node in made:
        _watch(node, sent, received, regions)
    network.faults = Faults(loss=loss)
    leader = alive[0]
    lines = tuple(Line(n, Needs()) for n in range(1, 50))
    message = TaskList.of(
        leader.rpc.me.id, 1, 0, 1, lines, (), LOW, HIGH, (), own.round_s, (), False, ()
    )
    began = asyncio.get_running_loop().time()
    led = await leader.enactment.service(PilotsService).pilot.lead(message)
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(10.0)
    reached = sum(
        node.enactment.service(PilotsService).pilot.counts["rounds"] > 0
        for node in alive
        if node is not leader
    )
    return {
        "pilots": count,
        "reached": reached / (len(alive) - 1),
        "bids": len(led.bids) / len(alive),
        "regions sent to, at most": max(map(len, regions.values()), default=0),
        "lists received, at most": max(received.values(), default=0),
        "seconds": took_s,
        "messages a pilot": sum(sent.values()) / count,
    }


def _watch(
    node: Node,
    sent: Counter[bytes],
    received: Counter[bytes],
    regions: dict[bytes, set[tuple[bytes, bytes]]],
) -> None:
    """Counts each list that a pilot hands over, with its region, and each list that it receives."""
    pilot = node.enactment.service(PilotsService).pilot
    hand = pilot._hand
    me = node.rpc.me.id

    async def handed(round_, delegate, region, message):  # type: ignore[no-untyped-def]
        sent[me] += 1
        regions.setdefault(me, set()).add((region.low, region.high))
        return await hand(round_, delegate, region, message)

    pilot._hand = handed  # type: ignore[method-assign]
    serve = node.rpc._handlers[TaskList]

    def heard(sender, message: Message):  # type: ignore[no-untyped-def]
        received[me] += 1
        return serve(sender, message)

    node.rpc.on(TaskList, heard)


def broadcast(count: int, dead: float = 0.0, loss: float = 0.0, seed: int = 1) -> dict[str, float]:
    random.seed(seed)
    return run_out(_broadcast(count, dead, loss, seed))
