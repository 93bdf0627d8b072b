"""The table of HTTP routes, from which the router and `/openapi.json` are both made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from valence.protocols.engine import views
from valence.workflow.schema import WorkflowDocument
from valence.workflow.strategies import names

VERSION = "0.1.0"


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    text: str
    where: str = "query"
    type: str = "string"


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: str
    text: str
    answer: type[BaseModel] | str
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    body: str = ""
    scope: str = "read"  # that a token needs for it; "open": no token at all
    errors: tuple[int, ...] = ()


_LIMIT = Parameter("limit", "maximum number of rows in the answer", type="integer")
_WAIT = Parameter("wait", "seconds to wait for the workflow to end before answering", type="number")

ROUTES = (
    Route("GET", "/healthz", "healthz", "Health check of this peer.", views.Health, scope="open"),
    Route("GET", "/metrics", "metrics_text", "Prometheus metrics.", "text/plain"),
    Route("GET", "/openapi.json", "openapi", "This document.", "application/json"),
    Route("GET", "/v1/peers", "peers", "All peers that this peer knows.", views.PeerList),
    Route(
        "POST",
        "/v1/workflows",
        "submit",
        "Submit a workflow document (YAML or JSON) or a WfFormat instance (JSON).",
        views.WorkflowView,
        status=201,
        parameters=(
            Parameter(
                "Idempotency-Key", "requests with the same key submit one workflow", "header"
            ),
            Parameter("time_scale", "factor for run times, of a WfFormat instance", type="number"),
            Parameter("size_scale", "factor for file sizes, of a WfFormat instance", type="number"),
            Parameter("strategy", "how its tasks find peers; overrides the document's own"),
            Parameter("accept", "the `offer` of an earlier answer: accepts its later end"),
            _WAIT,
        ),
        body="workflow",
        scope="submit",
        errors=(400, 408, 409, 413, 415, 422, 503, 507),
    ),
    Route(
        "POST",
        "/v1/plans",
        "plan",
        "The plan that a workflow with a deadline would get now. It is not submitted.",
        views.PlanView,
        body="workflow",
        scope="submit",
        errors=(400, 408, 413, 415, 422, 503),
    ),
    Route(
        "GET",
        "/v1/workflows",
        "workflows",
        "Workflows of all peers, newest first.",
        views.WorkflowPage,
        parameters=(
            _LIMIT,
            Parameter("before", "`next` of the previous page"),
            Parameter("state", "only workflows in this state"),
        ),
        errors=(400,),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}",
        "workflow",
        "One workflow.",
        views.WorkflowView,
        parameters=(_WAIT,),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/values",
        "values",
        "The values that its calls returned, if no other task takes them and JSON can hold them.",
        views.ValuePage,
        parameters=(Parameter("start", "`next` of the previous page", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}/value",
        "value",
        "The value that a call returned: JSON, or a pickle (see `X-Valence-Encoding`).",
        "application/octet-stream",
        errors=(404,),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks",
        "tasks",
        "Its tasks, in an order in which they can run.",
        views.TaskPage,
        parameters=(
            _LIMIT,
            Parameter("after", "`next` of the previous page"),
            Parameter("state", "only tasks in this state"),
        ),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}",
        "task",
        "One task: its state, its attempts, where they were placed and why, why it is waiting.",
        views.TaskView,
        errors=(404,),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}/log",
        "log",
        "The standard output and error of an attempt.",
        "text/plain",
        parameters=(Parameter("attempt", "its number; default: the latest", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/events",
        "events",
        "Server-sent events from the beginning, or after `Last-Event-ID`, until the workflow ends.",
        "text/event-stream",
        parameters=(
            Parameter("Last-Event-ID", "resume after the event with this id", "header"),
            Parameter("after", "the same, for clients that can't set headers"),
        ),
        errors=(400, 404),
    ),
    Route(
        "POST",
        "/v1/workflows/{id}/cancel",
        "cancel",
        "Cancel the workflow; running tasks are killed.",
        views.WorkflowView,
        errors=(404, 409),
        scope="submit",
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/files",
        "files",
        "The files of a workflow.",
        views.FileList,
        parameters=(Parameter("start", "`next` of the previous page", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/files/{name}",
        "file",
        "The content of a file, from any peer that holds it. Range requests work.",
        "application/octet-stream",
        errors=(404, 416, 503),
    ),
    Route(
        "PUT",
        "/v1/blobs/{hash}",
        "put_blob",
        "Upload a file under its hash, `sha256:…`.",
        views.BlobView,
        status=201,
        body="blob",
        errors=(400, 408, 413, 422, 507),
        scope="submit",
    ),
    Route(
        "DELETE",
        "/v1/blobs/{hash}",
        "delete_blob",
        "Delete a file that you have uploaded to this peer.",
        views.BlobView,
        errors=(400, 404),
        scope="submit",
    ),
    Route(
        "GET",
        "/v1/blobs/{hash}",
        "get_blob",
        "The content of a blob. Range requests work.",
        "application/octet-stream",
        errors=(400, 404, 416, 503),
    ),
)


def openapi() -> dict[str, Any]:
    models = {r.answer for r in ROUTES if not isinstance(r.answer, str)}
    models |= {views.ProblemDocument, WorkflowDocument}
    _, schemas = models_json_schema(
        [(m, "validation") for m in sorted(models, key=lambda m: m.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Valence", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


_EXAMPLE = {
    "name": "hello",
    "tasks": {"greet": {"command": ["sh", "-c", "echo hello > out"], "outputs": ["out"]}},
}
#: patterns of the parts of a path
_PATHS = {
    "id": {"pattern": r"^[A-Za-z0-9_]{1,40}$"},
    "hash": {"pattern": "^sha256:[0-9a-f]{64}$"},
}
_BOUNDS: dict[str, dict[str, Any]] = {
    "limit": {"minimum": 1, "maximum": 1000},
    "start": {"minimum": 0, "maximum": 10**9},
    "attempt": {"minimum": 1, "maximum": 2**31},
    "wait": {"minimum": 0, "maximum": 1_000_000},
    "time_scale": {"minimum": 0, "maximum": 1_000_000},
    "size_scale": {"minimum": 0, "maximum": 1_000_000},
    "strategy": {"enum": list(names())},
}


def _schema(parameter: Parameter) -> dict[str, Any]:
    return {"type": parameter.type, **_BOUNDS.get(parameter.name, {})}


def _links() -> dict[str, Any]:
    """The requests about a workflow that become possible once it is submitted."""
    return {
        route.handler: {
            "operationId": route.handler,
            "parameters": {"id": "$response.body#/id"},
        }
        for route in ROUTES
        if "{id}" in route.path and "{name}" not in route.path and "{task}" not in route.path
    }


def _content(answer: type[BaseModel] | str) -> dict[str, Any]:
    if not isinstance(answer, str):
        return {"application/json": _ref(answer)}
    any_json = "json" in answer or "event-stream" in answer
    return {answer: {"schema": {} if any_json else {"type": "string"}}}


def _responses(route: Route) -> dict[str, Any]:
    content = _content(route.answer)
    responses: dict[str, Any] = {str(route.status): {"description": route.text, "content": content}}
    if route.handler == "submit":
        responses["201"]["links"] = _links()
    if route.method in ("POST", "PUT") and route.status == 201:
        responses["200"] = {"description": "It existed already.", "content": content}
    if 416 in route.errors:
        responses["206"] = {"description": "The requested range.", "content": content}
    errors = () if route.scope == "open" else (*route.errors, 401, 403, 429, 503)
    problem = {"application/problem+json": _ref(views.ProblemDocument)}
    for status in sorted(set(errors)):
        responses[str(status)] = {"description": "The problem.", "content": problem}
    return responses


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", **_PATHS.get(name, {})},
        }
        for name in in_path
    ]
    parameters += [
        {"name": p.name, "in": p.where, "description": p.text, "schema": _schema(p)}
        for p in route.parameters
    ]
    return parameters


def _body(kind: str) -> dict[str, Any]:
    if kind == "workflow":
        document = {**_ref(WorkflowDocument), "example": _EXAMPLE}
        content = dict.fromkeys(("application/json", "application/yaml"), document)
    else:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content = {"application/octet-stream": binary}
    return {"required": True, "content": content}


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.text,
        "operationId": route.handler,
        "x-scope": route.scope,
        "parameters": _parameters(route),
        "responses": _responses(route),
    }
    if route.scope == "open":
        operation["security"] = []
    if route.body:
        operation["requestBody"] = _body(route.body)
    return operation
