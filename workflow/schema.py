"""The schema of a workflow document, field by field; `document` checks the rules beyond a schema.

`/openapi.json` describes these models too, so the text of each field is written for users.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from . import quantities

TASKS_MAX = 200_000
EDGES_MAX = 2_000_000
COMMAND_BYTES_MAX = 100_000
TEXT_INPUT_BYTES_MAX = 1_000_000
GANG_PEERS_MAX = 256


#: runs a command that is one text: it stops at the first command that fails, also within a pipe,
#: and at a variable that is not set
STRICT_SHELL = ("bash", "-euo", "pipefail", "-c")


def _words(value: object) -> object:
    """A command's words, where YAML's numbers are words too; one text is a line for the shell."""
    if isinstance(value, str):
        return [*STRICT_SHELL, value]
    if isinstance(value, list):
        return [
            str(word) if isinstance(word, int | float) and not isinstance(word, bool) else word
            for word in value
        ]
    return value


def _text(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _texts(value: object) -> object:
    return {k: _text(v) for k, v in value.items()} if isinstance(value, dict) else value


Duration = Annotated[
    float,
    BeforeValidator(quantities.seconds),
    Field(json_schema_extra={"type": ["number", "string"], "examples": ["90s", "1m30s", 2.5]}),
]
Size = Annotated[
    int,
    BeforeValidator(quantities.size_bytes),
    Field(json_schema_extra={"type": ["integer", "string"], "examples": ["128MiB", 1024]}),
]
Cores = Annotated[
    int,
    BeforeValidator(quantities.millicores),
    Field(json_schema_extra={"type": ["number", "string"], "examples": [1, 0.5, "500m"]}),
]
Name = Annotated[str, Field(max_length=1100)]
Label = Annotated[str, Field(max_length=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputDocument(_Strict):
    """Exactly one of: a file of the client's, a text, a URL, a blob, or made-up bytes of a size."""

    path: str | None = Field(
        default=None, max_length=4096, description="A file that the client reads and uploads."
    )
    text: str | None = Field(default=None, max_length=TEXT_INPUT_BYTES_MAX)
    url: str | None = Field(
        default=None,
        max_length=2000,
        description="An http, https, s3 or file URL, fetched by a peer.",
    )
    blob: str | None = Field(default=None, description="The sha256:… of an uploaded blob.")
    size: Size | None = Field(default=None, description="Made-up bytes of this size, for trials.")


class NeedsDocument(_Strict):
    """A task's requirements of its peer."""

    cpus: Cores = Field(default=1000)
    memory: Size = Field(default=0)
    disk: Size = Field(default=0)
    gpus: int = Field(default=0, ge=0, le=1_000_000)
    arch: Label | None = None
    os: Label | None = None
    site: Label | None = None
    speed: float | None = Field(
        default=None, ge=0, le=1e9, description="The peer must be at least this fast."
    )
    labels: list[Label] = Field(default_factory=list, max_length=32)
    software: list[Label] = Field(default_factory=list, max_length=32)


class AlternativeDocument(_Strict):
    """Another way to make the same outputs from the same inputs."""

    command: Annotated[list[str], BeforeValidator(_words)] = Field(max_length=10_000)
    env: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, max_length=1000
    )
    needs: NeedsDocument | None = Field(default=None, description="Replaces the task's own needs.")
    timeout: Duration | None = None


class TaskDocument(_Strict):
    """One task; with `foreach`, one task for each item."""

    description: str = Field(default="", max_length=10_000)
    foreach: list[Any] | dict[str, Any] | int | None = Field(
        default=None,
        description="A list of items; a number n for 0…n-1; or names with a list each, for every "
        "combination. `{item}` or `{name}` is replaced by the item in all texts of the task.",
    )
    command: Annotated[list[str], BeforeValidator(_words)] | None = Field(
        default=None, max_length=10_000
    )
    call: str | None = Field(default=None, description="A Python function, as module:function.")
    args: list[Any] = Field(default_factory=list, max_length=10_000)
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=1000)
    env: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, max_length=1000
    )
    inputs: list[Name] = Field(default_factory=list, max_length=100_000)
    outputs: list[Name] = Field(default_factory=list, max_length=100_000)
    after: list[Name] = Field(default_factory=list, max_length=100_000)
    needs: NeedsDocument = Field(default_factory=lambda: NeedsDocument())
    peers: int = Field(
        default=1,
        ge=1,
        le=GANG_PEERS_MAX,
        description="Runs on this many different peers at once, on all or none; `needs` apply to "
        "each. `{rank}` is replaced by 0…n-1 in all texts of the task.",
    )
    runtime: Duration | None = Field(
        default=None, description="Estimated run time on a peer of speed 1."
    )
    timeout: Duration | None = None
    retries: int = Field(default=0, ge=0, le=100)
    alternatives: list[AlternativeDocument] = Field(
        default_factory=list,
        max_length=10,
        description="Other commands to try in turn if the task fails for good and a policy "
        "(`alternatives`) asks for it.",
    )
    branch: Name = Field(
        default="",
        description="Tasks of one branch move on to their next alternatives together: if one "
        "fails for good, those that are done or running start again too.",
    )
    network: bool = Field(
        default=False,
        description="The task needs the network, in sandboxes that have none by default.",
    )


class PromiseDocument(_Strict):
    """What the promise to be done by the deadline must be like."""

    infeasible: Literal["refuse", "earliest", "best-effort"] = Field(
        default="refuse",
        description="If no plan meets the deadline: refuse the workflow; promise the earliest "
        "possible end instead; or run it without a promise.",
    )
    survive: int | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Deaths of peers that the plan must leave time for. By default one, if that is "
        "possible.",
    )
    on_broken: Literal["go-on", "cancel"] = Field(
        default="go-on", description="What becomes of the workflow when its promise is broken."
    )


class WorkflowDocument(_Strict):
    """A workflow: tasks and the files between them."""

    name: str = Field(min_length=1, max_length=200)
    description: str = Field(default="", max_length=10_000)
    strategy: str = Field(default="auto", max_length=50)
    deadline: str | float | int | None = Field(
        default=None, description="A duration from submission, or a timestamp (ISO 8601)."
    )
    promise: PromiseDocument | None = Field(
        default=None,
        description="A workflow with a deadline and an estimated run time for each task is "
        "promised to be done in time, or refused at once. This says how.",
    )
    levels: Literal["strict"] | None = Field(
        default=None,
        description="strict: a task starts only when all earlier levels are done. By default each "
        "task starts as soon as its inputs are there.",
    )
    policies: list[str] = Field(
        default_factory=list,
        max_length=50,
        description="Reactions to events such as failures: names of built-in policies, or rules.",
    )
    rank: str = Field(
        default="",
        max_length=200,
        description="For the strategy pilots: an expression by which a pilot ranks its tasks, over "
        "local and remote (MiB of inputs on and off its disk), speed, waited and hangs (seconds).",
    )
    deliver: dict[str, str] = Field(
        default_factory=dict,
        max_length=1000,
        description="Outputs, or globs of them, each with the URL (http, https, s3 or file) to "
        "write it to; a URL that ends with / is a directory.",
    )
    inputs: dict[str, InputDocument] = Field(default_factory=dict, max_length=100_000)
    tasks: dict[str, TaskDocument] = Field(min_length=1, max_length=TASKS_MAX)
