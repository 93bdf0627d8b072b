"""Mutants: rules that are broken on purpose. A broken rule that no run notices is not tested.

Every mutant replaces running code of one process, for as long as it is applied. This is the only
file of the simulator that touches private parts of the product.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import valence.protocols.capacity.calendar
import valence.protocols.consensus.election
import valence.protocols.consensus.lines
import valence.protocols.consensus.replica
import valence.protocols.engine.decisions
import valence.protocols.engine.judge
import valence.protocols.strategies.deadline.summary
import valence.workflow.sequences
from valence.peer.journal_storage import SqliteJournalStorage
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.bookings import Bookings
from valence.protocols.capacity.calendar import Profile
from valence.protocols.consensus.archive import Archive
from valence.protocols.consensus.election import Elections
from valence.protocols.consensus.keeping import Keeping
from valence.protocols.consensus.lines import History, Lines
from valence.protocols.consensus.membership_change import MembershipChange
from valence.protocols.consensus.placement import new_id
from valence.protocols.consensus.replica import Replica, forced
from valence.protocols.engine.answers import Answers, ApiError, _Document
from valence.protocols.engine.decisions import Decision
from valence.protocols.engine.executor import Executor
from valence.protocols.engine.gangs import Mending
from valence.protocols.engine.gateway import Gateway
from valence.protocols.engine.home import Home
from valence.protocols.engine.journal import Journal
from valence.protocols.engine.planning import NotPromised, Planning
from valence.protocols.engine.promises import Promises
from valence.protocols.engine.reception import Reception
from valence.protocols.engine.run import FINAL, Run
from valence.protocols.membership.members import State
from valence.protocols.strategies.deadline.branch import Branch
from valence.protocols.strategies.deadline.provider import Provider
from valence.protocols.tasks import Tasks
from valence.protocols.wire.entries import InputsStaged, PromiseEnded
from valence.protocols.wire.messages import Elected
from valence.protocols.wire.rpc import Rpc

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


#: mutant → a part of the violation that must report it; any violation will do for the others
EXPECTED: dict[str, str] = {}

#: mutant → settings of the runs in which it shows
WORLDS: dict[str, dict[str, Any]] = {}

#: mutant → the test that sees it. Random worlds come to such a moment in one of thousands.
SEEN_BY: dict[str, str] = {}

Make = Callable[[], list[Patch]]


def mutant(make: Make) -> Make:
    MUTANTS[make.__name__.replace("_", "-")] = make
    return make


def where(**world: Any) -> Callable[[Make], Make]:
    def known(make: Make) -> Make:
        WORLDS[make.__name__.replace("_", "-")] = world
        return make

    return known


def shows(text: str) -> Callable[[Make], Make]:
    def known(make: Make) -> Make:
        EXPECTED[make.__name__.replace("_", "-")] = text
        return make

    return known


def seen_by(test: str) -> Callable[[Make], Make]:
    def known(make: Make) -> Make:
        SEEN_BY[make.__name__.replace("_", "-")] = test
        return make

    return known


@contextmanager
def applied(name: str) -> Iterator[None]:
    patches = MUTANTS[name]() if name else []
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


@mutant
def one_copy_is_a_majority() -> list[Patch]:
    def one(count: int) -> int:
        return 1

    return [
        (valence.protocols.consensus.replica, "majority", one),
        (valence.protocols.consensus.election, "majority", one),
    ]


@mutant
def keepers_follow_lower_epochs() -> list[Patch]:
    take = Keeping._take

    def lax(self: Any, home: bytes, received: Any, writes: Any) -> Any:
        replica = self.replicas.get(received.workflow)
        if replica is not None and received.workflow not in self.leads:
            replica.promised = min(replica.promised, received.epoch)
        return take(self, home, received, writes)

    return [(Keeping, "_take", lax)]


@mutant
def votes_are_not_written_down() -> list[Patch]:
    async def elect(self: Any, sender: Any, message: Any) -> Any:
        votes = [self._vote(sender.id, asked, []) for asked in message.candidacies]
        for vote in votes:
            replica = self._keeping.replicas.get(vote.workflow)
            if vote.granted and replica is not None:  # nor remembered
                replica.promised = min(replica.promised, max(1, replica.last_epoch))
        return Elected(votes=tuple(votes))

    return [(Elections, "_elect", elect)]


@mutant
def keepers_answer_before_their_disk_has_it() -> list[Patch]:
    keep = Keeping._keep

    class Hasty:
        def __init__(self, storage: Any) -> None:
            self._storage = storage

        def __getattr__(self, name: str) -> Any:
            return getattr(self._storage, name)

        def write(self, writes: Any, soon: bool = False) -> Any:
            self._storage.write(writes, soon)
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

    async def hasty(self: Any, sender: Any, message: Any) -> Any:
        storage, self.storage = self.storage, Hasty(self.storage)
        try:
            return await keep(self, sender, message)
        finally:
            self.storage = storage

    return [(Keeping, "_keep", hasty)]


@mutant
def a_home_counts_itself_before_its_disk_has_it() -> list[Patch]:
    sync = Keeping._sync

    def hasty(self: Any, replica: Any, lead: Any, done: Any) -> None:
        sync(self, replica, lead, done)
        lead.synced = replica.count

    return [(Keeping, "_sync", hasty)]


@mutant
def copies_that_are_behind_get_votes() -> list[Patch]:
    def lax(self: Any, asked: Any) -> str:
        return "" if asked.epoch > self.promised else "promised already"

    return [(Replica, "why_not", lax)]


@mutant
def keepers_are_swapped_at_once() -> list[Patch]:
    def swap(self: Any, replica: Any) -> tuple[bytes, ...]:
        keepers, me = replica.keepers, self._keeping.rpc.me.id
        here = self._keeping.members.here()
        alive = {me: None, **{m.contact.id: None for m in here if m.state == State.ALIVE}}
        left = [keeper for keeper in keepers if keeper in alive]
        free = [peer for peer in alive if peer not in keepers]
        return (*left, *free[: len(keepers) - len(left)]) if free else keepers

    def tend(self: Any, replica: Any, lead: Any) -> None:
        keepers = swap(self, replica)
        if keepers != replica.keepers:
            self._keeping.changes(replica.workflow, keepers)

    return [(MembershipChange, "_tend", tend)]


@mutant
def what_was_given_up_leaves_no_promise() -> list[Patch]:
    statements = SqliteJournalStorage._statements

    def forgetful(self: Any, one: Any) -> Any:
        rows = statements(self, one)
        if one.forget:
            rows.append(("delete from copies where workflow = ?", (one.workflow,)))
        return rows

    return [(SqliteJournalStorage, "_statements", forgetful)]


@mutant
def a_home_begins_before_its_keepers_know() -> list[Patch]:
    take_office = Elections._take_office

    def hasty(self: Any, workflow: str, epoch: int, *more: Any) -> None:
        take_office(self, workflow, epoch, *more)
        replica = self._keeping.replicas[workflow]
        replica.committed = max(replica.committed, replica.count - 1)
        self._on_home(workflow)

    return [(Elections, "_take_office", hasty), (Elections, "_in_office", lambda *_: None)]


@mutant
def submissions_are_acknowledged_early() -> list[Patch]:
    return [(Journal, "kept", _unless("_create"))]


@mutant
def work_is_given_away_before_that_counts() -> list[Patch]:
    return [(Journal, "kept", _unless("away"))]


def _unless(caller: str) -> Any:
    kept = Journal.kept

    async def hasty(self: Any, workflow: str) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            await kept(self, workflow)

    return hasty


@mutant
def outcomes_are_acknowledged_early() -> list[Patch]:
    async def hasty(self: Any, workflow: str) -> bool:
        return True

    return [(Reception, "is_committed", hasty)]


@mutant
def results_are_used_before_they_count() -> list[Patch]:
    apply = Run.apply

    def hasty(self: Any, entry: Any, at: float, epoch: int) -> None:
        apply(self, entry, at, epoch)
        committed(self, entry)

    committed = Run.committed
    take = Decision.take

    def go_on(self: Any, peer: bytes, outcomes: Any) -> None:
        take(self, peer, outcomes)
        self.place_ready()

    return [
        (Run, "apply", hasty),
        (Run, "committed", lambda *_: None),
        (Decision, "take", go_on),
    ]


@mutant
def a_second_result_counts_too() -> list[Patch]:
    return [(valence.protocols.engine.judge, "FINAL", frozenset())]


@mutant
def outcomes_of_no_attempt_count() -> list[Patch]:
    take = Decision.take

    def lax(self: Any, peer: bytes, outcomes: Any) -> None:
        for ended in outcomes:
            attempt = self.run.tasks[ended.key.task].attempt(ended.key.number)
            if attempt is not None:
                attempt.peer, attempt.epoch = peer, ended.epoch
        take(self, peer, outcomes)

    return [(Decision, "take", lax)]


@mutant
def ended_journals_are_left_alone() -> list[Patch]:
    async def idle(self: Any) -> None:
        pass

    return [(Archive, "_look", idle)]


@mutant
def leases_never_expire() -> list[Patch]:
    return [(Admission, "expire", lambda self, now: None)]


@mutant
def calls_are_carried_out_again() -> list[Patch]:
    def forgetful(self: Any, sender: Any, call_id: int, message: Any) -> None:
        self._start(sender, call_id, message)

    return [(Rpc, "_request", forgetful)]


@mutant
def any_lease_is_good_enough() -> list[Patch]:
    commit = Admission.commit

    def lax(self: Any, home: bytes, lease_id: int, unit: Any, *more: Any) -> str:
        answer = commit(self, home, lease_id, unit, *more)
        if "expired" in answer:
            self._running[unit] = (self.capacity._replace(memory_bytes=0), 0.0)
            return "run"
        return answer

    return [(Admission, "commit", lax)]


@mutant
def a_gang_goes_on_without_one() -> list[Patch]:
    return [(valence.protocols.engine.decisions, "mend", lambda run, gang: Mending())]


@mutant
def a_result_of_an_earlier_round_counts() -> list[Patch]:
    """Take any result of any attempt, as for a task that runs alone."""
    take = Decision.take

    def lax(self: Any, peer: bytes, outcomes: Any) -> None:
        for ended in outcomes:
            attempt = self.run.tasks[ended.key.task].attempt(ended.key.number)
            if attempt is not None and attempt.state == "lost" and ended.kind == "ok":
                attempt.state = "running"
        take(self, peer, outcomes)

    return [(Decision, "take", lax)]


@mutant
def strict_levels_do_not_wait() -> list[Patch]:
    ready = Run.is_ready

    def lax(self: Any, task: Any) -> bool:
        levels, self.levels = self.levels, {}
        try:
            return ready(self, task)
        finally:
            self.levels = levels

    return [(Run, "is_ready", lax)]


@mutant
@where(slice_bytes=1, peers=6, every_s=1.5, seconds=120.0)
def a_copy_that_has_not_caught_up_votes_for_itself() -> list[Patch]:
    return [(Replica, "caught_up", property(lambda self: True))]


@mutant
@seen_by("tests/test_elections.py::test_nobody_is_voted_for_in_an_era_that_its_log_is_not_in")
@where(majority_lost_s=10.0)
def homes_lead_in_eras_that_their_log_is_not_in() -> list[Patch]:
    def lax(epoch: int, last_epoch: int) -> bool:
        return True

    return [
        (valence.protocols.consensus.replica, "in_era", lax),
        (valence.protocols.consensus.election, "in_era", lax),
    ]


@mutant
@where(majority_lost_s=10.0)
def two_lines_of_a_workflow_never_meet() -> list[Patch]:
    async def shy(self: Any, copy: Any) -> None:
        pass

    return [(Lines, "look", shy)]


@mutant
@where(majority_lost_s=10.0)
def a_forced_home_holds_against_an_agreed_end() -> list[Patch]:
    def holds(line: History, other: History) -> bool:
        return line.era > other.era

    return [(valence.protocols.consensus.lines, "holds", holds)]


@mutant
@where(majority_lost_s=10.0, slice_bytes=1, faults=("halve",), every_s=2.0, peers=4)
def half_a_submission_is_gone_on_with() -> list[Patch]:
    """Take what is left of a submission for all of it."""
    document = Journal.document

    def hasty(self: Any, workflow: str) -> Any:
        return document(self, workflow) or (b"{}", {}, 0.0, "")

    return [(Journal, "document", hasty)]


@mutant
@where(majority_lost_s=10.0, slice_bytes=1, peers=6, every_s=1.5, seconds=120.0)
def silent_homes_are_never_asked() -> list[Patch]:
    async def idle(self: Any, now: float) -> None:
        pass

    return [(Elections, "_ask_homes", idle)]


@mutant
@seen_by("tests/test_sim.py::test_a_copy_that_stayed_behind_tells_nobody_that_it_is_out")
@where(slice_bytes=1, peers=6, every_s=1.5, seconds=120.0)
def a_namesake_tells_who_is_out() -> list[Patch]:
    excludes = Replica.excludes

    def rash(self: Any, candidate: bytes, asked: Any) -> bool:
        return excludes(self, candidate, asked._replace(birth=self.birth))

    return [(Replica, "excludes", rash)]


@mutant
@where(majority_lost_s=10.0)
def an_end_that_may_be_agreed_on_makes_way() -> list[Patch]:
    return [(Replica, "may_be_over", False)]


@mutant
@seen_by("tests/test_elections.py::test_a_copy_that_catches_up_belongs_to_its_homes_line")
@where(majority_lost_s=10.0, slice_bytes=1)
def who_catches_up_in_a_forced_era_is_cut_off() -> list[Patch]:
    def rash(self: Any, workflow: str, copy: Any) -> bool:
        return forced(copy.promised) > forced(copy.last_epoch)

    return [(Lines, "_may_have_two", rash)]


@mutant
@seen_by("tests/test_sim.py::test_a_key_is_answered_for_only_when_its_submission_is_committed")
@where(slice_bytes=1, peers=6, every_s=1.5, seconds=120.0)
def keys_are_answered_for_before_they_count() -> list[Patch]:
    async def rash(self: Any, run: Any, arguments: Any) -> Any:
        submission = self._home.journal.document(run.id)
        if submission is None:
            raise ApiError(503, "changing its home")
        return _Document(hash=str(submission[1].get("document", "")))

    return [(Answers, "_document", rash)]


@mutant
def copies_that_are_given_up_are_still_answered_for() -> list[Patch]:
    return [(Home, "dropped", lambda self, workflow: None)]


@mutant
def cancels_are_acknowledged_and_ignored() -> list[Patch]:
    async def deaf(self: Any, workflow: str, reason: str) -> Any:
        return await self.get(workflow)

    return [(Home, "cancel", deaf)]


@mutant
def a_key_is_not_looked_up() -> list[Patch]:
    async def anew(self: Any, owner: str, options: Any) -> tuple[str, bool]:
        return new_id(self._rpc.me.id, self._rng, self.prefix), True

    return [(Gateway, "_named", anew)]


@mutant
def ends_are_told_before_they_count() -> list[Patch]:
    async def hasty(self: Any, run: Any) -> bool:
        return True

    return [(Home, "stands", hasty)]


@mutant
def a_workflow_goes_on_after_its_end() -> list[Patch]:
    apply = Run.apply

    def forgetful(self: Any, entry: Any, at: float, epoch: int) -> None:
        apply(self, entry, at, epoch)
        self.ended_at = None

    return [(Run, "apply", forgetful)]


@mutant
def a_gang_begins_without_one() -> list[Patch]:
    placed = Home.placed

    def lax(self: Any, batch: Any) -> None:
        placed(self, [p for p in batch if p.unit.key not in p.unit.gang[:1]])

    return [(Home, "placed", lax)]


@mutant
def a_workflow_succeeds_with_a_task_left() -> list[Patch]:
    conclusion = Run.conclusion

    def hasty(self: Any) -> Any:
        left = [t for t in self.tasks.values() if t.state not in FINAL]
        if len(left) == 1 and len(self.tasks) > 1 and not self.cancelling:
            return "succeeded", ""
        return conclusion(self)

    return [(Run, "conclusion", hasty)]


@mutant
def a_peer_runs_more_than_fits() -> list[Patch]:
    """It takes its cores for twice as many."""
    make = Admission.__init__

    def boastful(self: Any, capacity: Any, *more: Any) -> None:
        make(self, capacity._replace(millicores=2 * capacity.millicores), *more)

    return [(Admission, "__init__", boastful)]


# --------------------------------------------------------------------------- checks that can fail


@mutant
@shows("counts entries it does not have")
def a_home_counts_what_it_does_not_have() -> list[Patch]:
    agreed = Replica.agreed

    def boastful(self: Any, have: Any, epoch: int) -> int:
        committed: int = agreed(self, have, epoch)
        return committed + int(committed == self.count)

    return [(Replica, "agreed", boastful)]


@mutant
@shows("an input that was never agreed on")
def inputs_are_used_before_they_count() -> list[Patch]:
    write = Decision.write

    def hasty(self: Any, entry: Any, *more: Any, **others: Any) -> None:
        write(self, entry, *more, **others)
        if isinstance(entry, InputsStaged):
            self.run.committed(entry)

    return [(Decision, "write", hasty)]


@mutant
@shows("ran twice at peer")
def an_attempt_is_begun_twice() -> list[Patch]:
    start, again_too = Executor.start, Tasks()

    def eager(self: Any, key: Any) -> None:
        work = self._held[key].work
        start(self, key)

        async def again() -> None:
            while key in self._held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await self._workshop.attempt(work).run()

        again_too.spawn(again())

    return [(Executor, "start", eager)]


@mutant
@where(majority_lost_s=10.0, slice_bytes=1, faults=("halve",), every_s=2.0, peers=4)
def half_a_submission_goes_on_by_force() -> list[Patch]:
    return [
        (Replica, "whole", property(lambda self: True)),
        (Replica, "void", property(lambda self: False)),
    ]


@mutant
@shows("has other files of it than others have")
def peers_tell_of_other_files() -> list[Patch]:
    view = Answers._file_view

    def liar(self: Any, run: Any, name: str) -> Any:
        file = view(self, run, name)
        odd = self._me[-1] in "13579bdf"
        return file.model_copy(update={"hash": f"{file.hash}-"}) if odd else file

    return [(Answers, "_file_view", liar)]


@mutant
@shows("does not say why")
def tasks_wait_in_silence() -> list[Patch]:
    return [(Home, "waiting_for", lambda self, run, task: "")]


@mutant
@shows("users still wait for an answer")
def nobody_is_told_of_the_end() -> list[Patch]:
    events = Answers._events

    async def silent(self: Any, run: Any, arguments: Any) -> Any:
        return (await events(self, run, arguments)).model_copy(update={"over": False})

    return [(Answers, "_events", silent)]


@mutant
@shows("is void")
def whole_submissions_are_taken_for_broken_off() -> list[Patch]:
    take_up = Home._take_up

    def hasty(self: Any, workflow: str, material: Any, run: Any = None) -> None:
        take_up(self, workflow, None)

    return [(Home, "_take_up", hasty)]


# --------------------------------------------------------------------------- promises

HERE = "tests/test_promises.py::"
CALENDAR = "tests/test_calendar.py::"


@mutant
@where(strategy="deadline")
@shows("was promised its place and must make way")
def promises_can_be_evicted() -> list[Patch]:
    may_make_way = Admission._may_make_way

    def any_unit(self: Any, promise: Any, now: float) -> Any:
        for other in list(self.bookings.running()):
            if other.unit not in self._making_way:
                yield 0, other.unit, other.needs
        yield from may_make_way(self, promise, now)

    return [(Admission, "_may_make_way", any_unit)]


@mutant
@where(strategy="deadline")
@shows("keeps bookings of workflows that are over")
def holds_never_expire() -> list[Patch]:
    return [(Bookings, "expire", lambda self, now: [])]


@mutant
@where(strategy="deadline")
@shows("was promised to its user, and its journal says nothing of it")
def promises_before_the_journal() -> list[Patch]:
    create = Home._create

    async def hasty(
        self: Any, run: Any, text: Any, about: Any, patient: Any, named: Any, admitted: Any = None
    ) -> Any:
        return await create(self, run, text, about, patient, named)

    return [(Home, "_create", hasty)]


@mutant
@where(strategy="deadline")
@shows("is promised, and not all of its tasks are booked")
def a_plan_may_leave_tasks_out() -> list[Patch]:
    rows = Planning.rows
    return [(Planning, "rows", lambda self, slots, lengths: rows(self, slots, lengths)[1:])]


@mutant
@where(strategy="deadline")
@shows("is called kept, and it was late")
def late_is_kept() -> list[Patch]:
    def kept(self: Any, state: str, reason: str) -> None:
        promise = self.run.promise
        if promise is not None and promise.is_open:
            self.write(PromiseEnded(kept=True, cause="", why=""))

    def nothing(self: Any, worst: Any) -> None:
        pass

    return [(Decision, "_end_promise", kept), (Decision, "break_promise", nothing)]


@mutant
@where(strategy="deadline")
@shows("is neither kept nor broken")
def promises_have_no_end() -> list[Patch]:
    return [(Decision, "_end_promise", lambda self, state, reason: None)]


@mutant
@where(strategy="deadline")
@shows("over-booked")
def bookings_overlap() -> list[Patch]:
    def at_once(self: Any, needs: Any, length_s: float, start: float, limit: Any) -> float:
        return start

    return [(Profile, "earliest", at_once)]


@mutant
@seen_by(HERE + "test_a_new_home_affirms_the_bookings_of_the_old_one")
def a_new_home_forgets_bookings() -> list[Patch]:
    async def nothing(self: Any, run: Any, promise: Any) -> None:
        pass

    return [(Promises, "_confirm", nothing)]


@mutant
@seen_by(HERE + "test_a_restarted_peer_has_its_bookings_still")
def a_restart_loses_bookings() -> list[Patch]:
    return [(Provider, "load", lambda self: None)]


@mutant
@seen_by(HERE + "test_the_earliest_end_is_accepted_when_it_is_asked_for")
def earliest_is_a_guess() -> list[Patch]:
    init = NotPromised.__init__

    def guess(self: Any, why: str, earliest_at: Any, offer: str = "") -> None:
        init(self, why, None if earliest_at is None else earliest_at - 5.0, offer)

    return [(NotPromised, "__init__", guess)]


@mutant
@seen_by(HERE + "test_a_task_is_booked_again_when_its_peer_dies")
def the_old_booking_stays() -> list[Patch]:
    return [(Bookings, "let_go", lambda self, lease, home: False)]


@mutant
@seen_by(CALENDAR + "test_memory_is_booked_too")
def memory_is_not_booked() -> list[Patch]:
    def cores_only(used: Any, needs: Any, limit: Any) -> bool:
        return bool(needs[0] > 0 and used[0] + needs[0] > limit[0])

    return [(valence.protocols.capacity.calendar, "exceeds", cores_only)]


@mutant
@seen_by(CALENDAR + "test_units_begin_in_the_order_of_their_deadlines")
def booked_units_begin_in_order_of_arrival() -> list[Patch]:
    return [(Bookings, "waiting", lambda self: list(self._waiting.values()))]


@mutant
@seen_by(CALENDAR + "test_only_a_unit_that_takes_too_long_makes_way_for_another_promise")
def overruns_are_ignored() -> list[Patch]:
    return [(Bookings, "overrunning", lambda self, now: [])]


@mutant
@seen_by(CALENDAR + "test_a_hold_that_nobody_confirms_expires_and_a_booking_does_not")
def bookings_fall_with_their_home() -> list[Patch]:
    def forsake(self: Any, home: bytes) -> bool:
        gone = [p for p in self.promises.values() if p.home == home]
        for promise in gone:
            self._drop(promise)
        return bool(gone)

    return [(Bookings, "forsake", forsake)]


@mutant
@seen_by("tests/test_sequences.py::test_windows_leave_time_for_parents_that_are_still_to_come")
def windows_forget_parents_to_come() -> list[Patch]:
    windows = valence.workflow.sequences.windows

    def forgetful(graph: Any, slots: Any, now: float, deadline: float, apart_s: float = 0.0) -> Any:
        spans = windows(graph, slots, now, deadline, apart_s)
        return {
            task: valence.workflow.sequences.Window(
                max([now, *(slots[p].end for p in graph.parents[task] if p in slots)]), span.end
            )
            for task, span in spans.items()
        }

    return [(valence.workflow.sequences, "windows", forgetful)]


TREE = "tests/test_tree.py::"


@mutant
@seen_by(TREE + "test_what_fits_into_a_cell_fits_into_every_hole_of_it")
def summaries_round_up() -> list[Patch]:
    def up(seconds: float) -> float:
        return float(2.0 ** math.ceil(math.log2(max(1e-3, seconds))))

    return [(valence.protocols.strategies.deadline.summary, "length_below", up)]


@mutant
@seen_by(TREE + "test_what_was_routed_is_deducted_until_the_next_summary")
def routed_room_stays_on_offer() -> list[Patch]:
    choose = Branch.choose

    def careless(self: Any, tasks: Any, tried: Any) -> Any:
        have = {cell: dict(children) for cell, children in self._have.items()}
        total = self._total.copy()
        chosen = choose(self, tasks, tried)
        self._have, self._total = have, total
        return chosen

    return [(Branch, "choose", careless)]


@mutant
@seen_by(TREE + "test_updates_keep_their_distance")
def updates_without_limit() -> list[Patch]:
    update = Branch.update

    def hasty(self: Any, now: float) -> Any:
        self._next_at = now
        return update(self, now)

    return [(Branch, "update", hasty)]
