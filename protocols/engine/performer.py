"""Performs the effects of decisions: appends entries, looks for capacity, aborts attempts, counts.

Rules:
- The entries of a decision are appended before anything else is done: the rest may lead to further
  decisions, whose entries come after these.
- When a majority has an entry, the decision that follows from that is made and performed too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from ..consensus.keeping import Deposed
from ..strategies.base import Placed, Strategy
from ..strategies.gangs import Gangs
from ..wire.messages import AttemptKey
from . import effects
from .decisions import Decision, Surroundings
from .effects import CancelCounts, InputsCount, ResultsCount, WhenCommitted
from .experience import Experience
from .journal import Journal
from .run import Run
from .runs import Runs
from .targets import Targets


class Deciding:
    """For a `with` statement: the decision, whose effects are performed at the end; also after an
    error, as the run has been changed by then."""

    __slots__ = ("_decision", "_performer", "_run")

    def __init__(self, performer: Performer, run: Run, decision: Decision) -> None:
        self._performer = performer
        self._run = run
        self._decision = decision

    def __enter__(self) -> Decision:
        return self._decision

    def __exit__(self, *error: object) -> None:
        self._performer.perform(self._run, self._decision.effects)


Decide = Callable[[Run], Deciding]


class Performer:
    def __init__(
        self,
        *,
        runs: Runs,
        journal: Journal,
        surroundings: Surroundings,
        targets: Targets,
        strategies: Mapping[str, Strategy],
        strategy: Callable[[Run], Strategy],
        experience: Experience,
        counts: Counter[str],
        rng: random.Random,
        start: Callable[[Run, tuple[Placed, ...]], None],
        bring_inputs: Callable[[Run], None],
        deliver: Callable[[Run], None],
        book_missing: Callable[[Run], None],
        conclude: Callable[[Run, str], None],
    ) -> None:
        self._runs = runs
        self._journal = journal
        self._surroundings = surroundings
        self._targets = targets
        self._strategies = strategies
        self._strategy = strategy
        self._experience = experience
        self._counts = counts
        self._rng = rng
        self._start_placed = start
        self._begin_inputs = bring_inputs
        self._begin_delivery = deliver
        self._book_slots = book_missing
        self._concluded = conclude

    def deciding(self, run: Run) -> Deciding:
        if not self._runs.is_active(run):
            raise Deposed(run.id)
        return Deciding(self, run, self._decision(run))

    def withdraw(self, run: Run, keys: Collection[AttemptKey]) -> None:
        self._strategy(run).withdraw(keys)
        self._strategies[Gangs.name].withdraw(keys)

    def _decision(self, run: Run) -> Decision:
        return Decision(run, self._surroundings, self._journal.keeping.epoch(run.id))

    def perform(self, run: Run, wanted: list[effects.Effect]) -> None:
        others: list[effects.Effect] = []
        for effect in wanted:
            if isinstance(effect, effects.Append):
                then = None if effect.then is None else partial(self._committed, run, effect.then)
                self._journal.append(run.id, effect.said, effect.soon, then, effect.at)
            else:
                others.append(effect)
        for effect in others:
            _PERFORM[type(effect)](self, run, effect)

    def _committed(self, run: Run, event: WhenCommitted) -> None:
        """A majority has the entry of this event; the run may be over by now."""
        decide = self._decision(run)
        match event:
            case ResultsCount():
                decide.results_count(event, self._runs.is_active(run))
            case InputsCount():
                decide.inputs_count(event, self._runs.is_active(run))
            case CancelCounts():
                decide.cancel_counts(event)
        self.perform(run, decide.effects)

    # ----------------------------------------------------------------- one effect each

    def _place(self, run: Run, effect: effects.Place) -> None:
        if effect.units:
            self._strategy(run).add(effect.units)
        if effect.gangs:
            self._strategies[Gangs.name].add(effect.gangs)

    def _place_rest_later(self, run: Run, effect: effects.PlaceRest) -> None:
        asyncio.get_running_loop().call_soon(self._place_rest, run, effect.tasks)

    def _place_rest(self, run: Run, tasks: tuple[str, ...]) -> None:
        if self._runs.is_active(run):
            with self.deciding(run) as decide:
                rest = [run.tasks[name] for name in tasks]
                decide.place_ready([task for task in rest if task.state == "waiting"])

    def _start(self, run: Run, effect: effects.Start) -> None:
        self._start_placed(run, effect.placed)

    def _withdraw(self, run: Run, effect: effects.Withdraw) -> None:
        self.withdraw(run, effect.keys)

    def _abort(self, run: Run, effect: effects.AbortAttempts) -> None:
        self._targets.abort(run, effect.peer, list(effect.keys))

    def _retry(self, run: Run, effect: effects.Retry) -> None:
        wait_s = effect.wait_s * (0.75 + self._rng.random() / 2)
        asyncio.get_running_loop().call_later(wait_s, self._place_again, run, effect.task)

    def _place_again(self, run: Run, task: str) -> None:
        if self._runs.is_active(run):
            with self.deciding(run) as decide:
                decide.place_again(task)

    def _bring_inputs(self, run: Run, effect: effects.BringInputs) -> None:
        self._begin_inputs(run)

    def _book_missing(self, run: Run, effect: effects.BookMissing) -> None:
        self._book_slots(run)

    def _deliver(self, run: Run, effect: effects.Deliver) -> None:
        self._begin_delivery(run)

    def _keep_twice(self, run: Run, effect: effects.KeepTwice) -> None:
        self._targets.keep_twice(run, [run.tasks[name] for name in effect.tasks])

    def _observe(self, run: Run, effect: effects.Observe) -> None:
        self._experience.observe(run.owner, effect.said_s, effect.took_s)

    def _count(self, run: Run, effect: effects.Count) -> None:
        self._counts[effect.name] += effect.by

    def _conclude(self, run: Run, effect: effects.Conclude) -> None:
        self._concluded(run, effect.state)


_PERFORM: dict[type[effects.Effect], Callable[[Performer, Run, Any], None]] = {
    effects.Place: Performer._place,
    effects.PlaceRest: Performer._place_rest_later,
    effects.Start: Performer._start,
    effects.Withdraw: Performer._withdraw,
    effects.AbortAttempts: Performer._abort,
    effects.Retry: Performer._retry,
    effects.BringInputs: Performer._bring_inputs,
    effects.BookMissing: Performer._book_missing,
    effects.Deliver: Performer._deliver,
    effects.KeepTwice: Performer._keep_twice,
    effects.Observe: Performer._observe,
    effects.Count: Performer._count,
    effects.Conclude: Performer._conclude,
}
