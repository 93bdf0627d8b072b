"""The notation of seed 000 (HOCL): a parser, and a printer whose output parses to the same again.

    let max = replace x::int, y::int by x if x >= y in <max, 2, 4, 5, 7, 9>

Words that begin with a capital letter are symbols. In rules all other words are variables (`x`,
`x::int`, `t::TASK` for a compound whose head is TASK); outside rules they are symbols, too. `?w`
stands for the rest of a solution. `//` begins a comment. Both `<…>` and `⟨…⟩` enclose solutions;
a comparison inside a solution needs parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
TERM_DEPTH_MAX = 100  # also of sums and products, which need no parentheses
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
#: how tightly operators bind, for printing
_BINDING = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(_COMPARISONS, 4)}
_BINDING |= {"+": 5, "-": 5, "*": 6, "/": 6, "%": 6, "negative": 7}


class ChemistryError(ValueError):
    """An error in the notation, and where it is."""

    def __init__(self, text: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line}, column {column}: {text}" if line else text)
        self.text, self.line, self.column = text, line, column


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Program:
    """Rules by name, and the solution they apply to."""

    rules: dict[str, Rule]
    solution: Solution


def read(text: str) -> Program:
    """A solution; before it, there may be definitions and `in`, or a single rule and `in`."""
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
    molecule = reader.molecule()
    reader.end()
    return molecule


class _NotationReader:
    def __init__(self, text: str) -> None:
        if len(text) > TEXT_MAX:
            raise ChemistryError(f"the text is longer than {TEXT_MAX:,} characters")
        self._text = text
        self._tokens = list(self._read_tokens())
        self._next = 0
        self._depth = 0
        self._in_rule = False
        self._rules: dict[str, Rule] = {}

    def _read_tokens(self) -> list[_Token]:
        tokens = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise self._error(f"unexpected character {self._text[at]!r}", at)
            if match.lastgroup != "space":
                kind = str(match.lastgroup)
                tokens.append(_Token(kind, _SAME.get(match[0], match[0]), at))
            at = match.end()
        tokens.append(_Token("end", "the end", len(self._text)))
        return tokens

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
            raise self._error(f"expected {text!r}, not {self._peek.text!r}")

    def _name(self, what: str) -> str:
        if self._peek.kind != "word" or "." in self._peek.text:
            raise self._error(f"expected {what}, not {self._peek.text!r}")
        self._next += 1
        return self._tokens[self._next - 1].text

    def end(self) -> None:
        if self._peek.kind != "end":
            raise self._error(f"unexpected {self._peek.text!r} after the end")

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
            raise self._error("a program needs a solution: <…>", 0)
        return Program(self._rules, Solution((*first, *solution.molecules)))

    def definitions(self) -> dict[str, Rule]:
        while self._take("let"):
            at = self._peek.at
            name = self._name("a rule's name")
            if name in self._rules:
                raise self._error(f"rule {name} is defined twice", at)
            self._expect("=")
            self._rules[name] = replace(self.rule(), name=name)
        return self._rules

    def rule(self) -> Rule:
        kind = self._take("replace", "replace-one")
        if kind is None:
            raise self._error(f"expected 'replace', not {self._peek.text!r}")
        if self._in_rule:
            raise self._error("a rule inside a rule must have a name: define it with let")
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
        if self._is(*ends) or self._peek.kind == "end":
            return []
        return self._separated(self._term)

    def _check_depth(self, term: Term, at: int) -> None:
        if depth_of(term) > TERM_DEPTH_MAX:
            raise self._error(TOO_DEEP, at)

    def _check(self, rule: Rule, at: int) -> None:
        if not rule.patterns:
            raise self._error("a rule consumes at least one molecule", at)
        holes: list[Variable | Rest] = []
        for pattern in rule.patterns:
            holes += self._holes(pattern, at)
        for product in rule.products:
            self._check_holes(product, holes, at)
        if rule.condition is not None:
            self._check_holes(rule.condition, holes, at)

    def _check_holes(self, term: Term, known: list[Variable | Rest], at: int) -> None:
        """Products and conditions use the holes of the patterns."""
        names = {hole.name for hole in known}
        rests = {hole.name for hole in known if _may_be_rest(hole)}
        for hole in _inside(term):
            if isinstance(hole, Variable | Rest) and hole.name not in names:
                raise self._error(f"{hole.name} is not defined: no pattern has it", at)
            if isinstance(hole, Rest) and hole.name not in rests:
                raise self._error(f"{hole.name} stands for one molecule, not for a rest", at)

    def _holes(self, pattern: Term, at: int) -> list[Variable | Rest]:
        terms = _inside(pattern)
        if any(isinstance(term, Operation | Call) for term in terms):
            raise self._error("a pattern can't compute: put the condition after 'if'", at)
        if isinstance(pattern, Rest):
            raise self._error(f"?{pattern.name} stands for the rest of a solution: <…, ?w>", at)
        return [term for term in terms if isinstance(term, Variable | Rest)]

    # ----------------------------------------------------------------- molecules

    def molecule(self) -> Molecule:
        at = self._peek.at
        term = self._term()
        self._check_depth(term, at)
        if any(isinstance(t, Variable | Rest | Operation) for t in _inside(term)):
            raise self._error("variables and operators are allowed inside rules only", at)
        return term  # type: ignore[return-value]

    def _term(self) -> Term:
        """A molecule with holes: `a:b:c`."""
        self._deeper()
        at = self._peek.at
        parts = [self._sum()]
        while self._take(":"):
            parts.append(self._sum())
        for part in parts:  # checked now: a compound of too deep parts could not even be built
            self._check_depth(part, at)
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Compound(tuple(parts))  # type: ignore[arg-type]

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"nested more than {DEPTH_MAX} levels deep")

    def _row(self, one: Callable[[], Term], *operators: str) -> Term:
        """`1 + 1 + …` nests, too, without a parenthesis: so its steps are counted first."""
        at = self._peek.at
        term, steps = one(), 0
        while operator := self._take(*operators):
            steps += 1
            if steps > TERM_DEPTH_MAX:
                raise self._error(TOO_DEEP, at)
            term = Operation(operator, (term, one()))
        return term

    def _condition(self) -> Term:
        return self._row(self._both, "or")

    def _both(self) -> Term:
        return self._row(self._negated, "and")

    def _negated(self) -> Term:
        if self._take("not"):
            self._deeper()
            operand = self._negated()
            self._depth -= 1
            return Operation("not", (operand,))
        term = self._term()
        operator = self._take(*_COMPARISONS)
        return Operation(operator, (term, self._term())) if operator else term

    def _sum(self) -> Term:
        return self._row(self._product, "+", "-")

    def _product(self) -> Term:
        return self._row(self._single, "*", "/", "%")

    def _single(self) -> Term:
        if self._take("-"):
            return self._negative()
        if self._take("("):
            inner = self._condition()
            self._expect(")")
            return inner
        if self._take("<"):
            return self._solution()
        if self._take("?"):
            return Rest(self._name("a name after '?'"))
        if word := self._take("true", "false"):
            return word == "true"
        token = self._peek
        if token.kind not in ("number", "text", "word"):
            raise self._error(f"expected a molecule, not {token.text!r}")
        self._next += 1
        if token.kind == "number":
            return self._number(token)
        if token.kind == "text":
            return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), token.text[1:-1])
        return self._word(token)

    def _negative(self) -> Term:
        self._deeper()
        operand = self._single()
        self._depth -= 1
        if isinstance(operand, int | float) and not isinstance(operand, bool):
            return -operand
        return Operation("negative", (operand,))

    def _number(self, token: _Token) -> int | float:
        value = float(token.text)
        if value >= NUMBER_MAX:
            raise self._error("a number must be less than 2 to the power of 63", token.at)
        return int(token.text) if token.text.isdigit() else value

    def _solution(self) -> Solution:
        terms = [] if self._is(">") else self._separated(self._term)
        self._expect(">")
        return Solution(tuple(terms))  # type: ignore[arg-type]

    def _separated(self, one: Callable[[], Term]) -> list[Term]:
        """One or more, with commas in between."""
        terms = [one()]
        while self._take(","):
            terms.append(one())
        return terms

    def _word(self, token: _Token) -> Term:
        if self._take("("):
            return self._call(token)
        if "." in token.text:
            raise self._error(f"{token.text!r}: a name with dots must be a call: …(…)", token.at)
        if token.text in self._rules:
            return self._rules[token.text]
        if not self._in_rule or not _is_variable(token.text):
            return Symbol(token.text)
        return Variable(token.text, self._type() if self._take("::") else "")

    def _call(self, token: _Token) -> Call:
        arguments: list[Term] = []
        owner, _, method = token.text.rpartition(".")
        if owner and _is_variable(owner) and owner != "system" and self._in_rule:
            arguments.append(Variable(owner))  # t.fits(r) is fits(t, r)
        else:
            method = token.text
        if not self._is(")"):
            arguments += self._separated(self._condition)
        self._expect(")")
        return Call(method, tuple(arguments))  # type: ignore[arg-type]

    def _type(self) -> str:
        at = self._peek.at
        name = self._name("a type")
        if name not in TYPES and _is_variable(name):
            raise self._error(f"unknown type {name!r}; the types are {', '.join(TYPES)}", at)
        return name


def _is_variable(word: str) -> bool:
    return not word[:1].isupper()


def _may_be_rest(hole: Variable | Rest) -> bool:
    return isinstance(hole, Rest) or hole.type == "solution"


def _inside(term: Term) -> list[Term]:
    """The term and all terms that it consists of; without those inside rules."""
    terms: list[Term] = []
    stack = [term]
    while stack:
        one = stack.pop()
        terms.append(one)
        if isinstance(one, Compound):
            stack.extend(one.parts)
        elif isinstance(one, Solution):
            stack.extend(one.molecules)
        elif isinstance(one, Call):
            stack.extend(one.arguments)
        elif isinstance(one, Operation):
            stack.extend(one.operands)
    return terms


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
    """`tight`: how tightly the operators around it bind."""
    if isinstance(term, Operation):
        return _show_operation(term, tight)
    return _SHOWN[type(term)](term)


def _show_operation(term: Operation, tight: int) -> str:
    binding = _BINDING[term.operator]
    if term.operator in ("not", "negative"):
        sign = "not " if term.operator == "not" else "-"
        text = sign + _show(term.operands[0], binding)
    else:
        left, right = term.operands
        text = f"{_show(left, binding)} {term.operator} {_show(right, binding + 1)}"
    return f"({text})" if binding < tight else text


def _show_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'


def _show_compound(term: Compound) -> str:
    return ":".join(_show(part, 8 if isinstance(part, Compound) else 5) for part in term.parts)


_SHOWN: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",
    int: repr,
    float: repr,
    str: _show_text,
    Symbol: lambda symbol: symbol.name,
    Variable: lambda hole: f"{hole.name}::{hole.type}" if hole.type else hole.name,
    Rest: lambda rest: f"?{rest.name}",
    Compound: _show_compound,
    Solution: lambda solution: "<" + ", ".join(_show(m, 5) for m in solution.molecules) + ">",
    Rule: lambda rule: rule.name or f"({_whole(rule)})",
    Call: lambda call: f"{call.name}({', '.join(_show(a, 0) for a in call.arguments)})",
}
