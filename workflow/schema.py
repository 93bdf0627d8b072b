"""The shape of a workflow document, field by field; `document` checks what a shape can't say.

These models are also what `/openapi.json` describes, so the text in each field is for users.
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


#: a command that is one text: it ends at the first command that fails, also within a pipe, and at
#: a variable that is not set
STRICT_SHELL = ("bash", "-euo", "pipefail", "-c")


def _words(value: object) -> object:
    """A command: words, where YAML's numbers are words too; one text is a shell's line."""
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
    """One of: a file of the client's, a text, a URL, a blob, or bytes made up to a size."""

    path: str | None = Field(
        default=None, max_length=4096, description="A file, read by the client."
    )
    text: str | None = Field(default=None, max_length=TEXT_INPUT_BYTES_MAX)
    url: str | None = Field(
        default=None, max_length=2000, description="http, https, s3 or file, fetched by a peer."
    )
    blob: str | None = Field(default=None, description="sha256:… of a blob that was uploaded.")
    size: Size | None = Field(default=None, description="Bytes made up from the name, for trials.")


class NeedsDocument(_Strict):
    """What a task needs of a peer."""

    cpus: Cores = Field(default=1000)
    memory: Size = Field(default=0)
    disk: Size = Field(default=0)
    gpus: int = Field(default=0, ge=0, le=1_000_000)
    arch: Label | None = None
    os: Label | None = None
    site: Label | None = None
    speed: float | None = Field(default=None, ge=0, le=1e9, description="At least this fast.")
    labels: list[Label] = Field(default_factory=list, max_length=32)
    software: list[Label] = Field(default_factory=list, max_length=32)


class AlternativeDocument(_Strict):
    """Another way to make the same outputs from the same inputs."""

    command: Annotated[list[str], BeforeValidator(_words)] = Field(max_length=10_000)
    env: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict, max_length=1000
    )
    needs: NeedsDocument | None = Field(default=None, description="In place of the task's own.")
    timeout: Duration | None = None


class TaskDocument(_Strict):
    """One task, or with `foreach` one for each item."""

    description: str = Field(default="", max_length=10_000)
    foreach: list[Any] | dict[str, Any] | int | None = Field(
        default=None,
        description="A list of items; a number n for 0…n-1; or names with a list each, for every "
        "combination. `{item}` or `{name}` stands for the item in all texts of the task.",
    )
    command: Annotated[list[str], BeforeValidator(_words)] | None = Field(
        default=None, max_length=10_000
    )
    call: str | None = Field(default=None, description="A Python callable, module:function.")
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
        description="It runs at so many different peers at once, all or none; `needs` are of each. "
        "`{rank}` stands for 0…n-1 in all texts of the task.",
    )
    runtime: Duration | None = Field(default=None, description="An estimate, on a peer of speed 1.")
    timeout: Duration | None = None
    retries: int = Field(default=0, ge=0, le=100)
    alternatives: list[AlternativeDocument] = Field(
        default_factory=list,
        max_length=10,
        description="Other commands, one after the other, should it fail for good and a policy "
        "ask for that (`alternatives`).",
    )
    branch: Name = Field(
        default="",
        description="Tasks of one branch go on to the next of their alternatives together: if one "
        "fails for good, those that are done or running begin anew, too.",
    )
    network: bool = Field(
        default=False, description="It needs the network, where tasks run in a sandbox without."
    )


class WorkflowDocument(_Strict):
    """A workflow: tasks and the files between them."""

    name: str = Field(min_length=1, max_length=200)
    description: str = Field(default="", max_length=10_000)
    strategy: str = Field(default="auto", max_length=50)
    deadline: str | float | int | None = Field(
        default=None, description="A duration from submission, or a timestamp (ISO 8601)."
    )
    levels: Literal["strict"] | None = Field(
        default=None,
        description="strict: level by level, a task only when all of the levels before are done. "
        "By default each as soon as what it takes is there.",
    )
    policies: list[str] = Field(
        default_factory=list,
        max_length=50,
        description="What to do when something happens: the names of shipped ones, or rules.",
    )
    rank: str = Field(
        default="",
        max_length=200,
        description="For the strategy pilots: an expression by which a pilot ranks its tasks, over "
        "local and remote (MiB of inputs it holds, or not), speed, waited and hangs (seconds).",
    )
    deliver: dict[str, str] = Field(
        default_factory=dict,
        max_length=1000,
        description="Outputs, or globs of them, and the URL (http, https, s3 or file) that each is "
        "written to; one that ends with / is a directory.",
    )
    inputs: dict[str, InputDocument] = Field(default_factory=dict, max_length=100_000)
    tasks: dict[str, TaskDocument] = Field(min_length=1, max_length=TASKS_MAX)
