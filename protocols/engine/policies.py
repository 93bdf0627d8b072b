"""Policies: chemical rules that travel with a workflow and react to events of its tasks.

A document lists them (`policies:`), each as the name of a shipped policy or as a rule in the
notation of `protocols.chemistry`. For each event the home puts a molecule into the workflow's
solution, lets it react, and does what the rules ask for:

    ENDED:task:failures:cause:value     an attempt has failed, the task's `failures`-th failure;
                                        cause is "memory" (value: bytes asked for), "timeout"
                                        (seconds allowed), "exit" (its code), "signal" (its number)
                                        or "other" (0)
    SLOW:task:attempts:seconds:typical  it has run for `seconds`, similar tasks took `typical`; at
                                        two, four, eight … times that
    FAILED:task:left                    it has failed for good, and has `left` alternatives
    system.instead(task)                go on with the next of its alternatives
    system.again(task)                  try it again, however often it has failed
    system.again(task, bytes)           and give it this much memory
    system.twice(task)                  run a second attempt beside the first; the first result wins

A decision is written with the outcome that it follows from. A new home rebuilds the same solution
from the same journal, so that nothing in it is ever lost.
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
    """A task is to be tried again, perhaps with more memory, or in its next alternative."""

    memory_bytes: int = 0
    instead: bool = False

    @property
    def why(self) -> str:
        if self.instead:
            return "a policy switches it to its next alternative"
        memory = f" with {show_bytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"a policy retries it{memory}"


def read_policy(text: str) -> Rule:
    """A policy by its name, or a rule as it is written; `ChemistryError` if it is neither."""
    if text.split(maxsplit=1)[:1] in (["replace"], ["replace-one"]):
        return read_rule(text)
    if text not in SHIPPED:
        known = ", ".join(SHIPPED)
        raise ChemistryError(f"unknown policy {text!r}: use {known}, or write a rule")
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
        again = None
        for call in self._reactor.take("system.again"):
            if call.arguments[:1] == (task,):
                again = Again(_bytes(call.arguments[1:]))
        return again

    def failed(self, task: str, left: int) -> Again | None:
        """For good, unless it goes on in its next alternative."""
        self._happened(Symbol("FAILED"), task, left)
        asked = [call.arguments for call in self._reactor.take("system.instead")]
        return Again(instead=True) if (task,) in asked and left > 0 else None

    def slow(self, task: str, attempts: int, seconds: float, typical_s: float) -> bool:
        """True: it is to be run a second time."""
        self._happened(Symbol("SLOW"), task, attempts, seconds, typical_s)
        return any(call.arguments == (task,) for call in self._reactor.take("system.twice"))

    def _happened(self, *parts: Molecule) -> None:
        """Rules that never come to rest are switched off: tasks go on without them."""
        if self.trouble:
            return
        budget = Budget(REACTIONS_MAX, min(STEPS_MAX, self._steps_left))
        try:
            self._reactor.happened(Compound(parts), budget)
        except (ChemistryError, RecursionError) as error:
            self.trouble = f"the policies of this workflow are switched off: {error}"
        except Exception:  # a bug in the reactor must not harm other workflows
            log.exception("the policies of a workflow have failed")
            self.trouble = "the policies of this workflow have failed, and are switched off"
        self._steps_left -= budget.steps_max - max(0, budget.steps)


def _heads(rule: Rule) -> set[str]:
    names = set()
    for pattern in rule.patterns:
        head = pattern.parts[0] if isinstance(pattern, Compound) else None
        if isinstance(head, Symbol):
            names.add(head.name)
    return names


def _bytes(arguments: tuple[Molecule, ...]) -> int:
    value = arguments[0] if arguments else 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(min(MEMORY_BYTES_MAX, max(0, value)))
