"""Workflow documents: what is read, and every mistake with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from valence.workflow import plan, quantities, tree, wfformat
from valence.workflow.document import from_value, parse
from valence.workflow.problems import DocumentError

EXAMPLES = Path(__file__).parent.parent / "examples"
INSTANCES = Path(__file__).parent.parent.parent / "shared" / "workflows"

WORD_COUNT = """
name: word-count
strategy: auto
deadline: 10m
inputs:
  words.txt: {text: "to be or not to be"}
tasks:
  split:
    command: [sh, -c, "split -n l/4 words.txt part."]
    inputs: [words.txt]
    outputs: [part.aa, part.ab, part.ac, part.ad]
  count:
    foreach: [aa, ab, ac, ad]
    command: [sh, -c, "wc -w < part.{item} > count.{item}"]
    inputs: ["part.{item}"]
    outputs: ["count.{item}"]
    needs: {cpus: 1, memory: 128MiB, arch: x86_64}
    runtime: 2s
    timeout: 1m
    retries: 2
  total:
    command: [sh, -c, "cat count.* | awk '{s+=$1} END {print s}' > total"]
    inputs: ["count.*"]
    outputs: [total]
    after: []
  square: {call: "operator:mul", args: [7, 7]}
  plus:   {call: "operator:add", args: [{result: square}, 1]}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as error:
        parse(text)
    return [f"{p.place}: {p.message}" for p in error.value.problems]


def test_the_contracts_document() -> None:
    workflow = parse(WORD_COUNT)
    assert list(workflow.tasks) == [
        "split", "square", "count[aa]", "count[ab]", "count[ac]", "count[ad]", "plus", "total",
    ]  # fmt: skip
    count = workflow.tasks["count[ab]"]
    assert count.command == ("sh", "-c", "wc -w < part.ab > count.ab")
    assert count.needs.memory_bytes == 128 * 2**20
    assert (count.runtime_s, count.timeout_s, count.retries) == (2.0, 60.0, 2)
    assert workflow.tasks["total"].inputs == ("count.aa", "count.ab", "count.ac", "count.ad")
    assert workflow.tasks["total"].command[2] == "cat count.* | awk '{s+=$1} END {print s}' > total"
    assert workflow.parents["total"] == ("count[aa]", "count[ab]", "count[ac]", "count[ad]")
    assert workflow.parents["plus"] == ("square",)
    assert workflow.final_files() == ["total"]
    assert plan.levels(workflow)["total"] == 2
    assert plan.upward_ranks(workflow)["split"] == 4.0


def test_foreach_by_number_by_list_and_by_combination() -> None:
    workflow = parse(
        """
name: sweep
tasks:
  n: {foreach: 3, call: "math:sqrt", args: ["{item}"]}
  all: {call: "builtins:sum", args: [{result: n}]}
  s: {foreach: {x: [1, 2], y: [a, b]}, command: [echo, "{x}-{y}", "{z}"]}
"""
    )
    assert workflow.tasks["n[2]"].args == (2,)
    assert workflow.tasks["all"].references["n"].tasks == ("n[0]", "n[1]", "n[2]")
    assert workflow.tasks["all"].references["n"].many
    assert workflow.tasks["s[x=2,y=a]"].command == ("echo", "2-a", "{z}")


def test_yaml_means_what_people_mean() -> None:
    value, _ = tree.read("a: [no, 12:30, 2024-01-01, 1e3, 010, ~, true, '5', 0x10]")
    assert value["a"] == ["no", "12:30", "2024-01-01", 1000.0, 10, None, True, "5", "0x10"]


CASES = [
    ("", "", "empty"),
    ("[1, 2]", "", "a workflow document must be a mapping"),
    ("a: b: c", "", "not valid YAML"),
    ("a: [1, 2", "", "not valid YAML"),
    ("name: x\nname: y\ntasks: {a: {command: [x]}}", "/name", "duplicate key 'name'"),
    ("tasks: {a: {command: [x]}}", "/name", "missing"),
    ("name: x", "/tasks", "missing"),
    ("name: x\ntasks: {}", "/tasks", "at least 1 entry"),
    ('name: "x\\e[31m"\ntasks: {a: {command: [x]}}', "/name", "control characters"),
    ("name: 3\ntasks: {a: {command: [x]}}", "/name", "name must be text"),
    ("name: ''\ntasks: {a: {command: [x]}}", "/name", "at least 1"),
    ("name: x\ntask: 1\ntasks: {a: {command: [x]}}", "/task", "did you mean 'tasks'"),
    ("name: x\ntasks: {a: 3}", "/tasks/a", "a task must be a mapping, not 3"),
    ("name: x\ntasks: {a: {}}", "/tasks/a", "either a command or a call"),
    ("name: x\ntasks: {a: {command: [x], call: 'm:f'}}", "/tasks/a", "either a command or a call"),
    ("name: x\ntasks: {a: {command: true}}", "/tasks/a/command",
     'command must be a list or text; put "true" in quotes'),
    ("name: x\ntasks: {a: {command: [x], foreach: all}}", "/tasks/a/foreach", "not the text 'all'"),
    ("name: x\ntasks: {a: {command: []}}", "/tasks/a/command", "at least the program"),
    ("name: x\ntasks: {a: {command: [x, [y]]}}", "/tasks/a/command/1", "must be text, not a list"),
    ("name: x\ntasks: {a: {comand: [x]}}", "/tasks/a/comand", "did you mean 'command'"),
    ("name: x\ntasks: {'a b': {command: [x]}}", "/tasks/a b", "letters, digits"),
    ("name: x\ntasks: {a: {call: 'os.system'}}", "/tasks/a/call", "module:function"),
    ("name: x\ntasks: {a: {command: [x], args: [1]}}", "/tasks/a/args", "only a call"),
    ("name: x\ntasks: {a: {command: [x], inputs: [y]}}", "/tasks/a/inputs/0", "no task makes 'y'"),
    ("name: x\ntasks: {a: {command: [x], inputs: ['y.*']}}", "/tasks/a/inputs/0", "matches no"),
    ("name: x\ntasks: {a: {command: [x], outputs: [/etc/passwd]}}", "/tasks/a/outputs/0", "leading"),
    ("name: x\ntasks: {a: {command: [x], outputs: [../y]}}", "/tasks/a/outputs/0", "'..'"),
    ("name: x\ntasks: {a: {command: [x], outputs: ['a\\nb']}}".replace("'a", '"a').replace("b'", 'b"'),
     "/tasks/a/outputs/0", "control characters"),
    ("name: x\ntasks: {a: {command: [x], outputs: [y, y]}}", "/tasks/a/outputs/1", "duplicate file 'y'"),
    ("name: x\ntasks: {a: {command: [x], outputs: [y]}, b: {command: [x], outputs: [y]}}",
     "/tasks/b/outputs/0", "already made by a"),
    ("name: x\ninputs: {y: {text: z}}\ntasks: {a: {command: [x], outputs: [y]}}",
     "/tasks/a/outputs/0", "already an input of the workflow"),
    ("name: x\ntasks: {a: {command: [x], after: [b]}}", "/tasks/a/after/0", "unknown task 'b'"),
    ("name: x\ntasks: {a: {command: [x], after: [b]}, b: {command: [x], after: [a]}}",
     "/tasks/a", "circular dependency: a → b → a"),
    ("name: x\ntasks: {a: {command: [x], after: [a]}}", "/tasks/a", "a → a"),
    ("name: x\ntasks: {a: {call: 'm:f', args: [{result: b}]}}", "/tasks/a/args/0/result",
     "unknown task 'b'"),
    ("name: x\ntasks: {a: {call: 'm:f', kwargs: {k: [{result: b}]}}, b: {command: [x]}}",
     "/tasks/a/kwargs/k/0/result", "b is a command"),
    ("name: x\ntasks: {a: {command: [x], needs: {cpu: 1}}}", "/tasks/a/needs/cpu", "'cpus'"),
    ("name: x\ntasks: {a: {command: [x], needs: {cpus: -1}}}", "/tasks/a/needs/cpus", "cores"),
    ("name: x\ntasks: {a: {command: [x], needs: {memory: lots}}}", "/tasks/a/needs/memory", "size"),
    ("name: x\ntasks: {a: {command: [x], needs: {gpus: 1.5}}}", "/tasks/a/needs/gpus", "whole number"),
    ("name: x\ntasks: {a: {command: [x], timeout: soon}}", "/tasks/a/timeout", "duration"),
    ("name: x\ntasks: {a: {command: [x], timeout: 0}}", "/tasks/a/timeout", "longer than 0"),
    ("name: x\ntasks: {a: {command: [x], retries: -1}}", "/tasks/a/retries", "at least 0"),
    ("name: x\ntasks: {a: {command: [x], retries: many}}", "/tasks/a/retries", "whole number"),
    ("name: x\ntasks: {a: {command: [x], foreach: []}}", "/tasks/a/foreach", "makes no task"),
    ("name: x\ntasks: {a: {command: [x], foreach: [1, 1]}}", "/tasks/a/foreach/1", "already"),
    ("name: x\ntasks: {a: {command: [x], foreach: [{b: 1}]}}", "/tasks/a/foreach/0", "text or a"),
    ("name: x\ntasks: {a: {command: [x], foreach: 99999999}}", "/tasks/a/foreach", "200,000"),
    ("name: x\ntasks: {a: {command: [x], env: {VALENCE_X: 1}}}", "/tasks/a/env/VALENCE_X", "peer"),
    ("name: x\nstrategy: magic\ntasks: {a: {command: [x]}}", "/strategy", "choose from: auto, probe"),
    ("name: x\ndeadline: someday\ntasks: {a: {command: [x]}}", "/deadline", "ISO 8601"),
    ("name: x\ninputs: {y: {}}\ntasks: {a: {command: [x]}}", "/inputs/y", "exactly one"),
    ("name: x\ninputs: {y: {text: a, url: 'http://h/'}}\ntasks: {a: {command: [x]}}",
     "/inputs/y", "exactly one"),
    ("name: x\ninputs: {y: {path: z}}\ntasks: {a: {command: [x]}}", "/inputs/y/path", "PUT /v1/blobs"),
    ("name: x\ninputs: {y: {blob: z}}\ntasks: {a: {command: [x]}}", "/inputs/y/blob", "64 hexa"),
    ("name: x\ninputs: {y: {url: 'ftp://there/file'}}\ntasks: {a: {command: [x]}}",
     "/inputs/y/url", "http"),
    ("name: x\ninputs: {../y: {text: z}}\ntasks: {a: {command: [x]}}", "/inputs/..~1y", "'..'"),
    ("name: !!python/object:os.system x\ntasks: {a: {command: [x]}}", "/name", "tag"),
    ("a: &a [1]\nb: *c", "", "no anchor above"),
    ('{"name": "x", "name": "y"}', "", "duplicate key 'name'"),
    ('{"name": "\\ud800", "tasks": {"a": {"command": ["x"]}}}', "/name", "surrogate"),
    ("{" * 3000, "", ""),
    ("[" * 100000, "", "nested deeper"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "message"), CASES)
def test_a_malformed_document_is_told_where(text: str, place: str, message: str) -> None:
    found = problems(text)
    assert any(f.startswith(place + ": ") and message in f for f in found), found


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 30


def test_all_problems_come_at_once_with_their_lines() -> None:
    text = (
        "name: x\ntasks:\n  a: {command: [x], needs: {cpu: 1}}\n  b: {command: [x], after: [q]}\n"
    )
    with pytest.raises(DocumentError) as error:
        parse(text)
    assert [(p.place, p.line) for p in error.value.problems] == [
        ("/tasks/a/needs/cpu", 3),
        ("/tasks/b/after/0", 4),
    ]


def test_a_billion_laughs_are_refused() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "values" in problems("\n".join(rows))[0]


def test_limits_on_globs_and_edges() -> None:
    text = """
name: wide
tasks:
  a: {foreach: 3000, command: [x], outputs: ["f.{item}"]}
  b: {foreach: 3000, command: [x], inputs: ["f.*"]}
"""
    assert "edges" in problems(text)[-1]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["name", "tasks", "a", "command", "call", "args", "inputs", "outputs", "after",
             "foreach", "needs", "cpus", "memory", "result", "x"]
        ) | st.text(max_size=4),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(plain)
def test_no_value_crashes_the_parser(value: object) -> None:
    document = {"name": "x", "tasks": value}
    for candidate in (value, document, {"name": "x", "tasks": {"a": value}}):
        try:
            from_value(candidate)
        except DocumentError as error:
            assert error.problems


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_no_text_crashes_the_parser(text: str | bytes) -> None:
    try:
        parse(text)
    except DocumentError as error:
        assert error.problems


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_mutation_of_a_document_crashes_the_parser(data: st.DataObject) -> None:
    lines = WORD_COUNT.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = lines[index].replace(
            data.draw(st.sampled_from("abc:[]{}, \"'-1")), data.draw(st.text(max_size=3))
        )
    try:
        parse("\n".join(lines))
    except DocumentError as error:
        assert error.problems


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1m30s", 90), ("250ms", 0.25), (2, 2.0), ("1d", 86400)]
)
def test_durations(text: object, seconds: float) -> None:
    assert quantities.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("128MiB", 128 << 20), ("1.5kB", 1500), (7, 7), ("2G", 2 << 30), ("0", 0)]
)
def test_sizes(text: object, size: int) -> None:
    assert quantities.size_bytes(text) == size


# --------------------------------------------------------------------------- WfFormat

V15 = {
    "name": "small",
    "schemaVersion": "1.5",
    "workflow": {
        "specification": {
            "tasks": [
                {"id": "a", "parents": [], "inputFiles": ["/in"], "outputFiles": ["mid"]},
                {"id": "b", "parents": ["a"], "inputFiles": ["mid"], "outputFiles": []},
            ],
            "files": [{"id": "/in", "sizeInBytes": 1000}, {"id": "mid", "sizeInBytes": 10}],
        },
        "execution": {"tasks": [{"id": "a", "runtimeInSeconds": 10, "avgCPU": 50}]},
    },
}


def test_an_instance_of_1_5() -> None:
    workflow = wfformat.parse(V15, time_scale=0.1, size_scale=0.5)
    assert workflow.inputs["in"].value == "500"
    assert workflow.tasks["a"].runtime_s == pytest.approx(1.0)
    assert workflow.parents["b"] == ("a",)
    assert "--write=mid:5" in workflow.tasks["a"].command


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"schemaVersion": "1.3"}, "/schemaVersion"),
        ({"workflow": []}, "/workflow"),
        ({"workflow": {"specification": {"tasks": 3}}}, "/workflow/specification/tasks"),
        ({"workflow": {"specification": {"tasks": [{"id": 3}]}}}, "/workflow/specification/tasks/0/id"),
        ({"workflow": {"specification": {"tasks": [{"id": "a", "parents": ["q"]}]}}},
         "/workflow/specification/tasks/0/parents"),
    ],
)  # fmt: skip
def test_a_malformed_instance_is_told_where(change: dict[str, object], place: str) -> None:
    with pytest.raises(DocumentError) as error:
        wfformat.parse({**V15, **change})
    assert place in [p.place for p in error.value.problems]


@pytest.mark.skipif(not INSTANCES.is_dir(), reason="the WfCommons instances are not here")
@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.json")), ids=lambda p: p.stem)
def test_every_instance_is_read(path: Path) -> None:
    workflow = wfformat.parse(json.loads(path.read_text()), 0.001, 1e-6)
    assert len(workflow.tasks) >= 10
    assert plan.cycle(workflow.parents) is None


def test_both_versions_of_one_instance_are_one_workflow() -> None:
    pair = [
        INSTANCES / "1000genome-chameleon-2ch-100k-001.json",
        INSTANCES / "1000genome-chameleon-2ch-100k-001.v1.4.json",
    ]
    if not all(p.exists() for p in pair):
        pytest.skip("the WfCommons instances are not here")
    a, b = (wfformat.parse(json.loads(p.read_text())) for p in pair)
    assert a.parents.keys() == b.parents.keys()
    assert {t: set(p) for t, p in a.parents.items()} == {t: set(p) for t, p in b.parents.items()}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_is_right(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["name"]
    assert parse(path.read_text(), client=True).tasks
