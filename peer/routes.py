"""The routes as data: what the router serves and what `/openapi.json` says are the same table."""

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
    scope: str = "read"  # what a token needs for it; "open": no token at all
    errors: tuple[int, ...] = ()


_LIMIT = Parameter("limit", "how many at most", type="integer")
_WAIT = Parameter("wait", "seconds to wait for its end before answering", type="number")

ROUTES = (
    Route("GET", "/healthz", "healthz", "Is this peer up?", views.Health, scope="open"),
    Route("GET", "/metrics", "metrics_text", "Prometheus metrics.", "text/plain"),
    Route("GET", "/openapi.json", "openapi", "This document.", "application/json"),
    Route("GET", "/v1/peers", "peers", "All peers this one knows of.", views.PeerList),
    Route(
        "POST",
        "/v1/workflows",
        "submit",
        "Submit a workflow document (YAML or JSON) or a WfFormat instance (JSON).",
        views.WorkflowView,
        status=201,
        parameters=(
            Parameter("Idempotency-Key", "repeats with the same key submit once", "header"),
            Parameter("time_scale", "of a WfFormat instance", type="number"),
            Parameter("size_scale", "of a WfFormat instance", type="number"),
            Parameter("strategy", "how its tasks find peers, instead of what it says itself"),
            _WAIT,
        ),
        body="workflow",
        scope="submit",
        errors=(400, 408, 413, 415, 422, 503, 507),
    ),
    Route(
        "GET",
        "/v1/workflows",
        "workflows",
        "Workflows of all peers, newest first.",
        views.WorkflowPage,
        parameters=(
            _LIMIT,
            Parameter("before", "`next` of the page before"),
            Parameter("state", "only those in this state"),
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
        "What its calls returned, where no other task takes it and JSON can say it.",
        views.ValuePage,
        parameters=(Parameter("start", "`next` of the page before", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}/value",
        "value",
        "What a call returned: JSON, or a pickle (`X-Valence-Encoding` says which).",
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
            Parameter("after", "`next` of the page before"),
            Parameter("state", "only those in this state"),
        ),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}",
        "task",
        "One task: state, attempts, where it was placed and why, what it waits for.",
        views.TaskView,
        errors=(404,),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/tasks/{task}/log",
        "log",
        "What an attempt wrote to its standard output and error.",
        "text/plain",
        parameters=(Parameter("attempt", "its number; the latest if left out", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/events",
        "events",
        "Server-sent events from the beginning, or after `Last-Event-ID`, until it has ended.",
        "text/event-stream",
        parameters=(
            Parameter("Last-Event-ID", "go on after this one", "header"),
            Parameter("after", "the same, for clients that can't set headers"),
        ),
        errors=(400, 404),
    ),
    Route(
        "POST",
        "/v1/workflows/{id}/cancel",
        "cancel",
        "End it: running tasks are killed.",
        views.WorkflowView,
        errors=(404, 409),
        scope="submit",
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/files",
        "files",
        "Its files.",
        views.FileList,
        parameters=(Parameter("start", "`next` of the page before", type="integer"),),
        errors=(400, 404),
    ),
    Route(
        "GET",
        "/v1/workflows/{id}/files/{name}",
        "file",
        "A file's content, from whichever peer holds it. Ranges are served.",
        "application/octet-stream",
        errors=(404, 416, 503),
    ),
    Route(
        "PUT",
        "/v1/blobs/{hash}",
        "put_blob",
        "Upload a file under its hash, sha256:….",
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
        "Forget a file that you have uploaded to this peer.",
        views.BlobView,
        errors=(400, 404),
        scope="submit",
    ),
    Route(
        "GET",
        "/v1/blobs/{hash}",
        "get_blob",
        "A blob's content. Ranges are served.",
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
#: what the parts of a path look like
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
    """What can be asked of a workflow once it is submitted."""
    return {
        route.handler: {
            "operationId": route.handler,
            "parameters": {"id": "$response.body#/id"},
        }
        for route in ROUTES
        if "{id}" in route.path and "{name}" not in route.path and "{task}" not in route.path
    }


def _operation(route: Route) -> dict[str, Any]:
    if isinstance(route.answer, str):
        free = "json" in route.answer or "event-stream" in route.answer
        schema: dict[str, Any] = {} if free else {"type": "string"}
        content = {route.answer: {"schema": schema}}
    else:
        content = {"application/json": _ref(route.answer)}
    responses: dict[str, Any] = {str(route.status): {"description": route.text, "content": content}}
    if route.handler == "submit":
        responses["201"]["links"] = _links()
    if route.method in ("POST", "PUT") and route.status == 201:
        responses["200"] = {"description": "It was there already.", "content": content}
    if "416" in map(str, route.errors):
        responses["206"] = {"description": "The range asked for.", "content": content}
    errors = () if route.scope == "open" else (*route.errors, 401, 403, 429, 503)
    for status in sorted(set(errors)):
        responses[str(status)] = {
            "description": "What is wrong.",
            "content": {"application/problem+json": _ref(views.ProblemDocument)},
        }
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [
        {
            "name": n,
            "in": "path",
            "required": True,
            "schema": {"type": "string", **_PATHS.get(n, {})},
        }
        for n in names
    ]
    parameters += [
        {"name": p.name, "in": p.where, "description": p.text, "schema": _schema(p)}
        for p in route.parameters
    ]
    found: dict[str, Any] = {
        "summary": route.text,
        "operationId": route.handler,
        "x-scope": route.scope,
        "parameters": parameters,
        "responses": responses,
    }
    if route.scope == "open":
        found["security"] = []
    if route.body == "workflow":
        document = {**_ref(WorkflowDocument), "example": _EXAMPLE}
        types = ("application/json", "application/yaml")
        found["requestBody"] = {"required": True, "content": dict.fromkeys(types, document)}
    elif route.body == "blob":
        raw = {"schema": {"type": "string", "format": "binary"}}
        found["requestBody"] = {"required": True, "content": {"application/octet-stream": raw}}
    return found
