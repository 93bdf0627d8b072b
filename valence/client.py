"""The Python client: plain blocking calls over HTTP, with nothing but the standard library.

It finds a local cluster by itself, and another one through `VALENCE_URL` and `VALENCE_TOKEN`. If it
knows several peers, it skips those that do not answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from valence.workflow.shown import os_reason

from . import local
from .connection import Connection, Response

TIMEOUT_S = 60.0
WAIT_S = 10.0
CHUNK_BYTES = 1 << 20
RECENT_MAX = 1000
MATCHES_SHOWN_MAX = 10
FAILURES_MAX = 10
FINAL = ("succeeded", "failed", "cancelled")


class Problem(Exception):
    """The cluster refused a request, with its reason."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.status = status
        self.detail = str(document.get("detail") or document.get("title") or "no reason given")
        self.errors: list[dict[str, Any]] = document.get("errors") or []
        #: the deadline can't be met; `offer` is a later end that can be accepted for a while
        self.infeasible = str(document.get("type", "")).endswith("deadline-infeasible")
        self.earliest_in_s: float | None = document.get("earliest_in_s")
        self.offer: str | None = document.get("offer")
        super().__init__(self.detail)


class Unreachable(Exception):
    """No peer answered."""


class Client:
    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        url = url or os.environ.get("VALENCE_URL")
        token = token or os.environ.get("VALENCE_TOKEN") or token_from_file()
        if url and not url.startswith(("http://", "https://")):
            raise Unreachable(f"the URL {url!r} has no scheme: write http://{url}")
        if url:
            self._urls = [url]
        else:
            self._urls = local.urls()
            token = token or local.token()
        if not self._urls:
            raise Unreachable(
                "no cluster found: start one with `valence up`, or set VALENCE_URL and "
                "VALENCE_TOKEN"
            )
        if not token:
            raise Unreachable("no token found: set VALENCE_TOKEN")
        self._token = token
        # the connection of the last request, kept for the next one; one thread at a time uses it
        self._kept: tuple[str, Connection, int] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    # ----------------------------------------------------------------- requests

    def _open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[Connection, Response]:
        reasons = []
        for url in list(self._urls):
            parts = urlsplit(url)
            connection = Connection(
                parts.hostname or "", parts.port, parts.scheme == "https", timeout_s
            )
            try:
                response = self._send(connection, url, method, path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                reasons.append(f"{url}: {_reason(error)}")
                with self._lock:
                    if self._urls[0] == url:  # the next call begins with another peer
                        self._urls = [*self._urls[1:], url]
                continue
            if response.status >= 400:
                try:
                    raise Problem(response.status, _document(response))
                finally:
                    connection.close()
            return connection, response
        raise Unreachable("no peer answered: " + "; ".join(reasons[:3]))

    def _send(
        self,
        connection: Connection,
        url: str,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None,
    ) -> Response:
        if hasattr(body, "seek"):
            body.seek(0)
        sent = {"Authorization": f"Bearer {self._token}", **(headers or {})}
        return connection.request(method, path, body, sent, urlsplit(url).path.rstrip("/"))

    def _again(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None
    ) -> tuple[Connection, Response] | None:
        """Sends on the connection of the last request, unless the peer has closed it meanwhile."""
        with self._lock:
            url, connection, pid = self._kept or ("", None, 0)
            self._kept = None
        if connection is not None and pid != os.getpid():
            connection = None  # it belongs to the parent process, which may be using it
        if connection is None or url != self._urls[0] or connection.stale:
            if connection is not None:
                connection.close()
            return None
        try:
            return connection, self._send(connection, url, method, path, body, headers)
        except (OSError, http.client.HTTPException):
            connection.close()
            if method in ("GET", "PUT"):
                return None
            raise Unreachable(
                f"{url} closed the connection before it answered; the request may have been "
                "carried out"
            ) from None

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        reused = self._again(method, path, body, headers)
        connection, response = reused or self._open(method, path, body, headers)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"the response broke off: {_reason(error)}") from None
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                kept = (self._urls[0], connection, os.getpid())
                self._kept, connection_before = kept, self._kept
            if connection_before is not None:
                connection_before[1].close()
        kind = response.fields.media_type
        if response.status >= 400:
            document = json.loads(data) if kind.endswith("json") else {}
            raise Problem(response.status, document or {"title": response.reason})
        return json.loads(data) if kind.endswith("json") else data

    # ----------------------------------------------------------------- the API

    def metrics(self) -> str:
        """The metrics of the peer that answers, in Prometheus' format."""
        text: bytes = self.request("GET", "/metrics")
        return text.decode()

    def peers(self) -> list[dict[str, Any]]:
        peers: list[dict[str, Any]] = self.request("GET", "/v1/peers")["peers"]
        return peers

    def workflows(self, limit: int = 100, state: str = "") -> list[dict[str, Any]]:
        query = urlencode({"limit": limit, **({"state": state} if state else {})})
        page = self.request("GET", f"/v1/workflows?{query}")
        self.unanswered: list[str] = page["unanswered"]  # peers whose workflows are missing
        workflows: list[dict[str, Any]] = page["workflows"]
        return workflows

    def workflow(self, workflow_id: str) -> WorkflowHandle:
        """The workflow with this id, or the only recent one whose id begins with it."""
        try:
            self.request("GET", f"/v1/workflows/{quote(workflow_id, safe='')}")
        except Problem as problem:
            if problem.status != 404 or not workflow_id:
                raise
            recent = [w["id"] for w in self.workflows(RECENT_MAX)]
            matches = [id_ for id_ in recent if id_.startswith(workflow_id)]
            if not matches:
                raise
            if len(matches) > 1:
                raise Problem(404, {"detail": _ambiguous(workflow_id, matches)}) from None
            workflow_id = matches[0]
        return WorkflowHandle(self, workflow_id)

    def submit(
        self,
        document: str | Path | dict[str, Any],
        *,
        time_scale: float | None = None,
        size_scale: float | None = None,
        strategy: str | None = None,
        key: str | None = None,
        wait_s: float = 0.0,
        accept: str | None = None,
    ) -> WorkflowHandle:
        """Submits a file, by its path, or a document as a value; uploads files it names by `path`.

        `wait_s`: return when the workflow has ended, or after this long; `view()` then has its
        newest state. `accept`: the `offer` of the `Problem` that an earlier try has raised."""
        from . import submission

        text, kind, uploads = submission.prepare(document)
        settings: dict[str, float | str | None] = {
            "time_scale": time_scale,
            "size_scale": size_scale,
            "strategy": strategy,
            "wait": wait_s or None,
            "accept": accept,
        }
        return self.send(text, kind, uploads, settings, key)

    def send(
        self,
        text: bytes,
        kind: str,
        uploads: list[tuple[Path, str]],
        settings: dict[str, float | str | None],
        key: str | None,
    ) -> WorkflowHandle:
        """Sends a document that `submission.prepare` has prepared: its files first."""
        for path, digest in uploads:
            self.upload(path, digest)
        query = urlencode({k: v for k, v in settings.items() if v is not None})
        headers = {"Content-Type": kind}
        if key:
            headers["Idempotency-Key"] = key
        view = self.request("POST", "/v1/workflows" + (f"?{query}" if query else ""), text, headers)
        return WorkflowHandle(self, view["id"], view)

    def plan(self, text: bytes, kind: str) -> dict[str, Any]:
        """The plan that a document with a deadline would get now. It is not submitted."""
        plan: dict[str, Any] = self.request("POST", "/v1/plans", text, {"Content-Type": kind})
        return plan

    def upload(self, path: Path, digest: str | None = None) -> str:
        digest = digest or hash_file(path)
        with path.open("rb") as file:
            size = str(path.stat().st_size)
            self.request("PUT", f"/v1/blobs/{digest}", file, {"Content-Length": size})
        return digest


class WorkflowHandle:
    """A submitted workflow, seen through any peer."""

    def __init__(
        self, client: Client, workflow_id: str, seen: dict[str, Any] | None = None
    ) -> None:
        self.id = workflow_id
        self._seen = seen or {}
        self._client = client

    @functools.cached_property
    def _path(self) -> str:
        return f"/v1/workflows/{quote(self.id, safe='')}"

    def view(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Its state now; with `wait_s`, its state when it has ended, or after this long."""
        if self._seen.get("state") not in FINAL:
            query = f"?wait={wait_s:g}" if wait_s else ""
            self._seen = self._client.request("GET", self._path + query)
        return self._seen

    def values(self) -> dict[str, Any]:
        """The values that its calls returned, by task, unless another task takes them. See
        `value`."""
        values, others = self.json_values()
        return {**values, **{name: self.value(name) for name in others}}

    def json_values(self) -> tuple[dict[str, Any], list[str]]:
        """The values that JSON can express, and the tasks whose values it can't."""
        values: dict[str, Any] = {}
        others: list[str] = []
        start: int | None = 0
        while start is not None:
            page = self._client.request("GET", f"{self._path}/values?start={start}")
            values.update(page["values"])
            others += page["others"]
            start = page["next"]
        return values, others

    def value(self, task: str) -> Any:
        """The value that one call returned. A value that JSON can't express comes as a pickle, and
        to unpickle it is to run, here, code that its task's owner chose: ask only for values of
        workflows whose owner you trust as yourself. `raw_value` runs nothing."""
        kind, data = self.raw_value(task)
        return json.loads(data) if kind == "json" else pickle.loads(data)

    def raw_value(self, task: str) -> tuple[str, bytes]:
        """The value that one call returned, as it is stored: "json" or "pickle", and the bytes."""
        path = f"{self._path}/tasks/{quote(task, safe='')}/value"
        connection, response = self._client._open("GET", path)
        with contextlib.closing(connection):
            return response.fields.value("x-valence-encoding") or "json", response.read()

    def tasks(self, state: str = "") -> Iterator[dict[str, Any]]:
        after = None
        while True:
            query: dict[str, Any] = {"limit": 1000, **({"after": after} if after else {})}
            if state:
                query["state"] = state
            page = self._client.request("GET", f"{self._path}/tasks?{urlencode(query)}")
            yield from page["tasks"]
            after = page["next"]
            if after is None:
                return

    def task(self, name: str) -> dict[str, Any]:
        view: dict[str, Any] = self._client.request(
            "GET", f"{self._path}/tasks/{quote(name, safe='')}"
        )
        return view

    def log(self, task: str, attempt: int | None = None) -> bytes:
        query = f"?attempt={attempt}" if attempt else ""
        path = f"{self._path}/tasks/{quote(task, safe='')}/log{query}"
        text: bytes = self._client.request("GET", path)
        return text

    def cancel(self) -> dict[str, Any]:
        view: dict[str, Any] = self._client.request("POST", self._path + "/cancel")
        return view

    def files(self) -> list[dict[str, Any]]:
        files: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None:
            page = self._client.request("GET", f"{self._path}/files?start={start}")
            files += page["files"]
            start = page["next"]
        return files

    def read(self, name: str) -> bytes:
        data = self._client.request("GET", f"{self._path}/files/{quote(name)}")
        return data if isinstance(data, bytes) else json.dumps(data).encode()

    def download(self, name: str, target: Path) -> int:
        """Writes a file to `target`, whole and with the right hash or not at all; returns its
        size."""
        connection, response = self._client._open("GET", f"{self._path}/files/{quote(name)}")
        part = target.with_name(target.name + ".part")
        digest = hashlib.sha256()
        size = 0
        try:
            with contextlib.closing(connection), part.open("wb") as file:
                while chunk := response.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    size += len(chunk)
            expected = response.fields.value("etag").strip('"')
            if expected and digest.hexdigest() != expected:
                raise Unreachable(f"{name} arrived incomplete or damaged; try again")
            part.replace(target)
        except (http.client.HTTPException, OSError) as error:
            raise Unreachable(f"{name} could not be downloaded: {_reason(error)}") from None
        finally:
            part.unlink(missing_ok=True)
        return size

    def events(self, after: str = "") -> Iterator[dict[str, Any]]:
        """Its events until it has ended. A stream that breaks off is resumed where it broke."""
        failures = 0
        while True:
            try:
                for event in self._events_after(after):
                    failures = 0
                    if "id" not in event:
                        break
                    after = event["id"]
                    yield event
                    if event.get("final"):
                        return
            except (OSError, http.client.HTTPException):
                pass
            except Unreachable:
                if failures > FAILURES_MAX:
                    raise
            except Problem as problem:
                if problem.status != 503:
                    raise
                if not failures:
                    yield {"type": "interrupted", "reason": problem.detail, "at": time.time()}
            failures += 1
            time.sleep(min(2.0, 0.2 * failures))

    def _events_after(self, after: str) -> Iterator[dict[str, Any]]:
        """One stream of them; an event without an id means that it must be resumed."""
        headers = {"Last-Event-ID": after} if after else {}
        connection, response = self._client._open("GET", self._path + "/events", headers=headers)
        with contextlib.closing(connection):
            yield from _stream(response)

    def wait(self) -> str:
        """Waits until it has ended, also while peers are away for a moment; returns its state."""
        failures = 0
        while True:
            try:
                state = str(self.view(WAIT_S)["state"])
            except Unreachable:
                failures += 1
                if failures > FAILURES_MAX:
                    raise
                time.sleep(min(2.0, 0.2 * failures))
                continue
            except Problem as problem:
                if problem.status != 503:  # 503: its keepers are away, and nothing is lost
                    raise
                failures += 1
                time.sleep(min(2.0, 0.2 * failures))
                continue
            if state in FINAL:
                return state
            failures = 0


def _stream(response: Response) -> Iterator[dict[str, Any]]:
    data: list[str] = []
    for raw in response:
        line = raw.decode().rstrip("\n")
        if line.startswith("data: "):
            data.append(line[6:])
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


def _document(response: Response) -> dict[str, Any]:
    try:
        document = json.loads(response.read())
    except (ValueError, OSError, http.client.HTTPException):
        document = None
    return document if isinstance(document, dict) else {"title": response.reason}


def _reason(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, OSError):
        return os_reason(error)
    return str(error) or type(error).__name__


def _ambiguous(prefix: str, matches: list[str]) -> str:
    shown = ", ".join(matches[:MATCHES_SHOWN_MAX])
    more = len(matches) - MATCHES_SHOWN_MAX
    rest = f" and {more} more" if more > 0 else ""
    return f"{prefix} is ambiguous: it matches {shown}{rest}; type more of the id"


def token_from_file() -> str | None:
    path = os.environ.get("VALENCE_TOKEN_FILE")
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise Unreachable(f"VALENCE_TOKEN_FILE: {os_reason(error)}") from None


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
