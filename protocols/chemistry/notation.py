"""The notation of seed 000 (HOCL): read, and printed so that it reads the same again.

    let max = replace x::int, y::int by x if x >= y in <max, 2, 4, 5, 7, 9>

Words that begin with a capital letter are symbols. In rules all other words are variables (`x`,
`x::int`, `t::TASK` for a compound whose head is TASK), outside of rules they are symbols too. `?w`
stands for the rest of a solution. `//` begins a comment. Both `<…>` and `⟨…⟩` enclose solutions;
inside of one a comparison needs parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from .molecules import (
    TYPES,
    Call,
    Compound,
    Molecule,
    Operation,
    Rest,
    Rule,
    Solution,
    Symbol,
    Term,
    Variable,
    depth_of,
)

TEXT_MAX = 200_000
DEPTH_MAX = 40
TERM_DEPTH_MAX = 100  # also of sums and products, which take no parentheses
TOO_DEEP = f"an expression of more than {TERM_DEPTH_MAX} steps in a row"
NUMBER_MAX = 2**63

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<number>\d+(\.\d+)?([eE][+-]?\d+)?)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<keyword>(?:replace-one|replace|by|if|in|let|and|or|not|true|false)(?![\w.-]))
    |(?P<word>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    |(?P<sign>::|<=|>=|!=|==|[≤≥≠⟨⟩?:,<>=+\-*/%()])""",
    re.VERBOSE,
)
_SAME = {"≤": "<=", "≥": ">=", "≠": "!=", "==": "=", "⟨": "<", "⟩": ">"}
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
_COMPARISONS = ("<", "<=", ">", ">=", "=", "!=")
#: how tightly operators bind, in what is printed
_BINDING = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(_COMPARISONS, 4)}
_BINDING |= {"+": 5, "-": 5, "*": 6, "/": 6, "%": 6, "negative": 7}


class ChemistryError(ValueError):
    """Where it is, and what is wrong there."""

    def __init__(self, text: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {text}" if line else text)
        self.text, self.line, self.column = text, line, column


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Program:
    """Rules by their names, and the solution that it is about."""

    rules: dict[str, Rule]
    solution: Solution


def read(text: str) -> Program:
    """Definitions and `in`, or just a rule and `in`, before the solution; or nothing before it."""
    return _NotationReader(text).program()


def read_rule(text: str) -> Rule:
    reader = _NotationReader(text)
    rule = reader.rule()
    reader.end()
    return rule


def read_rules(text: str) -> dict[str, Rule]:
    """Definitions alone: `let name = rule`, any number of them."""
    reader = _NotationReader(text)
    rules = reader.definitions()
    reader.end()
    return rules


def read_molecule(text: str) -> Molecule:
    reader = _NotationReader(text)
    found = reader.molecule()
    reader.end()
    return found


class _NotationReader:
    def __init__(self, text: str) -> None:
        if len(text) > TEXT_MAX:
            raise ChemistryError(f"longer than {TEXT_MAX:,} characters")
        self._text = text
        self._tokens = list(self._read_tokens())
        self._next = 0
        self._depth = 0
        self._in_rule = False
        self._rules: dict[str, Rule] = {}

    def _read_tokens(self) -> list[_Token]:
        found = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise self._error(f"{self._text[at]!r} means nothing here", at)
            if match.lastgroup != "space":
                kind = str(match.lastgroup)
                found.append(_Token(kind, _SAME.get(match[0], match[0]), at))
            at = match.end()
        found.append(_Token("end", "the end", len(self._text)))
        return found

    def _error(self, text: str, at: int | None = None) -> ChemistryError:
        at = self._peek.at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        return ChemistryError(text, line, at - self._text.rfind("\n", 0, at))

    # ----------------------------------------------------------------- tokens

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _is(self, *texts: str) -> bool:
        return self._peek.kind in ("sign", "keyword") and self._peek.text in texts

    def _take(self, *texts: str) -> str | None:
        if self._is(*texts):
            self._next += 1
            return self._tokens[self._next - 1].text
        return None

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._error(f"{text!r} is expected, not {self._peek.text!r}")

    def _name(self, what: str) -> str:
        if self._peek.kind != "word" or "." in self._peek.text:
            raise self._error(f"{what} is expected, not {self._peek.text!r}")
        self._next += 1
        return self._tokens[self._next - 1].text

    def end(self) -> None:
        if self._peek.kind != "end":
            raise self._error(f"{self._peek.text!r} comes after the end")

    # ----------------------------------------------------------------- programs

    def program(self) -> Program:
        first: list[Molecule] = []
        if self._is("let"):
            self.definitions()
            self._expect("in")
        elif self._is("replace", "replace-one"):
            first.append(self.rule())
            self._expect("in")
        solution = self.molecule()
        self.end()
        if not isinstance(solution, Solution):
            raise self._error("a program is about a solution: <…>", 0)
        return Program(self._rules, Solution((*first, *solution.molecules)))

    def definitions(self) -> dict[str, Rule]:
        while self._take("let"):
            at = self._peek.at
            name = self._name("a rule's name")
            if name in self._rules:
                raise self._error(f"{name} is defined twice", at)
            self._expect("=")
            self._rules[name] = replace(self.rule(), name=name)
        return self._rules

    def rule(self) -> Rule:
        kind = self._take("replace", "replace-one")
        if kind is None:
            raise self._error(f"'replace' is expected, not {self._peek.text!r}")
        if self._in_rule:
            raise self._error("a rule inside of a rule has a name: define it with let")
        self._in_rule = True
        start = self._peek.at
        patterns = self._listed("by")
        self._expect("by")
        products = self._listed("if", "in", "let")
        condition = self._condition() if self._take("if") else None
        self._in_rule = False
        rule = Rule(tuple(patterns), tuple(products), condition, kind == "replace-one")
        self._check_depth(rule, start)
        self._check(rule, start)
        return rule

    def _listed(self, *ends: str) -> list[Term]:
        found: list[Term] = []
        if self._is(*ends) or self._peek.kind == "end":
            return found
        while True:
            found.append(self._term())
            if not self._take(","):
                return found

    def _check_depth(self, found: Term, at: int) -> None:
        if depth_of(found) > TERM_DEPTH_MAX:
            raise self._error(TOO_DEEP, at)

    def _check(self, rule: Rule, at: int) -> None:
        if not rule.patterns:
            raise self._error("a rule consumes at least one molecule", at)
        bound: set[str] = set()
        rests: set[str] = set()  # of these, what may be a solution
        for pattern in rule.patterns:
            wrong = next((t for t in _inside(pattern) if isinstance(t, Operation | Call)), None)
            if wrong is not None:
                raise self._error("a pattern computes nothing: write that behind 'if'", at)
            if isinstance(pattern, Rest):
                raise self._error(f"?{pattern.name} stands for the rest of a solution: <…, ?w>", at)
            holes = [t for t in _inside(pattern) if isinstance(t, Variable | Rest)]
            bound |= {t.name for t in holes}
            rests |= {t.name for t in holes if isinstance(t, Rest) or t.type == "solution"}
        used = [*rule.products, *([rule.condition] if rule.condition is not None else [])]
        for term in used:
            for found in _inside(term):
                if isinstance(found, Variable | Rest) and found.name not in bound:
                    raise self._error(f"{found.name} stands for nothing: no pattern has it", at)
                if isinstance(found, Rest) and found.name not in rests:
                    raise self._error(f"{found.name} stands for one molecule, and for no rest", at)

    # ----------------------------------------------------------------- molecules

    def molecule(self) -> Molecule:
        at = self._peek.at
        found = self._term()
        self._check_depth(found, at)
        if any(isinstance(t, Variable | Rest | Operation) for t in _inside(found)):
            raise self._error("outside of a rule there is nothing to compute", at)
        return found  # type: ignore[return-value]

    def _term(self) -> Term:
        """A molecule with holes: `a:b:c`."""
        self._deeper()
        at = self._peek.at
        parts = [self._sum()]
        while self._take(":"):
            parts.append(self._sum())
        for part in parts:  # what is too deep could not even be put together
            self._check_depth(part, at)
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Compound(tuple(parts))  # type: ignore[arg-type]

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"more than {DEPTH_MAX} levels deep")

    def _row(self, one: Callable[[], Term], *operators: str) -> Term:
        """`1 + 1 + …` nests, too, without a parenthesis: counted before it is built."""
        at = self._peek.at
        found, steps = one(), 0
        while operator := self._take(*operators):
            steps += 1
            if steps > TERM_DEPTH_MAX:
                raise self._error(TOO_DEEP, at)
            found = Operation(operator, (found, one()))
        return found

    def _condition(self) -> Term:
        return self._row(self._both, "or")

    def _both(self) -> Term:
        return self._row(self._negated, "and")

    def _negated(self) -> Term:
        if self._take("not"):
            self._deeper()
            found = self._negated()
            self._depth -= 1
            return Operation("not", (found,))
        found = self._term()
        operator = self._take(*_COMPARISONS)
        return Operation(operator, (found, self._term())) if operator else found

    def _sum(self) -> Term:
        return self._row(self._product, "+", "-")

    def _product(self) -> Term:
        return self._row(self._single, "*", "/", "%")

    def _single(self) -> Term:
        token = self._peek
        if self._take("-"):
            self._deeper()
            found = self._single()
            self._depth -= 1
            if isinstance(found, int | float) and not isinstance(found, bool):
                return -found
            return Operation("negative", (found,))
        if self._take("("):
            inner = self._condition()
            self._expect(")")
            return inner
        if self._take("<"):
            return self._solution()
        if self._take("?"):
            return Rest(self._name("a name behind '?'"))
        if word := self._take("true", "false"):
            return word == "true"
        if token.kind == "number":
            self._next += 1
            value = float(token.text)
            if value >= NUMBER_MAX:
                raise self._error("a number is below 2 to the power of 63", token.at)
            return int(token.text) if token.text.isdigit() else value
        if token.kind == "text":
            self._next += 1
            return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), token.text[1:-1])
        if token.kind == "word":
            self._next += 1
            return self._word(token)
        raise self._error(f"a molecule is expected, not {token.text!r}")

    def _solution(self) -> Solution:
        found: list[Term] = []
        if not self._is(">"):
            while True:
                found.append(self._term())
                if not self._take(","):
                    break
        self._expect(">")
        return Solution(tuple(found))  # type: ignore[arg-type]

    def _word(self, token: _Token) -> Term:
        if self._take("("):
            arguments: list[Term] = []
            owner, _, method = token.text.rpartition(".")
            if owner and _is_variable(owner) and owner != "system" and self._in_rule:
                arguments.append(Variable(owner))  # t.fits(r) is fits(t, r)
            else:
                method = token.text
            if not self._is(")"):
                while True:
                    arguments.append(self._condition())
                    if not self._take(","):
                        break
            self._expect(")")
            return Call(method, tuple(arguments))  # type: ignore[arg-type]
        if "." in token.text:
            raise self._error(f"{token.text!r}: a name with dots is called: …(…)", token.at)
        if token.text in self._rules:
            return self._rules[token.text]
        if not self._in_rule or not _is_variable(token.text):
            return Symbol(token.text)
        kind = ""
        if self._take("::"):
            at = self._peek.at
            kind = self._name("a type")
            if kind not in TYPES and _is_variable(kind):
                raise self._error(f"{kind!r} is no type; there are: {', '.join(TYPES)}", at)
        return Variable(token.text, kind)


def _is_variable(word: str) -> bool:
    return not word[:1].isupper()


def _inside(term: Term) -> list[Term]:
    """It, and all that it is made of; not what is inside of rules."""
    found: list[Term] = []
    stack = [term]
    while stack:
        one = stack.pop()
        found.append(one)
        if isinstance(one, Compound):
            stack.extend(one.parts)
        elif isinstance(one, Solution):
            stack.extend(one.molecules)
        elif isinstance(one, Call):
            stack.extend(one.arguments)
        elif isinstance(one, Operation):
            stack.extend(one.operands)
    return found


# --------------------------------------------------------------------------- printing


def show(term: Term) -> str:
    return _show(term, 0)


def show_program(program: Program) -> str:
    lines = [f"let {name} = {_whole(rule)}" for name, rule in program.rules.items()]
    solution = program.solution
    if not lines and solution.molecules and isinstance(solution.molecules[0], Rule):
        lines = [_whole(solution.molecules[0])]
        solution = Solution(solution.molecules[1:])
    return "\n".join([*lines, f"in {show(solution)}"]) if lines else show(solution)


def _whole(rule: Rule) -> str:
    kind = "replace-one" if rule.once else "replace"
    taken = ", ".join(_show(p, 0) for p in rule.patterns)
    made = "".join(" " + ", ".join(_show(p, 0) for p in rule.products)) if rule.products else ""
    condition = f" if {_show(rule.condition, 0)}" if rule.condition is not None else ""
    return f"{kind} {taken} by{made}{condition}"


def _show(term: Term, tight: int) -> str:
    if isinstance(term, bool):
        return "true" if term else "false"
    if isinstance(term, int | float):
        return repr(term)
    if isinstance(term, str):
        escaped = term.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'
    if isinstance(term, Symbol):
        return term.name
    if isinstance(term, Variable):
        return f"{term.name}::{term.type}" if term.type else term.name
    if isinstance(term, Rest):
        return f"?{term.name}"
    if isinstance(term, Compound):
        return ":".join(_show(part, 8 if isinstance(part, Compound) else 5) for part in term.parts)
    if isinstance(term, Solution):
        return "<" + ", ".join(_show(m, 5) for m in term.molecules) + ">"
    if isinstance(term, Rule):
        return term.name or f"({_whole(term)})"
    if isinstance(term, Call):
        return f"{term.name}({', '.join(_show(a, 0) for a in term.arguments)})"
    binding = _BINDING[term.operator]
    if term.operator in ("not", "negative"):
        sign = "not " if term.operator == "not" else "-"
        text = sign + _show(term.operands[0], binding)
    else:
        left, right = term.operands
        text = f"{_show(left, binding)} {term.operator} {_show(right, binding + 1)}"
    return f"({text})" if binding < tight else text
