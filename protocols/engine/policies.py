"""Policies: chemical rules that travel with a workflow and react to what becomes of its tasks.

A document lists them (`policies:`), by the name of one that is shipped or as a rule in the notation
of `protocols.chemistry`. The home puts a molecule into the workflow's solution when something has
happened, lets it react, and does what the rules ask for:

    ENDED:task:failures:cause:value     an attempt has failed, the task's `failures`-th time; cause
                                        is "memory" (value: bytes asked for), "timeout" (seconds
                                        allowed), "exit" (its code), "signal" (its number) or
                                        "other" (0)
    SLOW:task:attempts:seconds:typical  it runs for `seconds`, its like took `typical`; said at
                                        two, four, eight … times that
    FAILED:task:left                    it has failed for good, and has `left` alternatives
    system.instead(task)                go on with the next of its alternatives
    system.again(task)                  try it again, however often it has failed
    system.again(task, bytes)           and give it so much memory
    system.twice(task)                  run it a second time beside the first; the first result
                                        wins

What is decided is written with the outcome that it follows from. A new home makes the same solution
from the same journal: what is in it is never lost.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from valence.workflow.quantities import show_bytes

from ..chemistry.molecules import Compound, Molecule, Rule, Symbol
from ..chemistry.notation import ChemistryError, read_rule
from ..chemistry.reactor import Budget, Reactor

log = logging.getLogger("valence.policies")

REACTIONS_MAX, STEPS_MAX = 1000, 20_000  # after one event: some ten milliseconds
STEPS_IN_ALL_MAX = 500_000  # for one workflow: others wait while its rules react
MOLECULES_MAX, SIZE_MAX = 10_000, 1000
MEMORY_BYTES_MAX = 2**50
CAUSES = ("memory", "timeout", "exit", "signal")

SHIPPED = {
    "more-memory": (
        'replace ENDED:task:failures:"memory":asked by system.again(task, 2 * asked) '
        "if failures <= 3"
    ),
    "alternatives": "replace FAILED:task:left by system.instead(task) if left > 0",
    "slow-twice": (
        "replace SLOW:task:attempts:seconds:typical by system.twice(task) "
        "if attempts = 1 and seconds >= 3 * typical"
    ),
}


@dataclass(frozen=True, slots=True)
class Again:
    """A task is to be tried again, perhaps with more memory, or in another way."""

    memory_bytes: int = 0
    instead: bool = False

    @property
    def why(self) -> str:
        if self.instead:
            return "by a policy it is done in another way"
        more = f" with {show_bytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"by a policy it is tried again{more}"


def read_policy(text: str) -> Rule:
    """By its name, or as it is written; `ChemistryError` if there is no such."""
    if text.split(maxsplit=1)[:1] in (["replace"], ["replace-one"]):
        return read_rule(text)
    if text not in SHIPPED:
        known = ", ".join(SHIPPED)
        raise ChemistryError(f"no policy is called {text!r}; there are: {known}; or write a rule")
    return read_rule(SHIPPED[text])


def policy_problem(text: str) -> str | None:
    try:
        read_policy(text)
    except ChemistryError as error:
        return str(error)
    return None


class Policies:
    def __init__(self, texts: tuple[str, ...]) -> None:
        rules = [read_policy(text) for text in texts]
        self.trouble = ""
        self.wants_slow = any("SLOW" in _heads(rule) for rule in rules)
        self._steps_left = STEPS_IN_ALL_MAX
        self._reactor = Reactor(rules, molecules_max=MOLECULES_MAX, size_max=SIZE_MAX)

    def ended(self, task: str, failures: int, cause: str, value: int) -> Again | None:
        known = cause if cause in CAUSES else "other"
        self._happened(Symbol("ENDED"), task, failures, known, value if known != "other" else 0)
        found = None
        for call in self._reactor.take("system.again"):
            if call.arguments[:1] == (task,):
                found = Again(_bytes(call.arguments[1:]))
        return found

    def failed(self, task: str, left: int) -> Again | None:
        """For good, unless it is done in another way."""
        self._happened(Symbol("FAILED"), task, left)
        asked = [call.arguments for call in self._reactor.take("system.instead")]
        return Again(instead=True) if (task,) in asked and left > 0 else None

    def slow(self, task: str, attempts: int, seconds: float, typical_s: float) -> bool:
        """True: it is to be run a second time."""
        self._happened(Symbol("SLOW"), task, attempts, seconds, typical_s)
        return any(call.arguments == (task,) for call in self._reactor.take("system.twice"))

    def _happened(self, *parts: Molecule) -> None:
        """Rules that go on for ever are left alone from then on: tasks go on without them."""
        if self.trouble:
            return
        budget = Budget(REACTIONS_MAX, min(STEPS_MAX, self._steps_left))
        try:
            self._reactor.happened(Compound(parts), budget)
        except (ChemistryError, RecursionError) as error:
            self.trouble = f"the policies of this workflow do not act any more: {error}"
        except Exception:  # a fault of ours: it is this workflow's only
            log.exception("policies of a workflow have failed")
            self.trouble = "the policies of this workflow have failed, and do not act any more"
        self._steps_left -= budget.steps_max - max(0, budget.steps)


def _heads(rule: Rule) -> set[str]:
    found = set()
    for pattern in rule.patterns:
        head = pattern.parts[0] if isinstance(pattern, Compound) else None
        if isinstance(head, Symbol):
            found.add(head.name)
    return found


def _bytes(arguments: tuple[Molecule, ...]) -> int:
    value = arguments[0] if arguments else 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(min(MEMORY_BYTES_MAX, max(0, value)))
