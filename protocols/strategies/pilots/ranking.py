"""How much a pilot wants a task: an expression over the task and itself. Pure.

`local` and `remote` are MiB of its inputs that the pilot holds, and would have to fetch; `speed` is
the pilot's; `waited` and `hangs` are seconds, that the task has waited, and of work that hangs on
it. By default what is held counts most, then speed, then waiting; and a little against it what
would have to be fetched, and if that is anything at all as much as a quarter of an hour of waiting:
who has a choice leaves a task to those who hold its files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ...chemistry.expressions import Incomputable, compute, unmetered
from ...chemistry.molecules import Term
from ...chemistry.notation import ChemistryError, read_rule

VARIABLES = ("local", "remote", "speed", "waited", "hangs")
TEXT_MAX = 200

#: of local, remote, speed, waited, hangs
Ranking = Callable[[float, float, float, float, float], float]


def by_default(local: float, remote: float, speed: float, waited: float, hangs: float) -> float:
    away = remote + 1.0 if remote else 0.0
    return 1000.0 * local - away + 10.0 * min(speed, 99.0) + min(9.0, (waited + hangs) / 1000.0)


def problem(text: str) -> str | None:
    """What is wrong with an expression, in words."""
    if len(text) > TEXT_MAX:
        return f"an expression has at most {TEXT_MAX} characters"
    names = ", ".join(VARIABLES)
    try:
        found = compute(_read(text), dict.fromkeys(VARIABLES, 1.0), {}, unmetered)
    except Incomputable:
        return None  # of these numbers; perhaps not of others
    except (ChemistryError, KeyError, ValueError) as error:
        return f"{error}; an expression gives a number, and may use {names}"
    if not isinstance(found, int | float):
        return f"it gives no number; an expression may use {names}"
    return None


@lru_cache(256)
def ranking(text: str) -> Ranking:
    """Of an expression, whatever it is: what can't be computed, or is no number, counts for
    nothing. It is a user's, and ranks the tasks of all: it never raises."""
    if not text:
        return by_default
    try:
        term = _read(text)
    except Exception:
        return lambda *_: 0.0

    def computed(*values: float) -> float:
        try:
            found = compute(term, dict(zip(VARIABLES, values, strict=True)), {}, unmetered)
        except Exception:  # whatever it is: it is one user's, in the middle of everybody's
            return 0.0
        return float(found) if isinstance(found, int | float) else 0.0

    return computed


def _read(text: str) -> Term:
    rule = read_rule(f"replace {', '.join(VARIABLES)} by ({text})")
    if len(rule.products) != 1 or rule.condition is not None:
        raise ValueError("one expression is expected")
    return rule.products[0]
