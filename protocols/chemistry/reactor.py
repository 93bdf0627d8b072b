"""The reactor: molecules react until nothing more can happen (*inertia*), and again when more come.

Rules of the machine, after seed 000, section 2:
- A reaction captures all its reactants at once, or does not take place: no molecule is in two.
- The model leaves open which reaction comes next; here the molecule that came first is tried first,
  so that a run can be repeated.
- Rules are molecules: they are consumed and produced like others. A rule made by `replace-one` is
  consumed by its first reaction. A rule does not consume itself.
- A solution inside a molecule becomes inert before anything outside sees its content.

Why it is fast: a molecule is tried once, when it comes, at each place of each rule that its shape
fits. Its partners are looked up by shape, by value, and by parts of compounds that are constant or
bound already. A molecule that did not react then can react only with later ones. Each part of a
condition is checked as soon as all its variables are bound.

Everything is bounded: the number of molecules, the size and depth of each, the reactions, and the
steps until the solution is inert, including those in solutions inside molecules. A step is a
molecule or a term that is looked at; a large one counts for more. A rule whose products can't be
computed, or are too large, does not react, and `troubles` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .expressions import SIZE_PER_STEP, Bindings, Function, Incomputable, is_true, products
from .molecules import (
    Call,
    Compound,
    Molecule,
    Operation,
    Rest,
    Rule,
    Shape,
    Solution,
    Symbol,
    Term,
    Variable,
    depth_of,
    shape_of,
    shapes_of,
    size_of,
    type_of,
    typed,
)
from .notation import ChemistryError, _inside, show

MOLECULES_MAX = 100_000
REACTIONS_MAX = 1_000_000
STEPS_MAX = 2_000_000  # until it is inert
SIZE_MAX = 100_000
DEPTH_MAX = 50
TROUBLES_MAX = 20
NESTED_MAX = 8


@dataclass(slots=True)
class Budget:
    """The reactions and steps that are left, including those inside molecules."""

    reactions: int
    steps: int
    reactions_max: int = 0
    steps_max: int = 0

    def __post_init__(self) -> None:
        self.reactions_max, self.steps_max = self.reactions, self.steps

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise ChemistryError(f"still reacting after {self.steps_max:,} steps")

    def react(self) -> None:
        self.reactions -= 1
        if self.reactions < 0:
            raise ChemistryError(f"still reacting after {self.reactions_max:,} reactions")


@dataclass(slots=True)
class _Plan:
    """A rule, prepared: the parts of its condition, each with the names of its variables."""

    rule: Rule
    shapes: tuple[Shape, ...]
    parts: tuple[tuple[Term, frozenset[str]], ...]


class Reactor:
    def __init__(
        self,
        molecules: Iterable[Molecule] = (),
        functions: Mapping[str, Function] | None = None,
        depth: int = 0,
        *,
        budget: Budget | None = None,
        molecules_max: int = MOLECULES_MAX,
        size_max: int = SIZE_MAX,
    ) -> None:
        self.reactions = 0
        self.troubles: list[str] = []
        self._functions = functions or {}
        self._depth = depth
        self._floating: dict[int, Molecule] = {}
        self._by_shape: dict[Shape, dict[int, None]] = {}
        self._by_value: dict[tuple[str, Molecule], dict[int, None]] = {}
        self._by_part: dict[tuple[Shape, int], dict[tuple[str, Molecule], dict[int, None]]] = {}
        self._plans: dict[int, _Plan] = {}
        self._fresh: deque[int] = deque()
        self._next = 0
        self._budget = budget or Budget(REACTIONS_MAX, STEPS_MAX)
        self._molecules_max = molecules_max
        self._size_max = size_max
        for molecule in molecules:
            self.add(molecule)

    def __len__(self) -> int:
        return len(self._floating)

    def molecules(self) -> list[Molecule]:
        return list(self._floating.values())

    def solution(self) -> Solution:
        return Solution(tuple(self._floating.values()))

    @property
    def steps(self) -> int:
        """The steps since reactions were last started."""
        return self._budget.steps_max - self._budget.steps

    @property
    def inert(self) -> bool:
        return not self._fresh

    # ----------------------------------------------------------------- molecules

    def add(self, molecule: Molecule) -> None:
        if len(self._floating) >= self._molecules_max:
            raise ChemistryError(f"the solution has more than {self._molecules_max:,} molecules")
        self._budget.spend(1 + size_of(molecule) // SIZE_PER_STEP)
        molecule = self._inert(molecule)
        self._next += 1
        number = self._next
        self._floating[number] = molecule
        self._by_value.setdefault(typed(molecule), {})[number] = None
        for shape in shapes_of(molecule):
            self._by_shape.setdefault(shape, {})[number] = None
            for (known, part), index in self._by_part.items():
                if known == shape and isinstance(molecule, Compound):
                    index.setdefault(typed(molecule.parts[part]), {})[number] = None
        if isinstance(molecule, Rule):
            self._plans[number] = _plan(molecule)
        self._fresh.append(number)

    def take(self, call: str) -> list[Call]:
        """Take out the calls with that name: they are to be executed outside."""
        numbers = [i for i in self._by_shape.get(("call",), ()) if self._named(i) == call]
        calls = [self._floating[i] for i in numbers]
        for number in numbers:
            self._remove(number)
        return calls  # type: ignore[return-value]

    def _named(self, number: int) -> str:
        molecule = self._floating[number]
        return molecule.name if isinstance(molecule, Call) else ""

    def _inert(self, molecule: Molecule) -> Molecule:
        """The molecule, with every solution in it inert."""
        if isinstance(molecule, Compound):
            if not any(isinstance(p, Compound | Solution) for p in molecule.parts):
                return molecule
            return Compound(tuple(map(self._inert, molecule.parts)))
        if isinstance(molecule, Solution):
            if not any(isinstance(m, Rule | Compound | Solution) for m in molecule.molecules):
                return molecule
            if self._depth >= NESTED_MAX:
                raise ChemistryError(f"solutions are nested more than {NESTED_MAX} deep")
            inner = Reactor(
                molecule.molecules,
                self._functions,
                self._depth + 1,
                budget=self._budget,
                molecules_max=self._molecules_max,
                size_max=self._size_max,
            )
            self.reactions += inner._settle()
            self._trouble(*inner.troubles)
            return inner.solution()
        return molecule

    def _remove(self, number: int) -> None:
        molecule = self._floating.pop(number)
        self._plans.pop(number, None)
        _discard(self._by_value, typed(molecule), number)
        for shape in shapes_of(molecule):
            _discard(self._by_shape, shape, number)
            for (known, part), index in self._by_part.items():
                if known == shape and isinstance(molecule, Compound):
                    _discard(index, typed(molecule.parts[part]), number)

    # ----------------------------------------------------------------- reacting

    def react(self, most: int = REACTIONS_MAX, steps_max: int = STEPS_MAX) -> int:
        """React until the solution is inert; the number of reactions."""
        self._budget = Budget(most, steps_max)
        return self._settle()

    def happened(self, molecule: Molecule, budget: Budget) -> int:
        """Add a molecule and react until the solution is inert, within this budget."""
        self._budget = budget
        self.add(molecule)
        return self._settle()

    def _settle(self) -> int:
        start = self.reactions
        while self._fresh:
            number = self._fresh.popleft()
            while number in self._floating and self._react_with(number):
                pass
        return self.reactions - start

    def _react_with(self, number: int) -> bool:
        """One reaction in which this molecule takes part, if there is any."""
        molecule = self._floating[number]
        shapes = set(shapes_of(molecule))
        for rule_id, plan in list(self._plans.items()):
            if rule_id not in self._floating:
                continue
            if rule_id == number:  # a rule that has just come: it is tried with all that is here
                if self._try(rule_id, plan, None, 0):
                    return True
                continue
            for place, shape in enumerate(plan.shapes):
                if shape in shapes and self._try(rule_id, plan, number, place):
                    return True
        return False

    def _try(self, rule_id: int, plan: _Plan, first: int | None, place: int) -> bool:
        order = [place, *(n for n in range(len(plan.shapes)) if n != place)]
        for captured, bound in self._search(rule_id, plan, order, {}, {}, first):
            try:
                made = self._made(plan.rule, bound)
            except Incomputable as why:
                self._trouble(f"{plan.rule.name or show(plan.rule)} has no product: {why}")
                continue
            for one in captured.values():
                self._remove(one)
            if plan.rule.once and rule_id in self._floating:
                self._remove(rule_id)
            self.reactions += 1
            self._budget.react()
            for molecule in made:
                self.add(molecule)
            return True
        return False

    def _made(self, rule: Rule, bound: Bindings) -> list[Molecule]:
        made: list[Molecule] = []
        for term in rule.products:
            made += products(term, bound, self._functions, self._budget.spend)
        for one in made:
            if size_of(one) > self._size_max or depth_of(one) > DEPTH_MAX:
                raise Incomputable("its product is too large")
        return made

    def _search(
        self,
        rule_id: int,
        plan: _Plan,
        order: list[int],
        captured: dict[int, int],
        bound: Bindings,
        first: int | None,
    ) -> Iterator[tuple[dict[int, int], Bindings]]:
        """All ways to fill the places in that order, each with a different molecule."""
        if not order:
            yield captured, bound
            return
        place = order[0]
        pattern = plan.rule.patterns[place]
        candidates = (first,) if first is not None else self._candidates(pattern, bound)
        for number in candidates:  # nothing is taken out before the search is over
            if number in captured.values() or number == rule_id:
                continue
            for more in self._match(pattern, self._floating[number], bound):
                if self._is_met(plan, bound, more):
                    yield from self._search(
                        rule_id, plan, order[1:], {**captured, place: number}, more, None
                    )

    def _is_met(self, plan: _Plan, before: Bindings, now: Bindings) -> bool:
        """Check the parts of the condition whose variables are all bound now, and were not
        before."""
        known = now.keys()
        for part, names in plan.parts:
            fresh = names <= known and (not names or not names <= before.keys())
            if fresh and not is_true(part, now, self._functions, self._budget.spend):
                return False
        return True

    def _candidates(self, pattern: Term, bound: Bindings) -> Iterable[int]:
        """The smallest set of molecules that an index can give for this pattern."""
        value = _filled(pattern, bound)
        if value is not None:
            return self._by_value.get(typed(value), ())
        shape = shape_of(pattern)
        best: Iterable[int] = self._by_shape.get(shape, {})
        size = len(self._by_shape.get(shape, {}))
        if isinstance(pattern, Compound) and size > 1:
            for part, term in enumerate(pattern.parts):
                inner = _filled(term, bound)
                if inner is None or (part == 0 and isinstance(term, Symbol)):
                    continue
                matching = self._parts(shape, part).get(typed(inner), {})
                if len(matching) < size:
                    best, size = matching, len(matching)
        return best

    def _parts(self, shape: Shape, part: int) -> dict[tuple[str, Molecule], dict[int, None]]:
        index = self._by_part.get((shape, part))
        if index is None:  # from here on it is kept up to date
            index = self._by_part[shape, part] = {}
            for number in self._by_shape.get(shape, ()):
                molecule = self._floating[number]
                assert isinstance(molecule, Compound)
                index.setdefault(typed(molecule.parts[part]), {})[number] = None
        return index

    def _match(self, pattern: Term, molecule: Molecule, bound: Bindings) -> Iterator[Bindings]:
        """All ways in which a molecule matches; mostly there is one or none."""
        self._budget.spend(1 + size_of(molecule) // SIZE_PER_STEP)
        if isinstance(pattern, Variable):
            more = _bind(pattern, molecule, bound)
            if more is not None:
                yield more
        elif isinstance(pattern, Compound):
            if isinstance(molecule, Compound) and len(molecule.parts) == len(pattern.parts):
                yield from self._match_all(pattern.parts, molecule.parts, bound)
        elif isinstance(pattern, Solution):
            if isinstance(molecule, Solution):
                yield from self._match_solution(pattern.molecules, molecule.molecules, bound)
        elif typed(pattern) == typed(molecule):  # type: ignore[arg-type]
            yield bound

    def _match_all(
        self, patterns: tuple[Term, ...], parts: tuple[Molecule, ...], bound: Bindings
    ) -> Iterator[Bindings]:
        if not patterns:
            yield bound
            return
        for more in self._match(patterns[0], parts[0], bound):
            yield from self._match_all(patterns[1:], parts[1:], more)

    def _match_solution(
        self, patterns: tuple[Term, ...], molecules: tuple[Molecule, ...], bound: Bindings
    ) -> Iterator[Bindings]:
        """Each pattern with a different molecule; the rest is `?w`, or there is none."""
        single, rest = _divided(patterns)
        if not _fits(len(single), len(molecules), rest is not None):
            return
        if single:
            for index, molecule in _different(molecules):
                left = molecules[:index] + molecules[index + 1 :]
                remaining = tuple(p for p in patterns if p is not single[0])
                for more in self._match(single[0], molecule, bound):
                    yield from self._match_solution(remaining, left, more)
        elif rest is not None:
            yield from self._match(Variable(rest.name), Solution(molecules), bound)
        else:
            yield bound

    def _trouble(self, *texts: str) -> None:
        for text in texts:
            if text not in self.troubles and len(self.troubles) < TROUBLES_MAX:
                self.troubles.append(text)


def _discard(
    index: dict[Shape, dict[int, None]] | dict[tuple[str, Molecule], dict[int, None]],
    key: tuple[object, ...],
    number: int,
) -> None:
    numbers = index[key]  # type: ignore[index]
    del numbers[number]
    if not numbers:
        del index[key]  # type: ignore[arg-type]


def _plan(rule: Rule) -> _Plan:
    parts: list[Term] = []
    stack = [rule.condition] if rule.condition is not None else []
    while stack:
        one = stack.pop()
        if isinstance(one, Operation) and one.operator == "and":
            stack.extend(reversed(one.operands))
        else:
            parts.append(one)
    named = tuple(
        (part, frozenset(t.name for t in _inside(part) if isinstance(t, Variable | Rest)))
        for part in parts
    )
    return _Plan(rule, tuple(map(shape_of, rule.patterns)), named)


def _bind(variable: Variable, molecule: Molecule, bound: Bindings) -> Bindings | None:
    """The bindings, with this variable; None if it is bound to another molecule, or has another
    type."""
    if variable.name in bound:
        return bound if typed(bound[variable.name]) == typed(molecule) else None
    if variable.type and not _is_a(molecule, variable.type):
        return None
    return {**bound, variable.name: molecule}


def _divided(patterns: tuple[Term, ...]) -> tuple[tuple[Term, ...], Rest | None]:
    rest = next((p for p in patterns if isinstance(p, Rest)), None)
    return tuple(p for p in patterns if not isinstance(p, Rest)), rest


def _fits(single: int, molecules: int, rest: bool) -> bool:
    """Whether there is a molecule for each pattern, and, without a rest, a pattern for each."""
    return single <= molecules if rest else single == molecules


def _different(molecules: tuple[Molecule, ...]) -> Iterator[tuple[int, Molecule]]:
    """Each molecule once, with the index where it comes first."""
    tried: set[tuple[str, Molecule]] = set()
    for index, molecule in enumerate(molecules):
        if typed(molecule) not in tried:
            tried.add(typed(molecule))
            yield index, molecule


def _filled(term: Term, bound: Bindings) -> Molecule | None:
    """The only molecule that a pattern can match, if there is one (in the cheap cases)."""
    if isinstance(term, Variable):
        return bound.get(term.name)
    if isinstance(term, bool | int | float | str | Symbol | Rule):
        return term
    return None


def _is_a(molecule: Molecule, kind: str) -> bool:
    if kind[:1].isupper():  # a compound with that head
        head = molecule.parts[0] if isinstance(molecule, Compound) else None
        return isinstance(head, Symbol) and head.name == kind
    return type_of(molecule) == kind
