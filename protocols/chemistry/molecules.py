"""Molecules, and the terms that rules are made of: plain values; nothing here reacts.

After seed 000, section 2, and HOCL, the language it uses. A molecule is
- an atom: a number, a truth value, a text, or a *symbol* (a bare word such as READY);
- a compound `TASK:1:READY`: molecules joined by colons;
- a solution `⟨1, 2, TASK:3⟩`: a multiset of molecules, in a molecule of its own;
- a rule: rules are molecules too, and other rules consume and produce them;
- a call `system.deploy(t, r)`: something to be done outside the solution.

Every molecule is hashable and immutable. Its size and depth, counted as if nothing in it were
shared, are computed when it is made, and so is its hash: a molecule that is doubled again and again
would take for ever to walk through. Its *shape* is what can be seen without looking inside:
patterns and molecules of different shapes never match, so they are never tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[Any, ...]

TEXT_PER_SIZE = 64  # characters that count as one number


def size_of(term: object) -> int:
    if isinstance(term, str):
        return 1 + len(term) // TEXT_PER_SIZE
    return getattr(term, "size", 1)


def depth_of(term: object) -> int:
    return getattr(term, "depth", 1)


def _measure(made: object, parts: Iterable[object]) -> None:
    """Set the size and depth of a molecule that consists of these parts."""
    size, depth = 1, 0
    for part in parts:
        size += size_of(part)
        depth = max(depth, depth_of(part))
    object.__setattr__(made, "size", size)
    object.__setattr__(made, "depth", depth + 1)


def _known() -> Any:
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Compound:
    parts: tuple[Molecule, ...]
    size: int = _known()
    depth: int = _known()
    _hash: int = _known()

    def __post_init__(self) -> None:
        _measure(self, self.parts)
        object.__setattr__(self, "_hash", hash(self.parts))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Compound) and self._hash == other._hash
        return same and self.parts == other.parts  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Solution:
    """A multiset: two are equal if they have the same molecules, each the same number of times."""

    molecules: tuple[Molecule, ...] = ()
    _key: frozenset[tuple[Molecule, int]] = _known()
    size: int = _known()
    depth: int = _known()
    _hash: int = _known()

    def __post_init__(self) -> None:
        counts: dict[Any, int] = {}
        for one in self.molecules:
            counts[typed(one)] = counts.get(typed(one), 0) + 1
        object.__setattr__(self, "_key", frozenset(counts.items()))
        object.__setattr__(self, "_hash", hash(self._key))
        _measure(self, self.molecules)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Solution) and self._hash == other._hash
        return same and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Call:
    """`name(arguments)` as a product: executed by the program that runs the solution."""

    name: str
    arguments: tuple[Molecule, ...] = ()
    size: int = _known()
    depth: int = _known()

    def __post_init__(self) -> None:
        _measure(self, self.arguments)


# --------------------------------------------------------------------------- terms of rules


@dataclass(frozen=True, slots=True)
class Variable:
    """`x`, `x::int`: any one molecule, or one of a type; in products, the molecule it matched."""

    name: str
    type: str = ""


@dataclass(frozen=True, slots=True)
class Rest:
    """`?w`: the molecules of a solution that nothing else matched."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """`x + 1`, `x >= y`, `not a`, `len(w)`: see `expressions`."""

    operator: str
    operands: tuple[Term, ...]
    size: int = _known()
    depth: int = _known()

    def __post_init__(self) -> None:
        _measure(self, self.operands)


@dataclass(frozen=True, slots=True)
class Rule:
    """`replace patterns by products if condition`. `once`: it is consumed by its first reaction."""

    patterns: tuple[Term, ...]
    products: tuple[Term, ...]
    condition: Term | None = None
    once: bool = False
    name: str = ""
    size: int = _known()
    depth: int = _known()

    def __post_init__(self) -> None:
        _measure(self, (*self.patterns, *self.products, self.condition))


Atom = bool | int | float | str | Symbol
Molecule = Atom | Compound | Solution | Rule | Call
#: a molecule with holes: patterns, products and conditions are terms
Term = Molecule | Variable | Rest | Operation

TYPES = ("int", "float", "bool", "text", "symbol", "compound", "solution", "rule", "call")


def type_of(molecule: Molecule) -> str:
    if isinstance(molecule, bool):
        return "bool"
    for cls, name in (
        (int, "int"),
        (float, "float"),
        (str, "text"),
        (Symbol, "symbol"),
        (Compound, "compound"),
        (Solution, "solution"),
        (Rule, "rule"),
    ):
        if isinstance(molecule, cls):
            return name
    return "call"


def typed(molecule: Molecule) -> tuple[str, Molecule]:
    """Tells apart 1, 1.0 and True, which are equal in Python."""
    return type_of(molecule), molecule


def shape_of(term: Term) -> Shape:
    """The shape of a molecule, or of all molecules that a pattern matches: () if it matches any."""
    if isinstance(term, Variable):
        if term.type[:1].isupper():
            return ("head", term.type)
        return (term.type,) if term.type else ()
    if isinstance(term, Compound):
        head = term.parts[0]
        return ("compound", len(term.parts), head.name if isinstance(head, Symbol) else "")
    if isinstance(term, Rest | Operation):
        return ()
    return (type_of(term),)


def shapes_of(molecule: Molecule) -> tuple[Shape, ...]:
    """The shapes of all patterns that may match this molecule."""
    if isinstance(molecule, Compound):
        size = len(molecule.parts)
        head = molecule.parts[0]
        named: tuple[Shape, ...] = ()
        if isinstance(head, Symbol):
            named = (("compound", size, head.name), ("head", head.name))
        return ((), ("compound",), ("compound", size, ""), *named)
    return ((), (type_of(molecule),))
