"""The Python client: plain blocking calls over HTTP, on the standard library alone.

It finds a local cluster by itself; another one through `VALENCE_URL` and `VALENCE_TOKEN`. With
several peers known, one that does not answer is passed over.
"""

from __future__ import annotations

import contextlib
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

from . import local
from .connection import Connection, Response

TIMEOUT_S = 60.0
WAIT_S = 10.0
CHUNK_BYTES = 1 << 20
FINAL = ("succeeded", "failed", "cancelled")


class Problem(Exception):
    """The cluster said no, and why."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.status = status
        self.detail = str(document.get("detail") or document.get("title") or "no reason given")
        self.errors: list[dict[str, Any]] = document.get("errors") or []
        super().__init__(self.detail)


class Unreachable(Exception):
    """No peer answered."""


class Client:
    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        url = url or os.environ.get("VALENCE_URL")
        token = token or os.environ.get("VALENCE_TOKEN") or token_from_file()
        if url and not url.startswith(("http://", "https://")):
            raise Unreachable(f"VALENCE_URL: write http://{url}")
        if url:
            self._urls = [url]
        else:
            self._urls = local.urls()
            token = token or local.token()
        if not self._urls:
            raise Unreachable(
                "no cluster was found: start one with `valence up`, or set VALENCE_URL and "
                "VALENCE_TOKEN"
            )
        if not token:
            raise Unreachable("there is no token: set VALENCE_TOKEN")
        self._token = token
        # the connection of the last request, kept for the next one; one thread at a time has it
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
                reasons.append(f"{url}: {error or type(error).__name__}")
                with self._lock:
                    if self._urls[0] == url:  # the next call begins with another one
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
        every = {"Authorization": f"Bearer {self._token}", **(headers or {})}
        return connection.request(method, path, body, every, urlsplit(url).path.rstrip("/"))

    def _again(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None
    ) -> tuple[Connection, Response] | None:
        """By the connection of the request before, if the peer has not closed it meanwhile."""
        with self._lock:
            url, connection, pid = self._kept or ("", None, 0)
            self._kept = None
        if connection is not None and pid != os.getpid():
            connection = None  # the parent's, who may be using it
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
            raise Unreachable(f"{url} broke off; it is not known what became of it") from None

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        found = self._again(method, path, body, headers)
        connection, response = found or self._open(method, path, body, headers)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"the answer broke off: {error!r}") from None
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
            found_problem = json.loads(data) if kind.endswith("json") else {}
            raise Problem(response.status, found_problem or {"title": response.reason})
        return json.loads(data) if kind.endswith("json") else data

    # ----------------------------------------------------------------- the API

    def metrics(self) -> str:
        """Of the peer that answers, as Prometheus reads them."""
        found: bytes = self.request("GET", "/metrics")
        return found.decode()

    def peers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request("GET", "/v1/peers")["peers"]
        return found

    def workflows(self, limit: int = 100, state: str = "") -> list[dict[str, Any]]:
        query = urlencode({"limit": limit, **({"state": state} if state else {})})
        page = self.request("GET", f"/v1/workflows?{query}")
        self.unanswered: list[str] = page["unanswered"]  # peers whose workflows are not among them
        found: list[dict[str, Any]] = page["workflows"]
        return found

    def workflow(self, id: str) -> WorkflowHandle:
        """By its id, or the beginning of one that is unique among the latest."""
        try:
            self.request("GET", f"/v1/workflows/{quote(id, safe='')}")
        except Problem as problem:
            if problem.status != 404:
                raise
            matching = [w["id"] for w in self.workflows(1000) if w["id"].startswith(id)]
            if not id or len(matching) != 1:
                raise
            id = matching[0]
        return WorkflowHandle(self, id)

    def submit(
        self,
        document: str | Path | dict[str, Any],
        *,
        time_scale: float | None = None,
        size_scale: float | None = None,
        strategy: str | None = None,
        key: str | None = None,
        wait_s: float = 0.0,
    ) -> WorkflowHandle:
        """A file's path or a document as a value; files it names by `path` are uploaded.

        `wait_s`: return when it has ended, or after that long; `view()` is the newest seen."""
        from . import submission

        text, kind, uploads = submission.prepare(document)
        asked: dict[str, float | str | None] = {
            "time_scale": time_scale,
            "size_scale": size_scale,
            "strategy": strategy,
            "wait": wait_s or None,
        }
        return self.send(text, kind, uploads, asked, key)

    def send(
        self,
        text: bytes,
        kind: str,
        uploads: list[tuple[Path, str]],
        asked: dict[str, float | str | None],
        key: str | None,
    ) -> WorkflowHandle:
        """What `submission.prepare` made of a document: its files first."""
        for path, hash in uploads:
            self.upload(path, hash)
        query = urlencode({k: v for k, v in asked.items() if v is not None})
        headers = {"Content-Type": kind}
        if key:
            headers["Idempotency-Key"] = key
        view = self.request("POST", "/v1/workflows" + (f"?{query}" if query else ""), text, headers)
        return WorkflowHandle(self, view["id"], view)

    def upload(self, path: Path, hash: str | None = None) -> str:
        hash = hash or hash_file(path)
        with path.open("rb") as file:
            size = str(path.stat().st_size)
            self.request("PUT", f"/v1/blobs/{hash}", file, {"Content-Length": size})
        return hash


class WorkflowHandle:
    """A submitted workflow, seen through any peer."""

    def __init__(self, client: Client, id: str, seen: dict[str, Any] | None = None) -> None:
        self.id = id
        self._seen = seen or {}
        self._client = client
        self._path = f"/v1/workflows/{quote(id, safe='')}"

    def view(self, wait_s: float = 0.0) -> dict[str, Any]:
        """`wait_s`: as it has ended, or as it is after that long."""
        if self._seen.get("state") not in FINAL:
            query = f"?wait={wait_s:g}" if wait_s else ""
            self._seen = self._client.request("GET", self._path + query)
        return self._seen

    def values(self) -> dict[str, Any]:
        """What its calls returned, by task, where no other task takes it. See `value`."""
        found, others = self.json_values()
        return {**found, **{name: self.value(name) for name in others}}

    def json_values(self) -> tuple[dict[str, Any], list[str]]:
        """Those that JSON can say, and the tasks whose value is not among them."""
        found: dict[str, Any] = {}
        others: list[str] = []
        start: int | None = 0
        while start is not None:
            page = self._client.request("GET", f"{self._path}/values?start={start}")
            found.update(page["values"])
            others += page["others"]
            start = page["next"]
        return found, others

    def value(self, task: str) -> Any:
        """What one call returned. What JSON can't say comes as a pickle, and to unpickle it runs
        code that its task's owner chose, here: ask only for values of workflows whose owner you
        trust as yourself; `raw_value` runs nothing."""
        kind, data = self.raw_value(task)
        return json.loads(data) if kind == "json" else pickle.loads(data)

    def raw_value(self, task: str) -> tuple[str, bytes]:
        """What one call returned, as it is kept: "json" or "pickle", and the bytes."""
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
        found: dict[str, Any] = self._client.request(
            "GET", f"{self._path}/tasks/{quote(name, safe='')}"
        )
        return found

    def log(self, task: str, attempt: int | None = None) -> bytes:
        query = f"?attempt={attempt}" if attempt else ""
        path = f"{self._path}/tasks/{quote(task, safe='')}/log{query}"
        found: bytes = self._client.request("GET", path)
        return found

    def cancel(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.request("POST", self._path + "/cancel")
        return found

    def files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None:
            page = self._client.request("GET", f"{self._path}/files?start={start}")
            found += page["files"]
            start = page["next"]
        return found

    def read(self, name: str) -> bytes:
        found = self._client.request("GET", f"{self._path}/files/{quote(name)}")
        return found if isinstance(found, bytes) else json.dumps(found).encode()

    def download(self, name: str, target: Path) -> int:
        """Whole and with the right hash, or not at all; the size."""
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
                raise Unreachable(f"{name} came incomplete or changed; try again")
            part.replace(target)
        except (http.client.HTTPException, OSError) as error:
            raise Unreachable(f"{name} could not be fetched: {error}") from None
        finally:
            part.unlink(missing_ok=True)
        return size

    def events(self, after: str = "") -> Iterator[dict[str, Any]]:
        """Until it has ended. A broken stream is taken up where it broke."""
        failures = 0
        while True:
            headers = {"Last-Event-ID": after} if after else {}
            try:
                connection, response = self._client._open(
                    "GET", self._path + "/events", headers=headers
                )
                with contextlib.closing(connection):
                    for event in _stream(response):
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
                if failures > 10:
                    raise
            except Problem as problem:
                if problem.status != 503:
                    raise
                if not failures:
                    yield {"type": "interrupted", "reason": problem.detail, "at": time.time()}
            failures += 1
            time.sleep(min(2.0, 0.2 * failures))

    def wait(self) -> str:
        """Until it has ended; how. A peer that is away for a moment is waited for."""
        failures = 0
        while True:
            try:
                state = str(self.view(WAIT_S)["state"])
            except Unreachable:
                failures += 1
                if failures > 10:
                    raise
                time.sleep(min(2.0, 0.2 * failures))
                continue
            except Problem as problem:
                if problem.status != 503:  # else its keepers are away: nothing is lost, wait
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
        found = json.loads(response.read())
    except (ValueError, OSError, http.client.HTTPException):
        found = None
    return found if isinstance(found, dict) else {"title": response.reason}


def token_from_file() -> str | None:
    path = os.environ.get("VALENCE_TOKEN_FILE")
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise Unreachable(f"VALENCE_TOKEN_FILE: {error}") from None


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
