"""What conditions and products compute: a small language with no way out of it.

There are arithmetic, comparisons, `and`, `or`, `not`, a few functions, and those that whoever runs
the solution lends to it. Numbers and texts stay small. What can't be computed (a text plus a
number, a division by zero) is `Incomputable`: a condition is then not met, a product not made.

Every term costs, and what stands for many molecules costs as many: a `Meter` hears of each step
before it is taken, and raises when it is enough.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .molecules import (
    Call,
    Compound,
    Molecule,
    Operation,
    Rest,
    Solution,
    Term,
    Variable,
    size_of,
    typed,
)

NUMBER_MAX = 2**63
TEXT_MAX = 10_000
SIZE_PER_STEP = 16  # of a molecule that is looked at

#: a molecule, or several that take the place of one
Function = Callable[..., "Molecule | Sequence[Molecule]"]
Bindings = Mapping[str, Molecule]


#: is told of steps that are about to be taken
Meter = Callable[[int], None]


class Incomputable(Exception):
    pass


def unmetered(steps: int) -> None:
    """For expressions that are short, and bound to numbers only."""


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(*values: Any) -> tuple[Any, ...]:
    if not values or not all(map(_is_number, values)):
        raise Incomputable("only numbers can be computed with")
    return values


def _length(value: Any) -> int:
    if isinstance(value, Solution):
        return len(value.molecules)
    if isinstance(value, str):
        return len(value)
    raise Incomputable("only solutions and texts have a length")


def _part(value: Any, index: Any) -> Molecule:
    if isinstance(value, Compound) and type(index) is int and 0 <= index < len(value.parts):
        return value.parts[index]
    raise Incomputable("there is no such part")


def _has(solution: Any, molecule: Any) -> bool:
    if not isinstance(solution, Solution):
        raise Incomputable("only a solution has molecules")
    return typed(molecule) in map(typed, solution.molecules)


BUILT_IN: dict[str, Function] = {
    "min": lambda *v: min(_numbers(*v)),
    "max": lambda *v: max(_numbers(*v)),
    "abs": lambda v: abs(_numbers(v)[0]),
    "floor": lambda v: int(_numbers(v)[0] // 1),
    "len": _length,
    "part": _part,
    "has": _has,
}


def is_true(term: Term, bound: Bindings, functions: Mapping[str, Function], spend: Meter) -> bool:
    """A condition; what can't be computed is not met."""
    try:
        return compute(term, bound, functions, spend) is True
    except Incomputable:
        return False


def compute(
    term: Term, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Molecule:
    """One molecule, with every hole filled in."""
    found = products(term, bound, functions, spend)
    if len(found) != 1:
        raise Incomputable("several molecules stand where one is needed")
    return found[0]


def products(
    term: Term, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Sequence[Molecule]:
    """What a product becomes: mostly one molecule, of `?w` and of functions any number."""
    spend(1)
    if isinstance(term, Variable):
        return (bound[term.name],)
    if isinstance(term, Rest):
        rest = bound[term.name]
        if not isinstance(rest, Solution):
            raise Incomputable(f"{term.name} is no solution")
        spend(len(rest.molecules))
        return rest.molecules
    if isinstance(term, Compound):
        return (Compound(tuple(compute(part, bound, functions, spend) for part in term.parts)),)
    if isinstance(term, Solution):
        inside = [m for t in term.molecules for m in products(t, bound, functions, spend)]
        return (Solution(tuple(inside)),)
    if isinstance(term, Operation):
        return (_operation(term, bound, functions, spend),)
    if isinstance(term, Call):
        return _call(term, bound, functions, spend)
    return (term,)


def _call(
    term: Call, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Sequence[Molecule]:
    arguments = [compute(a, bound, functions, spend) for a in term.arguments]
    spend(sum(map(size_of, arguments)) // SIZE_PER_STEP)  # a function may look at all of it
    function = functions.get(term.name) or BUILT_IN.get(term.name)
    if function is None:  # for whoever takes it out of the solution
        return (Call(term.name, tuple(arguments)),)
    try:
        found = function(*arguments)
    except TypeError:
        raise Incomputable(f"{term.name} does not take these") from None
    return tuple(found) if isinstance(found, list | tuple) else (found,)  # type: ignore[return-value]


def _operation(
    term: Operation, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Molecule:
    name = term.operator
    if name in ("and", "or"):
        left = _truth(compute(term.operands[0], bound, functions, spend))
        if left is (name == "or"):
            return left
        return _truth(compute(term.operands[1], bound, functions, spend))
    values = [compute(o, bound, functions, spend) for o in term.operands]
    spend(sum(map(size_of, values)) // SIZE_PER_STEP)
    if name == "not":
        return not _truth(values[0])
    if name == "negative":
        return _small(-_numbers(values[0])[0])
    if name in ("=", "!="):
        both = all(map(_is_number, values))
        same = values[0] == values[1] if both else typed(values[0]) == typed(values[1])
        return same is (name == "=")
    texts = all(isinstance(v, str) for v in values)
    if name in _ORDER:
        return _ORDER[name](*(values if texts else _numbers(*values)))
    if name == "+" and texts:
        return _small(values[0] + values[1])  # type: ignore[operator]
    try:
        return _small(_ARITHMETIC[name](*_numbers(*values)))
    except (ZeroDivisionError, OverflowError) as error:
        raise Incomputable(str(error)) from None


def _truth(value: Molecule) -> bool:
    if not isinstance(value, bool):
        raise Incomputable("only truth values can be combined")
    return value


def _small(value: Any) -> Molecule:
    if isinstance(value, str) and len(value) <= TEXT_MAX:
        return value
    if _is_number(value) and -NUMBER_MAX < value < NUMBER_MAX:  # no infinity, no nan
        return value  # type: ignore[no-any-return]
    raise Incomputable("too large")
