"""Dispatch and outstanding attempts: what a home gives to peers, whatever becomes of messages and
peers, is at one of them, or known to be nowhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from sim.loop import run_out
from sim.network import Faults, Network, SimPeer, cluster
from valence.protocols.consensus.keeping import Deposed
from valence.protocols.engine import dispatch as module
from valence.protocols.engine.dispatch import Dispatch
from valence.protocols.engine.explain import FENCED
from valence.protocols.engine.outstanding import CHECK_S, CHECK_S_MAX, Outstanding
from valence.protocols.strategies.base import Placed, Placement, Unit
from valence.protocols.wire.messages import (
    Abort,
    AttemptKey,
    Capacity,
    Commit,
    Committed,
    Contact,
    Done,
    Inquire,
    Inquired,
    Needs,
    ReturnLeases,
    Work,
)
from valence.protocols.wire.rpc import Refused

RUN: Any = SimpleNamespace(id="w", epoch=7)
CORE = Needs(Capacity(millicores=1000))


def key(number: int) -> AttemptKey:
    return AttemptKey("w", f"t{number}", 1)


class Executing:
    """A peer that notes what it is told, and answers as a test wants."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer
        self.batches: list[list[AttemptKey]] = []
        self.returned: list[int] = []
        self.aborted: list[AttemptKey] = []
        self.refused: tuple[tuple[AttemptKey, str], ...] = ()
        self.inquiries: list[float] = []
        self.state = "running"
        peer.rpc.on(Commit, self._commit)
        peer.rpc.on(ReturnLeases, self._leases_returned)
        peer.rpc.on(Abort, self._abort)
        peer.rpc.on(Inquire, self._inquire)

    @property
    def works(self) -> list[AttemptKey]:
        return [one for batch in self.batches for one in batch]

    def _commit(self, sender: Contact, message: Commit) -> Committed:
        self.batches.append([work.key for work in message.works])
        return Committed(refused=self.refused)

    def _leases_returned(self, sender: Contact, message: ReturnLeases) -> None:
        self.returned += message.leases

    def _abort(self, sender: Contact, message: Abort) -> Done:
        self.aborted += message.keys
        return Done()

    def _inquire(self, sender: Contact, message: Inquire) -> Inquired:
        self.inquiries.append(asyncio.get_running_loop().time())
        assert dict(message.epochs) == {"w": 7}
        return Inquired(states=tuple(self.state for _ in message.keys))


class Scene:
    """A home with its dispatch, and peers that execute."""

    def __init__(self, peers: list[SimPeer]) -> None:
        self.home, *rest = peers
        self.others = [Executing(peer) for peer in rest]
        self.wanted = True
        self.deposed = False
        self.journaled = asyncio.Event()
        self.journaled.set()
        self.refusals: list[tuple[AttemptKey, str]] = []
        self.too_large: list[tuple[list[str], str]] = []
        self.fenced = 0
        self.lost: list[tuple[AttemptKey, str]] = []
        self.pad = b""
        self.outstanding = Outstanding(
            self.home.rpc, self.home.members, lambda workflow: 7, self._lose
        )
        self.outstanding.settled = True
        self.dispatch = Dispatch(
            self.home.rpc, self.outstanding, self._kept, self._make, lambda run, key: self.wanted
        )
        self.dispatch.on_refused = self.refusals.extend
        self.dispatch.on_too_large = lambda run, tasks, why: self.too_large.append((tasks, why))
        self.dispatch.on_fenced = self._fenced
        self.unmakeable: set[AttemptKey] = set()

    def _lose(self, lost: list[tuple[AttemptKey, str]]) -> None:
        self.lost += lost
        self.outstanding.drop_anywhere([one for one, _ in lost])

    def _fenced(self, run: Any) -> None:
        self.fenced += 1

    async def _kept(self, workflow: str) -> None:
        await self.journaled.wait()
        if self.deposed:
            raise Deposed("another peer is its home")

    def _make(self, run: Any, one: Placed) -> Work | None:
        if one.unit.key in self.unmakeable:
            return None
        return Work(one.unit.key, one.lease, CORE, command=("x", self.pad.decode()))

    def rows(self, peer: Executing, numbers: Iterable[int]) -> list[Placed]:
        made = []
        for number in numbers:
            unit = Unit(key(number), CORE)
            made.append(Placed(unit, peer.peer.contact, number, Placement("probe")))
            self.outstanding.add(peer.peer.contact.id, unit.key)
            self.outstanding.on_the_way.add(unit.key)
        return made


async def scene(count: int = 3, faults: Faults | None = None) -> Scene:
    return Scene(await cluster(Network(1, faults), count))


def test_nothing_leaves_before_the_journal_has_it_and_nothing_at_all_if_it_never_does() -> None:
    async def scenario() -> None:
        stage = await scene()
        stage.journaled.clear()
        [peer, _] = stage.others
        sending = asyncio.ensure_future(stage.dispatch.away(RUN, stage.rows(peer, [1, 2])))
        await asyncio.sleep(5.0)
        assert not peer.works
        assert stage.outstanding.on_the_way == {key(1), key(2)}
        stage.deposed = True
        stage.journaled.set()
        await sending
        await asyncio.sleep(1.0)
        assert not peer.works
        assert sorted(peer.returned) == [1, 2], "its leases are given back"
        assert not stage.outstanding.on_the_way

    run_out(scenario())


def test_a_lease_whose_work_is_not_wanted_any_more_is_given_back() -> None:
    async def scenario() -> None:
        stage = await scene()
        [peer, _] = stage.others
        stage.unmakeable = {key(1)}
        await stage.dispatch.away(RUN, stage.rows(peer, [1, 2]))
        await asyncio.sleep(1.0)
        assert (peer.returned, peer.works) == ([1], [key(2)])

    run_out(scenario())


def test_work_travels_in_batches_that_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_WORKS_MAX", 10)
    monkeypatch.setattr(module, "COMMIT_BYTES_MAX", 4000)

    async def scenario() -> None:
        stage = await scene()
        peer, other = stage.others
        rows = stage.rows(peer, range(25)) + stage.rows(other, range(25, 30))
        await stage.dispatch.away(RUN, rows)
        assert [len(batch) for batch in peer.batches] == [10, 10, 5]
        assert [len(batch) for batch in other.batches] == [5]
        stage.pad = b"x" * 1500
        peer.batches.clear()
        await stage.dispatch.away(RUN, stage.rows(peer, range(30, 35)))
        assert [len(batch) for batch in peer.batches] == [2, 2, 1]
        assert peer.works == [key(n) for n in range(30, 35)]

    run_out(scenario())


def test_a_refusal_is_told_with_its_reason_and_a_newer_home_fences_this_one() -> None:
    async def scenario() -> None:
        stage = await scene()
        peer, other = stage.others
        peer.refused = ((key(1), "its lease has expired"),)
        await stage.dispatch.away(RUN, stage.rows(peer, [1, 2]))
        [(refused, why)] = stage.refusals
        assert refused == key(1)
        assert "its lease has expired" in why
        assert not stage.fenced
        other.refused = ((key(3), FENCED),)
        await stage.dispatch.away(RUN, stage.rows(other, [3]))
        assert stage.fenced == 1

    run_out(scenario())


def test_work_that_is_too_large_to_be_sent_is_told_as_that() -> None:
    async def scenario() -> None:
        stage = await scene()
        [peer, _] = stage.others

        def refuse(sender: Contact, message: Commit) -> Committed:
            raise Refused("size", "600 of 500 KiB")

        peer.peer.rpc.on(Commit, refuse)
        await stage.dispatch.away(RUN, stage.rows(peer, [1]))
        [(tasks, why)] = stage.too_large
        assert tasks == ["t1"]
        assert "600 of 500 KiB" in why

    run_out(scenario())


def test_work_that_was_cancelled_on_its_way_is_ended_where_it_arrived() -> None:
    async def scenario() -> None:
        stage = await scene()
        [peer, _] = stage.others
        stage.wanted = False
        await stage.dispatch.away(RUN, stage.rows(peer, [1, 2]))
        assert peer.aborted == [key(1), key(2)]
        assert not len(stage.outstanding)

    run_out(scenario())


def test_a_home_that_runs_work_itself_sends_no_message() -> None:
    async def scenario() -> None:
        stage = await scene(1)
        seen: list[list[AttemptKey]] = []

        def commit(sender: Contact, message: Commit) -> Committed:
            seen.append([work.key for work in message.works])
            return Committed()

        stage.home.rpc.on(Commit, commit)
        before = stage.home.network.sent
        here = Executing.__new__(Executing)
        here.peer = stage.home
        stage.dispatch.here(RUN, stage.rows(here, [1, 2]))
        assert seen == [[key(1), key(2)]]
        assert stage.home.network.sent == before

    run_out(scenario())


def test_doubt_about_a_commit_without_an_answer_ends_in_one_place() -> None:
    """The commit may have arrived or not: the peer is asked at once, not in its turn."""

    async def scenario() -> None:
        stage = await scene()
        [peer, _] = stage.others
        watching = asyncio.ensure_future(stage.outstanding.watch())
        way = (peer.peer.contact.id, stage.home.contact.id)
        stage.home.network.cut_links.add(way)  # what it answers is lost
        start = asyncio.get_running_loop().time()
        sending = asyncio.ensure_future(stage.dispatch.away(RUN, stage.rows(peer, [1])))
        await asyncio.sleep(1.0)
        assert peer.works == [key(1)]
        stage.home.network.cut_links.clear()
        await sending
        peer.state = "unknown"  # say it had died and come back
        stage.outstanding.doubt(peer.peer.contact.id)
        while not stage.lost:
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - start < CHECK_S + 2
        [(lost, why)] = stage.lost
        assert lost == key(1)
        assert "does not know this attempt" in why
        assert not len(stage.outstanding)
        watching.cancel()

    run_out(scenario())


def test_peers_are_asked_less_and_less_often_while_nothing_is_wrong() -> None:
    async def scenario() -> None:
        stage = await scene()
        [peer, _] = stage.others
        watching = asyncio.ensure_future(stage.outstanding.watch())
        await stage.dispatch.away(RUN, stage.rows(peer, [1]))
        await asyncio.sleep(200.0)
        gaps = [b - a for a, b in itertools.pairwise(peer.inquiries)]
        assert peer.inquiries[0] < CHECK_S + 3
        assert gaps == sorted(gaps) or gaps[-1] >= CHECK_S_MAX
        assert max(gaps) < CHECK_S_MAX + 3
        assert not stage.lost
        watching.cancel()

    run_out(scenario())


def test_a_dead_peers_attempts_are_lost_and_an_unknown_one_is_not_dead_yet() -> None:
    async def scenario() -> None:
        stage = await scene()
        peer, other = stage.others
        stage.outstanding.settled = False
        stage.outstanding.add(b"s" * 20, key(9))  # of before this home was started
        watching = asyncio.ensure_future(stage.outstanding.watch())
        await stage.dispatch.away(RUN, stage.rows(peer, [1]))
        await asyncio.sleep(20.0)
        assert not stage.lost, "the others may not be known yet"
        stage.outstanding.settled = True
        await peer.peer.crash()
        await asyncio.sleep(60.0)
        assert {one for one, _ in stage.lost} == {key(1), key(9)}
        assert all("is gone" in why for _, why in stage.lost)
        assert not other.inquiries
        watching.cancel()

    run_out(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_with_losses_every_attempt_is_at_its_peer_or_known_to_be_lost(seed: int) -> None:
    async def scenario() -> None:
        faults = Faults(loss=0.3, duplication=0.1, straggling=0.1)
        stage = Scene(await cluster(Network(seed), 4))
        stage.home.network.faults = faults
        watching = asyncio.ensure_future(stage.outstanding.watch())
        for peer in stage.others:

            def inquire(sender: Contact, message: Inquire, peer: Executing = peer) -> Inquired:
                known = set(peer.works)
                return Inquired(states=tuple(
                    "running" if one in known else "unknown" for one in message.keys
                ))  # fmt: skip

            peer.peer.rpc.on(Inquire, inquire)
        rows = [
            row for n, peer in enumerate(stage.others)
            for row in stage.rows(peer, range(100 * n, 100 * n + 20))
        ]  # fmt: skip
        await stage.dispatch.away(RUN, rows)
        await asyncio.sleep(120.0)
        stage.home.network.faults = Faults()
        await asyncio.sleep(60.0)
        at_peers = [one for peer in stage.others for one in peer.works]
        assert len(at_peers) == len(set(at_peers)), "a commit runs once, however often it comes"
        lost = {one for one, _ in stage.lost}
        assert {row.unit.key for row in rows} <= set(at_peers) | lost
        watching.cancel()

    run_out(scenario())
