"""The expression language of conditions and products: small, and without access to anything else.

It has arithmetic, comparisons, `and`, `or`, `not`, a few functions, and those that the program that
runs the solution adds. Numbers and texts stay small. An expression that can't be computed (a text
plus a number, a division by zero) is `Incomputable`: such a condition is not met, such a product is
not made.

Every term costs a step, and a term that stands for many molecules costs as many: a `Meter` is
called before each step, and raises when the limit is reached.
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
SIZE_PER_STEP = 16  # size of a molecule that one step can look at

#: returns a molecule, or several in place of one
Function = Callable[..., "Molecule | Sequence[Molecule]"]
Bindings = Mapping[str, Molecule]


#: called with a number of steps before they are taken
Meter = Callable[[int], None]


class Incomputable(Exception):
    pass


def unmetered(steps: int) -> None:
    """No limit: for expressions that are short, and use numbers only."""


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
        raise Incomputable("it needs numbers")
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
        raise Incomputable("only a solution contains molecules")
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
    """Whether a condition is met; one that can't be computed is not."""
    try:
        return compute(term, bound, functions, spend) is True
    except Incomputable:
        return False


def compute(
    term: Term, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Molecule:
    """One molecule, with every hole filled in."""
    molecules = products(term, bound, functions, spend)
    if len(molecules) != 1:
        raise Incomputable(f"it needs one molecule, but there are {len(molecules)}")
    return molecules[0]


def products(
    term: Term, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Sequence[Molecule]:
    """The molecules of a product: mostly one; `?w` and functions may give any number."""
    spend(1)
    if isinstance(term, Variable):
        return (bound[term.name],)
    if isinstance(term, Rest):
        return _rest(term, bound, spend)
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


def _rest(term: Rest, bound: Bindings, spend: Meter) -> Sequence[Molecule]:
    rest = bound[term.name]
    if not isinstance(rest, Solution):
        raise Incomputable(f"{term.name} is not a solution")
    spend(len(rest.molecules))
    return rest.molecules


def _call(
    term: Call, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Sequence[Molecule]:
    arguments = [compute(a, bound, functions, spend) for a in term.arguments]
    spend(sum(map(size_of, arguments)) // SIZE_PER_STEP)  # a function may look at all of them
    function = functions.get(term.name) or BUILT_IN.get(term.name)
    if function is None:  # it stays a call, for the program that runs the solution
        return (Call(term.name, tuple(arguments)),)
    try:
        result = function(*arguments)
    except TypeError:
        raise Incomputable(f"{term.name} does not take these arguments") from None
    return tuple(result) if isinstance(result, list | tuple) else (result,)  # type: ignore[return-value]


def _operation(
    term: Operation, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> Molecule:
    name = term.operator
    if name in ("and", "or"):
        return _combined(term, bound, functions, spend)
    values = [compute(o, bound, functions, spend) for o in term.operands]
    spend(sum(map(size_of, values)) // SIZE_PER_STEP)
    if name == "not":
        return not _truth(values[0])
    if name == "negative":
        return _small(-_numbers(values[0])[0])
    if name in ("=", "!="):
        return _are_equal(values[0], values[1]) is (name == "=")
    texts = _are_texts(values)
    if name in _ORDER:
        return _ORDER[name](*(values if texts else _numbers(*values)))
    if name == "+" and texts:
        return _small(values[0] + values[1])  # type: ignore[operator]
    return _arithmetic(name, values)


def _are_texts(values: list[Molecule]) -> bool:
    return all(isinstance(value, str) for value in values)


def _arithmetic(name: str, values: list[Molecule]) -> Molecule:
    try:
        return _small(_ARITHMETIC[name](*_numbers(*values)))
    except (ZeroDivisionError, OverflowError) as error:
        raise Incomputable(str(error)) from None


def _combined(
    term: Operation, bound: Bindings, functions: Mapping[str, Function], spend: Meter
) -> bool:
    """`and` and `or`: the second operand is computed only if it matters."""
    left = _truth(compute(term.operands[0], bound, functions, spend))
    if left is (term.operator == "or"):
        return left
    return _truth(compute(term.operands[1], bound, functions, spend))


def _are_equal(left: Molecule, right: Molecule) -> bool:
    if _is_number(left) and _is_number(right):
        return left == right
    return typed(left) == typed(right)


def _truth(value: Molecule) -> bool:
    if not isinstance(value, bool):
        raise Incomputable("it needs a truth value")
    return value


def _small(value: Any) -> Molecule:
    if isinstance(value, str) and len(value) <= TEXT_MAX:
        return value
    if _is_number(value) and -NUMBER_MAX < value < NUMBER_MAX:  # no infinity, no nan
        return value  # type: ignore[no-any-return]
    raise Incomputable("the result is too large")
