"""The rank of a task at a pilot, computed by an expression over both. Pure.

`local` and `remote` are the MiB of the task's inputs that the pilot holds and that it would have to
fetch; `speed` is the pilot's; `waited` is the seconds that the task has waited, and `hangs` the
seconds of work that depend on it. By default the files that are held count most, then speed, then
waiting. Bytes to fetch count a little against the task, and if there are any at all, they count as
much as a quarter of an hour of waiting: a pilot that has a choice leaves a task to the pilots that
hold its files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ...chemistry.expressions import Incomputable, compute, unmetered
from ...chemistry.molecules import Term
from ...chemistry.notation import ChemistryError, read_rule

VARIABLES = ("local", "remote", "speed", "waited", "hangs")
TEXT_MAX = 200

#: takes local, remote, speed, waited, hangs
Ranking = Callable[[float, float, float, float, float], float]


def by_default(local: float, remote: float, speed: float, waited: float, hangs: float) -> float:
    away = remote + 1.0 if remote else 0.0
    return 1000.0 * local - away + 10.0 * min(speed, 99.0) + min(9.0, (waited + hangs) / 1000.0)


def problem(text: str) -> str | None:
    """What is wrong with an expression, in words."""
    if len(text) > TEXT_MAX:
        return f"the expression has {len(text)} characters; at most {TEXT_MAX} are allowed"
    names = ", ".join(VARIABLES)
    try:
        value = compute(_read(text), dict.fromkeys(VARIABLES, 1.0), {}, unmetered)
    except Incomputable:
        return None  # with these numbers; perhaps it can be computed with others
    except (ChemistryError, KeyError, ValueError) as error:
        return f"{error}; write an expression whose value is a number; it may use {names}"
    if not isinstance(value, int | float):
        return f"its value is not a number; an expression may use {names}"
    return None


@lru_cache(256)
def ranking(text: str) -> Ranking:
    """The function for any expression: it returns 0 where there is no number to compute. The
    expression is one user's, and ranks the tasks of all: so the function never raises."""
    if not text:
        return by_default
    try:
        term = _read(text)
    except Exception:
        return lambda *_: 0.0

    def computed(*values: float) -> float:
        try:
            value = compute(term, dict(zip(VARIABLES, values, strict=True)), {}, unmetered)
        except Exception:  # of any kind: one user's expression must not stop the round of all
            return 0.0
        return float(value) if isinstance(value, int | float) else 0.0

    return computed


def _read(text: str) -> Term:
    rule = read_rule(f"replace {', '.join(VARIABLES)} by ({text})")
    if len(rule.products) != 1 or rule.condition is not None:
        raise ValueError("one expression is expected")
    return rule.products[0]
