"""Votes, over the wire: what one keeper answers to a peer that asks to be a workflow's home.

Each test has one rule of `consensus/election` or `consensus/replica`; whole elections, with faults,
are in the simulator (`tests/test_sim.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sim.host import Host
from sim.loop import run_out
from sim.mutants import applied
from sim.world import Plan, World
from valence.protocols.consensus.replica import Replica, forced_epoch, next_epoch
from valence.protocols.wire.entries import HomeElected
from valence.protocols.wire.messages import (
    Candidacy,
    Elect,
    Elected,
    Entry,
    Keep,
    Kept,
    NotHome,
    Slice,
    StillHome,
    Vote,
)

W = "w1"
OTHER = b"o" * 20  # a keeper that is in no test


class Council:
    """Two peers, and a copy of one journal at the second; the first one asks for its vote."""

    def __init__(self, world: World, candidate: Host, voter: Host) -> None:
        self.world, self.candidate, self.voter = world, candidate, voter
        self.epoch = next_epoch(0, OTHER)
        self.copy = Replica(
            W, promised=self.epoch, count=4, starts=[(0, self.epoch)], whole_at_count=2
        )
        self.copy.configs = [(0, (candidate.id, voter.id, OTHER))]
        voter.enactment.keeping.replicas[W] = self.copy

    def above(self, epoch: int) -> int:
        return next_epoch(epoch, self.candidate.id)

    async def asks(
        self, epoch: int = 0, entries: int = 4, last: int = 0, trial: bool = False, birth: int = 0
    ) -> Vote:
        asked = Candidacy(
            W, epoch or self.above(self.copy.promised), entries, last or self.epoch, trial,
            birth or self.epoch,
        )  # fmt: skip
        rpc, to = self.candidate.peer.rpc, self.voter.peer.contact
        answer = await rpc.call(to, Elect(candidacies=(asked,)), Elected)
        return answer.votes[0]

    def on_disk(self) -> int:
        """What the voter's disk says of its promise."""
        rows = self.voter.database.read("select promised from copies where workflow = ?", (W,))
        return int(rows[0][0]) if rows else 0


def council(scenario: Callable[[Council], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(Plan(5, peers=2, faults=()))
        hosts = [world.add_host(), world.add_host()]
        while any(host.peer.members.count < 2 for host in hosts):
            await asyncio.sleep(0.1)
        await scenario(Council(world, *hosts))

    run_out(run())


def test_a_copy_that_is_as_long_gets_the_vote_and_the_promise_is_on_disk_first() -> None:
    async def scenario(c: Council) -> None:
        epoch = c.above(c.copy.promised)
        vote = await c.asks(epoch)
        assert vote.granted
        assert vote.epoch == epoch
        assert c.copy.promised == c.on_disk() == epoch

    council(scenario)


def test_a_trial_promises_nothing() -> None:
    async def scenario(c: Council) -> None:
        before = c.copy.promised
        assert (await c.asks(trial=True)).granted
        assert c.copy.promised == before
        assert c.on_disk() == 0

    council(scenario)


def test_one_promise_is_kept_no_second_vote_in_one_epoch_nor_below() -> None:
    async def scenario(c: Council) -> None:
        epoch = c.above(c.copy.promised)
        assert (await c.asks(epoch)).granted
        again = await c.asks(epoch)
        assert not again.granted
        assert again.epoch == epoch
        assert not (await c.asks(c.epoch)).granted

    council(scenario)


def test_a_copy_that_is_behind_gets_no_vote() -> None:
    async def scenario(c: Council) -> None:
        shorter = await c.asks(entries=3)
        assert not shorter.granted
        older_epoch = await c.asks(entries=9, last=c.epoch - (1 << 32))
        assert not older_epoch.granted, "a longer log of an older epoch is behind a newer one"
        assert (await c.asks(entries=5)).granted

    council(scenario)


def test_what_a_voter_once_had_still_counts_after_it_gave_its_copy_up() -> None:
    async def scenario(c: Council) -> None:
        c.copy.floor = (c.epoch, 6)
        assert not (await c.asks(entries=5)).granted
        assert (await c.asks(entries=6)).granted

    council(scenario)


def test_nobody_votes_against_a_home_that_is_there() -> None:
    async def scenario(c: Council) -> None:
        third = c.world.add_host()
        members = c.voter.peer.members
        while not members.is_here(third.id):
            await asyncio.sleep(0.1)
        c.copy.home = third.id
        c.voter.enactment.elections.closed = True  # it does not stand itself
        refused = await c.asks()
        assert not refused.granted
        assert refused.home == third.id
        third.kill()
        while members.is_here(third.id):
            await asyncio.sleep(0.1)
        assert (await c.asks()).granted

    council(scenario)


def test_a_leader_keeps_its_office_against_who_merely_asks() -> None:
    async def scenario(c: Council) -> None:
        c.voter.enactment.keeping.lead(W, c.epoch)
        assert not (await c.asks()).granted

    council(scenario)


def test_a_peer_that_is_no_keeper_any_more_is_told_so() -> None:
    async def scenario(c: Council) -> None:
        c.copy.configs = [(0, (c.voter.id, OTHER))]
        c.copy.committed = c.copy.count
        vote = await c.asks()
        assert not vote.granted
        assert vote.outsider

    council(scenario)


def test_nobody_is_voted_for_in_an_era_that_its_log_is_not_in() -> None:
    async def scenario(c: Council) -> None:
        forced = forced_epoch(c.epoch, OTHER)
        assert forced is not None
        beyond = c.above(forced)  # a second epoch of the era that a forced home would have begun
        assert not (await c.asks(beyond)).granted
        with applied("homes-lead-in-eras-that-their-log-is-not-in"):
            assert (await c.asks(beyond, trial=True)).granted
        c.copy.starts.append((3, forced))
        assert (await c.asks(beyond, last=forced)).granted

    council(scenario)


def test_another_workflow_of_the_same_name_gets_no_vote_by_its_length() -> None:
    async def scenario(c: Council) -> None:
        assert not (await c.asks(entries=50, birth=c.epoch + 1)).granted
        assert (await c.asks(entries=50)).granted

    council(scenario)


def test_who_is_asked_whether_it_still_is_home_says_no_if_it_leads_nothing() -> None:
    async def scenario(c: Council) -> None:
        rpc, to = c.candidate.peer.rpc, c.voter.peer.contact
        c.voter.enactment.keeping.lead(W, c.epoch)
        answer = await rpc.call(to, StillHome(workflows=(W, "w2")), NotHome)
        assert answer.workflows == ("w2",)

    council(scenario)


def test_a_copy_that_catches_up_belongs_to_its_homes_line() -> None:
    """It has promised an era that it has no entry of yet. Only if its home is gone may that be all
    that is left of the era: then it asks whether there is another line."""

    async def scenario(c: Council) -> None:
        lines = c.voter.enactment.lines
        forced = forced_epoch(c.epoch, c.candidate.id)
        assert forced is not None
        c.copy.promised, c.copy.home = forced, c.candidate.id
        assert not lines._may_have_two(W, c.copy)
        with applied("who-catches-up-in-a-forced-era-is-cut-off"):
            assert lines._may_have_two(W, c.copy)
        c.copy.home = OTHER
        assert lines._may_have_two(W, c.copy)

    council(scenario)


def test_an_end_that_may_be_agreed_on_makes_way_for_no_later_era() -> None:
    async def scenario(c: Council) -> None:
        home = c.candidate.peer.contact
        c.copy.ended_at_count, c.copy.committed = (
            4,
            3,
        )  # it has an end, and does not know of whom else
        assert c.copy.may_be_over
        forced = forced_epoch(c.epoch, home.id)
        assert forced is not None
        other = Entry(3, forced, 0.0, "home", HomeElected(home=home.id, epoch=9, why="").packed())
        piece = Slice(W, forced, 3, c.epoch, 3, (other,))
        answer = await c.candidate.peer.rpc.call(c.voter.peer.contact, Keep.of((piece,)), Kept)
        assert answer.stored[0].refusal
        assert c.copy.count == 4
        c.copy.outrun = True  # a majority of its keepers has gone to a later era without it
        answer = await c.candidate.peer.rpc.call(c.voter.peer.contact, Keep.of((piece,)), Kept)
        assert not answer.stored[0].refusal
        assert c.copy.last_epoch == forced

    council(scenario)
