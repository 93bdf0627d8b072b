"""Where molecules react: until nothing more can happen (*inertia*), and again when more arrive.

Rules of the machine, after seed 000, section 2:
- A reaction captures all its reactants at once, or does not take place: no molecule is in two.
- Which reaction comes next is open; here the molecule that came first is tried first, so that a run
  can be repeated.
- Rules are molecules: they are consumed and produced like others. One made by `replace-one` is used
  up by its first reaction. A rule does not consume itself.
- A solution inside of a molecule comes to rest before anything outside sees what is in it.

How it is quick: a molecule is tried once, when it comes, at each place of each rule that its shape
fits; what it is tried with is looked up by shape, by value, and by parts of compounds that are
constant or bound already. What did not react then can only react with what comes later. The parts
of a condition are looked at as soon as all they speak of is bound.

Everything is bounded: molecules, how large and how deep each is, reactions, and the steps on the
way to rest, those in solutions inside of molecules among them. A step is a molecule or a term
looked at; a large one counts for more. A rule whose products can't be computed, or are too large,
does not react, and `troubles` says so.
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
STEPS_MAX = 2_000_000  # until it is at rest
SIZE_MAX = 100_000
DEPTH_MAX = 50
TROUBLES_MAX = 20
NESTED_MAX = 8


@dataclass(slots=True)
class Budget:
    """What may happen until all is at rest, inside of molecules, too."""

    reactions: int
    steps: int
    reactions_max: int = 0
    steps_max: int = 0

    def __post_init__(self) -> None:
        self.reactions_max, self.steps_max = self.reactions, self.steps

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise ChemistryError(f"it is not at rest after {self.steps_max:,} steps")

    def react(self) -> None:
        self.reactions -= 1
        if self.reactions < 0:
            raise ChemistryError(f"it is not at rest after {self.reactions_max:,} reactions")


@dataclass(slots=True)
class _Plan:
    """A rule, prepared: its condition in parts, each with what it speaks of."""

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
        """Since it was last let react."""
        return self._budget.steps_max - self._budget.steps

    @property
    def inert(self) -> bool:
        return not self._fresh

    # ----------------------------------------------------------------- what floats

    def add(self, molecule: Molecule) -> None:
        if len(self._floating) >= self._molecules_max:
            raise ChemistryError(f"a solution has at most {self._molecules_max:,} molecules")
        self._budget.spend(1 + size_of(molecule) // SIZE_PER_STEP)
        molecule = self._at_rest(molecule)
        self._next += 1
        id = self._next
        self._floating[id] = molecule
        self._by_value.setdefault(typed(molecule), {})[id] = None
        for shape in shapes_of(molecule):
            self._by_shape.setdefault(shape, {})[id] = None
            for (known, part), index in self._by_part.items():
                if known == shape and isinstance(molecule, Compound):
                    index.setdefault(typed(molecule.parts[part]), {})[id] = None
        if isinstance(molecule, Rule):
            self._plans[id] = _plan(molecule)
        self._fresh.append(id)

    def take(self, call: str) -> list[Call]:
        """What is to be done outside, by that name; it is in here no more."""
        calls = [i for i in self._by_shape.get(("call",), ()) if self._named(i) == call]
        found = [self._floating[i] for i in calls]
        for id in calls:
            self._remove(id)
        return found  # type: ignore[return-value]

    def _named(self, id: int) -> str:
        molecule = self._floating[id]
        return molecule.name if isinstance(molecule, Call) else ""

    def _at_rest(self, molecule: Molecule) -> Molecule:
        """With every solution in it inert."""
        if isinstance(molecule, Compound):
            if not any(isinstance(p, Compound | Solution) for p in molecule.parts):
                return molecule
            return Compound(tuple(map(self._at_rest, molecule.parts)))
        if isinstance(molecule, Solution):
            if not any(isinstance(m, Rule | Compound | Solution) for m in molecule.molecules):
                return molecule
            if self._depth >= NESTED_MAX:
                raise ChemistryError(f"solutions more than {NESTED_MAX} deep in each other")
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

    def _remove(self, id: int) -> None:
        molecule = self._floating.pop(id)
        self._plans.pop(id, None)
        _discard(self._by_value, typed(molecule), id)
        for shape in shapes_of(molecule):
            _discard(self._by_shape, shape, id)
            for (known, part), index in self._by_part.items():
                if known == shape and isinstance(molecule, Compound):
                    _discard(index, typed(molecule.parts[part]), id)

    # ----------------------------------------------------------------- reacting

    def react(self, most: int = REACTIONS_MAX, steps_max: int = STEPS_MAX) -> int:
        """Until nothing more happens; how many reactions that were."""
        self._budget = Budget(most, steps_max)
        return self._settle()

    def happened(self, molecule: Molecule, budget: Budget) -> int:
        """One more comes, and all comes to rest: within this."""
        self._budget = budget
        self.add(molecule)
        return self._settle()

    def _settle(self) -> int:
        start = self.reactions
        while self._fresh:
            id = self._fresh.popleft()
            while id in self._floating and self._react_with(id):
                pass
        return self.reactions - start

    def _react_with(self, id: int) -> bool:
        """One reaction that this molecule has a part in, if there is any."""
        molecule = self._floating[id]
        shapes = set(shapes_of(molecule))
        for rule_id, plan in list(self._plans.items()):
            if rule_id not in self._floating:
                continue
            if rule_id == id:  # a rule that has just come: with all that is here
                if self._try(rule_id, plan, None, 0):
                    return True
                continue
            for place, shape in enumerate(plan.shapes):
                if shape in shapes and self._try(rule_id, plan, id, place):
                    return True
        return False

    def _try(self, rule_id: int, plan: _Plan, id: int | None, place: int) -> bool:
        order = [place, *(n for n in range(len(plan.shapes)) if n != place)]
        for captured, bound in self._search(rule_id, plan, order, {}, {}, id):
            try:
                made = self._made(plan.rule, bound)
            except Incomputable as why:
                self._trouble(f"{plan.rule.name or show(plan.rule)} makes nothing: {why}")
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
                raise Incomputable("what it makes is too large")
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
        """Ways to fill the places in that order, each with a molecule of its own."""
        if not order:
            yield captured, bound
            return
        place = order[0]
        pattern = plan.rule.patterns[place]
        candidates = (first,) if first is not None else self._candidates(pattern, bound)
        for id in candidates:  # nothing is taken out before the search is over
            if id in captured.values() or id == rule_id:
                continue
            for more in self._match(pattern, self._floating[id], bound):
                if self._holds(plan, bound, more):
                    yield from self._search(
                        rule_id, plan, order[1:], {**captured, place: id}, more, None
                    )

    def _holds(self, plan: _Plan, before: Bindings, now: Bindings) -> bool:
        """Those parts of the condition of which all is known now, and was not before."""
        known = now.keys()
        for part, names in plan.parts:
            fresh = names <= known and (not names or not names <= before.keys())
            if fresh and not is_true(part, now, self._functions, self._budget.spend):
                return False
        return True

    def _candidates(self, pattern: Term, bound: Bindings) -> Iterable[int]:
        """The fewest that may match."""
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
                found = self._parts(shape, part).get(typed(inner), {})
                if len(found) < size:
                    best, size = found, len(found)
        return best

    def _parts(self, shape: Shape, part: int) -> dict[tuple[str, Molecule], dict[int, None]]:
        index = self._by_part.get((shape, part))
        if index is None:  # from here on it is kept
            index = self._by_part[shape, part] = {}
            for id in self._by_shape.get(shape, ()):
                molecule = self._floating[id]
                assert isinstance(molecule, Compound)
                index.setdefault(typed(molecule.parts[part]), {})[id] = None
        return index

    def _match(self, pattern: Term, molecule: Molecule, bound: Bindings) -> Iterator[Bindings]:
        """Every way in which it matches; mostly there is one or none."""
        self._budget.spend(1 + size_of(molecule) // SIZE_PER_STEP)
        if isinstance(pattern, Variable):
            if pattern.name in bound:
                if typed(bound[pattern.name]) == typed(molecule):
                    yield bound
            elif not pattern.type or _is_a(molecule, pattern.type):
                yield {**bound, pattern.name: molecule}
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
        """Each pattern with a molecule of its own; the rest is `?w`, or there is none."""
        rest = next((p for p in patterns if isinstance(p, Rest)), None)
        single = tuple(p for p in patterns if not isinstance(p, Rest))
        if len(single) > len(molecules) or (rest is None and len(single) < len(molecules)):
            return
        if single:
            tried: set[tuple[str, Molecule]] = set()
            for index, molecule in enumerate(molecules):
                if typed(molecule) in tried:
                    continue
                tried.add(typed(molecule))
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
    id: int,
) -> None:
    found = index[key]  # type: ignore[index]
    del found[id]
    if not found:
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


def _filled(term: Term, bound: Bindings) -> Molecule | None:
    """What a pattern stands for, if it can be one molecule only (in cheap cases)."""
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
