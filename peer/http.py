"""The HTTP server of a peer: authentication, limits, problem documents, and one handler per route.

Only `/healthz` is served without a token. Every error becomes an RFC 9457 problem document,
whatever raised it; an unexpected one is logged here and answered with 500, without its details.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from aiohttp import http_exceptions, web
from pydantic import BaseModel

from valence.protocols.data.transfer import Transfer
from valence.protocols.engine import views
from valence.protocols.engine.answers import ApiError
from valence.protocols.engine.gateway import Gateway
from valence.protocols.wire.messages import File
from valence.workflow.strategies import names
from valence.workflow.tree import DOCUMENT_BYTES_MAX

from .blobs import OWN, BlobError, DiskBlobs
from .limits import ConnectionLimits, Rates
from .metrics import CONTENT_TYPE, Metrics
from .routes import ROUTES, VERSION, openapi
from .tokens import Access, BadToken, Tokens

log = logging.getLogger("valence.http")

STREAMS_MAX = 1000
STREAMS_PER_OWNER_MAX = 100
#: of documents this long, one owner has only a few in memory at a time
LONG_BYTES, LONG_AT_ONCE, LONG_WAIT_S = 64 * 1024, 4, 60.0
EVENT_WAIT_S = 10.0
WAIT_S_MAX = 10.0
STALL_S = 60.0  # for a body that does not arrive, or an answer that is not read
HEADER_BYTES_MAX = 16 * 1024
KEY_CHARS_MAX = 200
WORKFLOW_STATES = ("running", "succeeded", "failed", "cancelled")
REQUESTS_PER_S, REQUESTS_BURST = 5000.0, 10_000.0  # with one token, at this peer
WRONG_TOKENS_PER_S, WRONG_TOKENS_BURST = 5.0, 50.0  # from one address
_GRANT = web.RequestKey("grant", Access)
_SCOPES = {"_" + route.handler: route.scope for route in ROUTES}
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_EVENT = re.compile(r"(\d{1,15})\.(\d{1,9})")
_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    408: "Too slow",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    422: "Invalid document",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
    507: "Insufficient storage",
}


class Http:
    scopes: ClassVar[dict[str, str]] = _SCOPES
    for_pilots: ClassVar[frozenset[str]] = frozenset({"_get_blob"})

    def __init__(
        self,
        *,
        gateway: Gateway,
        blobs: DiskBlobs,
        transfer: Transfer,
        metrics: Metrics,
        tokens: Tokens,
        requests_max: int,
        peer: str,
        blob_arrived: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._gateway = gateway
        self._blobs = blobs
        self._transfer = transfer
        self._metrics = metrics
        self._tokens = tokens
        self._request_rates = Rates(REQUESTS_PER_S, REQUESTS_BURST)
        self._wrong_token_rates = Rates(WRONG_TOKENS_PER_S, WRONG_TOKENS_BURST)
        self._connections: ConnectionLimits | None = None
        self._requests_max = requests_max
        self._peer = peer
        self._blob_arrived = blob_arrived
        self._clock = clock
        self._open = 0
        self._open_by: Counter[str] = Counter()
        self._streams = 0
        self._streams_by: Counter[str] = Counter()  # by owner
        self._long: dict[str, tuple[asyncio.Semaphore, int]] = {}  # by owner; number of its users
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._stopping = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        app = web.Application(middlewares=[self._guard], client_max_size=DOCUMENT_BYTES_MAX)
        for route in ROUTES:
            path = route.path.replace("{name}", "{name:.+}")
            app.router.add_route(route.method, path, getattr(self, "_" + route.handler))
        await self.add_routes(app)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._connections = ConnectionLimits(server, self.counts)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connections, host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def add_routes(self, app: web.Application) -> None:
        """Overridden by services with more routes."""

    async def stop(self) -> None:
        self._stopping.set()
        if self._connections is not None:
            self._connections.close()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ----------------------------------------------------------------- every request

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._open += 1
        assert self._connections is not None
        self._connections.begin(request.protocol)
        owner = ""
        try:
            owner = self._authorize(request)
            if owner:
                self._open_by[owner] += 1
                self._check_open(owner)
            response = await handler(request)
        except ConnectionResetError:
            raise
        except Exception as error:
            response = _error_response(error, request)
        finally:
            self._open -= 1
            if owner:
                _subtract_one(self._open_by, owner)
            self._connections.end(request.protocol)
        self.counts[str(response.status)] += 1
        return response

    def _check_open(self, owner: str) -> None:
        if self._open > self._requests_max:
            text = f"this peer has {self._requests_max} requests open, its limit"
            raise ApiError(503, f"{text}; try again in a moment, or ask another peer")
        limit = max(1, self._requests_max // 2)
        if self._open_by[owner] > limit:
            text = f"you have {limit} requests open at this peer, the limit for one owner"
            raise ApiError(429, f"{text}; wait until some are done, or ask another peer")

    def _authorize(self, request: web.Request) -> str:
        """Check the token against the route's scope; refuse guesses and too many requests.

        Returns the token's owner, to whom the limits apply; empty where no token is needed."""
        handler = getattr(request.match_info.handler, "__name__", "")
        scope = self.scopes.get(handler, "read")
        if scope == "open":
            return ""
        now = asyncio.get_running_loop().time()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        advice = "send `Authorization: Bearer <token>` (`valence token` prints one)"
        if scheme.lower() != "bearer":
            raise ApiError(401, f"this request has no token: {advice}")
        try:
            grant = self._tokens.check(token.strip())
        except BadToken as error:
            if not self._wrong_token_rates.take(request.remote or "", now):
                text = "too many invalid tokens from your address; wait a few seconds"
                raise ApiError(429, text) from None
            raise ApiError(401, f"{error}: {advice}") from None
        owner = grant.owner  # one limit, however many tokens the owner has
        if not self._request_rates.take(owner, now):
            text = f"too many requests: one owner may send {REQUESTS_PER_S:g} a second"
            raise ApiError(429, f"{text}; wait a moment")
        if not grant.may(scope, handler in self.for_pilots):
            text = f"this needs a token with scope `{scope}`, and yours has `{grant.scope}`"
            raise ApiError(403, f"{text}; ask an admin of the cluster for one")
        request[_GRANT] = grant
        return owner

    # ----------------------------------------------------------------- the peer

    async def _healthz(self, request: web.Request) -> web.Response:
        return _json(views.Health(status="ok", peer=self._peer, version=VERSION))

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(openapi())

    async def _peers(self, request: web.Request) -> web.Response:
        return _json(await self._gateway.peers())

    # ----------------------------------------------------------------- workflows

    async def _submit(self, request: web.Request) -> web.Response:
        kind = request.content_type
        if kind not in ("application/octet-stream", "text/plain") and not kind.endswith(
            ("json", "yaml")
        ):
            text = f"unsupported Content-Type {kind}"
            raise ApiError(415, f"{text}: send application/yaml or application/json")
        options = _submit_options(request)
        wait = _wait(request)
        owner = request[_GRANT].owner
        if (request.content_length or LONG_BYTES) < LONG_BYTES:
            body = await _whole_body(request)
            workflow_id, new = await self._gateway.submit(body, options, owner, bool(wait))
        else:
            async with self._turn(owner):
                body = await _whole_body(request)
                workflow_id, new = await self._gateway.submit(body, options, owner, bool(wait))
        view = await self._gateway.ask_raw(_sees(request), workflow_id, "workflow", **wait)
        return _json(view, 201 if new else 200, {"Location": f"/v1/workflows/{workflow_id}"})

    async def _plan(self, request: web.Request) -> web.Response:
        options = _submit_options(request)
        owner = request[_GRANT].owner
        async with self._turn(owner):  # (planning takes its time, however short the document)
            body = await _whole_body(request)
            return _json(await self._gateway.plan(body, options, owner))

    @contextlib.asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """One owner has a few long documents in memory at a time; the others are not read yet, and
        wait at the client's end of the connection."""
        turns, users = self._long.get(owner, (asyncio.Semaphore(LONG_AT_ONCE), 0))
        self._long[owner] = turns, users + 1
        try:
            try:
                async with asyncio.timeout(LONG_WAIT_S):
                    await turns.acquire()
            except TimeoutError:
                size = f"of {LONG_BYTES // 1024} KiB or more"
                text = f"you are submitting more than {LONG_AT_ONCE} documents {size} at once"
                raise ApiError(503, f"{text}; try again in a moment") from None
            try:
                yield
            finally:
                turns.release()
        finally:
            turns, users = self._long.pop(owner)
            if users > 1:
                self._long[owner] = turns, users - 1

    async def _workflows(self, request: web.Request) -> web.Response:
        before = request.query.get("before", "")
        if before and not re.fullmatch(r"\d{1,12}(\.\d{1,9})?,\w{1,40}", before):
            raise ApiError(400, "before: pass the `next` of the previous page")
        limit = _integer(request, "limit", 100, 1, 1000)
        state = request.query.get("state", "")
        if state and state not in WORKFLOW_STATES:
            raise ApiError(400, f"state: expected one of {', '.join(WORKFLOW_STATES)}")
        return _json(await self._gateway.workflows(_sees(request), before, limit, state))

    async def _workflow(self, request: web.Request) -> web.Response:
        wait = _wait(request)
        view = await self._gateway.ask_raw(_sees(request), _id(request), "workflow", **wait)
        return _json(view)

    async def _values(self, request: web.Request) -> web.Response:
        start = _integer(request, "start", 0, 0, 10**9)
        return _json(
            await self._gateway.ask_raw(_sees(request), _id(request), "values", start=start)
        )

    async def _value(self, request: web.Request) -> web.StreamResponse:
        """The value that a call returned: JSON, or a pickle."""
        task = request.match_info["task"]
        value = await self._gateway.ask(_sees(request), _id(request), "value", task=task)
        kind = "application/json" if value["encoding"] == "json" else "application/octet-stream"
        headers = {"X-Valence-Encoding": value["encoding"], "Content-Type": kind}
        if value["file"] is None:
            headers["X-Content-Type-Options"] = "nosniff"
            return web.Response(body=bytes.fromhex(value["data"]), headers=headers)
        row = value["file"]
        file = _file("value", row["hash"], row["size"], row["holders"])
        return await self._serve(request, file, headers)

    async def _tasks(self, request: web.Request) -> web.Response:
        return _json(
            await self._gateway.ask(
                _sees(request),
                _id(request),
                "tasks",
                limit=_integer(request, "limit", 100, 1, 1000),
                after=request.query.get("after"),
                state=request.query.get("state"),
            )
        )

    async def _task(self, request: web.Request) -> web.Response:
        task = request.match_info["task"]
        return _json(await self._gateway.ask(_sees(request), _id(request), "task", task=task))

    async def _log(self, request: web.Request) -> web.StreamResponse:
        number = None
        if "attempt" in request.query:
            number = _integer(request, "attempt", 0, 1, 2**31)
        log_view = await self._gateway.ask(
            _sees(request), _id(request), "log", task=request.match_info["task"], attempt=number
        )
        headers = {
            "X-Valence-Attempt": str(log_view["attempt"]),
            "X-Valence-Peer": log_view["peer"],
            "X-Valence-Truncated": "yes" if log_view["truncated"] else "no",
        }
        if log_view["file"] is None:
            return web.Response(text=log_view["text"], content_type="text/plain", headers=headers)
        digest, size, holders = log_view["file"]
        file = _file("log", digest, size, holders)
        try:
            text = b"".join([part async for part in self._transfer.read(file, 0, size)])
        except BlobError:
            # the peer that ran it is gone with the whole log; its end travelled with the outcome
            headers["X-Valence-Truncated"] = "beginning lost with its peer"
            return web.Response(text=log_view["text"], content_type="text/plain", headers=headers)
        whole = text.decode("utf-8", "replace")
        return web.Response(text=whole, content_type="text/plain", headers=headers)

    async def _cancel(self, request: web.Request) -> web.Response:
        return _json(await self._gateway.ask(_sees(request), _id(request), "cancel"))

    async def _files(self, request: web.Request) -> web.Response:
        start = _integer(request, "start", 0, 0, 10**9)
        return _json(await self._gateway.ask(_sees(request), _id(request), "files", start=start))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        row = await self._gateway.ask(_sees(request), _id(request), "file", name=name)
        file = _file(name, row["hash"], row["size"], row["holders"])
        return await self._serve(request, file)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        position = _event_position(request)
        owner = request[_GRANT].owner
        self._check_streams(owner)
        workflow_id = _id(request)
        sees = _sees(request)
        page = await self._gateway.ask(sees, workflow_id, "events", after=position, wait_s=0)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self._streams += 1
        self._streams_by[owner] += 1
        try:
            await response.prepare(request)
            await self._stream(response, (sees, workflow_id), position, page)
        except ApiError as problem:  # the home is gone: the client resumes where the stream ended
            note = json.dumps({"type": "interrupted", "reason": problem.detail})
            await response.write(f"event: interrupted\ndata: {note}\n\n".encode())
        except ConnectionResetError:
            pass  # the client has disconnected
        finally:
            self._streams -= 1
            _subtract_one(self._streams_by, owner)
        return response

    def _check_streams(self, owner: str) -> None:
        if self._streams >= STREAMS_MAX:
            text = f"this peer has {STREAMS_MAX} event streams open, its limit"
            raise ApiError(503, f"{text}; ask another peer, or poll")
        if self._streams_by[owner] >= STREAMS_PER_OWNER_MAX:
            text = f"you have {STREAMS_PER_OWNER_MAX} event streams open at this peer, the limit"
            raise ApiError(429, f"{text}; ask another peer, or poll")

    async def _stream(
        self,
        response: web.StreamResponse,
        which: tuple[str, str],
        position: tuple[int, int],
        page: Any,
    ) -> None:
        while True:
            text = []
            for event in page["events"]:
                first, _, second = event["id"].partition(".")
                position = int(first), int(second)
                data = json.dumps(event, ensure_ascii=False)
                text.append(f"id: {event['id']}\nevent: {event['type']}\ndata: {data}\n\n")
            # a comment now and then shows each side that the other is still connected
            await response.write("".join(text).encode() or b": waiting\n\n")
            if page["over"] or self._stopping.is_set():
                return
            page = await self._gateway.ask(*which, "events", after=position, wait_s=EVENT_WAIT_S)

    # ----------------------------------------------------------------- blobs

    async def _put_blob(self, request: web.Request) -> web.Response:
        digest = _digest(request)
        known = self._blobs.size(digest)
        hold = _upload_of(request[_GRANT].owner)
        cache = self._blobs.cache
        if known is not None and hold not in cache.holds(digest):
            cache.check_upload(hold, known)
        if known is not None:
            await request.release()
            self._blobs.touch(digest)
            self._blobs.hold(digest, hold)
            self._blob_arrived(digest)
            return _json(views.BlobView(hash=f"sha256:{digest.hex()}", size=known))
        announced = request.content_length
        with cache.uploading(hold, announced or 0) as grow:
            size = await self._blobs.receive(_counted(request, grow), digest, announced, hold)
        await self._transfer.announce(digest)
        self._blob_arrived(digest)
        return _json(views.BlobView(hash=f"sha256:{digest.hex()}", size=size), 201)

    async def _delete_blob(self, request: web.Request) -> web.Response:
        digest = _digest(request)
        grant = request[_GRANT]
        size = self._blobs.size(digest) or 0
        if not self._blobs.delete(digest, None if not grant.sees else _upload_of(grant.owner)):
            raise ApiError(404, f"you have not uploaded sha256:{digest.hex()} to this peer")
        return _json(views.BlobView(hash=f"sha256:{digest.hex()}", size=size))

    async def _get_blob(self, request: web.Request) -> web.StreamResponse:
        digest = _digest(request)
        size = self._blobs.size(digest)
        holders: list[bytes] = []
        if size is None:
            holders = await self._transfer.find(digest)
            size = await self._transfer.size(digest, holders)
        if size is None:
            raise ApiError(404, f"no known peer holds sha256:{digest.hex()}")
        name = digest.hex()
        return await self._serve(request, _file(name, name, size, [h.hex() for h in holders]))

    async def _serve(
        self, request: web.Request, file: File, more: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        start, end, status = 0, file.size, 200
        if "Range" in request.headers:
            start, end = _range(request, file.size)
            status = 206
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - start),
            "Accept-Ranges": "bytes",
            "ETag": f'"{file.hash.hex()}"',
            "X-Content-Type-Options": "nosniff",
            "Content-Disposition": "attachment",
            **more,
        }
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        parts = self._transfer.read(file, start, end)
        # the first part before the first header: a file that no peer can send is an error, and not
        # a success that breaks off
        first = await anext(parts, b"")
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        try:
            async with asyncio.timeout(STALL_S):
                await response.write(first)
            async for part in parts:
                async with asyncio.timeout(STALL_S):
                    await response.write(part)
        except (BlobError, OSError, TimeoutError) as error:
            # half of the body is sent: closing the connection is the only way to tell the client
            log.warning("GET %s was cut short: %s", request.path, str(error) or "timeout")
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError from None
        return response


def _subtract_one(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


def _submit_options(request: web.Request) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("time_scale", "size_scale"):
        if name in request.query:
            options[name] = _number(request, name)
    if "strategy" in request.query:
        options["strategy"] = strategy = request.query["strategy"]
        if strategy not in names():
            raise ApiError(400, f"strategy: expected one of {', '.join(names())}")
    if "accept" in request.query:
        options["accept"] = offer = request.query["accept"]
        if not re.fullmatch(r"[0-9a-f]{16}", offer):
            raise ApiError(400, "accept: expected the `offer` of an earlier answer")
    key = request.headers.get("Idempotency-Key")
    if key is not None:
        if not key or len(key) > KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
            text = f"expected 1 to {KEY_CHARS_MAX} printable ASCII characters"
            raise ApiError(400, f"Idempotency-Key: {text}")
        options["idempotency"] = key
    return options


def _event_position(request: web.Request) -> tuple[int, int]:
    last = request.headers.get("Last-Event-ID") or request.query.get("after") or ""
    if not last:
        return -1, -1
    match = _EVENT.fullmatch(last)
    if match is None:
        raise ApiError(400, "Last-Event-ID: expected the id of an event, such as 12.0")
    return int(match[1]), int(match[2])


def _upload_of(owner: str) -> str:
    """The name that keeps an uploaded file for its owner."""
    return f"{OWN}-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


def _error_response(error: Exception, request: web.Request) -> web.Response:
    response = _problem(_as_problem(error, request))
    if isinstance(error, web.HTTPException) and "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _as_problem(error: Exception, request: web.Request) -> ApiError:
    match error:
        case ApiError():
            return error
        case BlobError():
            return ApiError(error.status, str(error))
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"the body is too large: at most {DOCUMENT_BYTES_MAX:,} bytes")
        case web.HTTPException():
            text = f"{request.method} {request.path}: {error.reason}"
            return ApiError(error.status, f"{text}; `/openapi.json` lists the routes")
        case TimeoutError():
            return ApiError(408, f"the request timed out: no data for {STALL_S:g} s; send it again")
        case web.RequestPayloadError() | http_exceptions.HttpProcessingError():
            return ApiError(400, f"the request's body can't be read: {error}")
        case _:
            log.exception("%s %s failed", request.method, request.path)
            return ApiError(500, "internal error of this peer; its log has the details")


def _problem(problem: ApiError) -> web.Response:
    document = views.ProblemDocument(
        title=_TITLES.get(problem.status, "Error"),
        status=problem.status,
        detail=problem.detail,
        errors=problem.errors,
        **problem.more,
    )
    headers = {}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status in (429, 503):
        headers["Retry-After"] = "1"
    return web.Response(
        text=document.model_dump_json(),
        status=problem.status,
        content_type="application/problem+json",
        headers=headers,
    )


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    if isinstance(value, bytes):  # JSON already
        kind = "application/json"
        return web.Response(body=value, status=status, content_type=kind, headers=headers)
    text = value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value)
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


def _sees(request: web.Request) -> str:
    """The owner whose workflows this request may see; empty: all owners."""
    grant: Access = request[_GRANT]
    return grant.sees


def _id(request: web.Request) -> str:
    workflow_id = request.match_info["id"]
    if not re.fullmatch(r"\w{1,40}", workflow_id):
        raise ApiError(404, "there is no such workflow; `/v1/workflows` lists yours")
    return workflow_id


def _digest(request: web.Request) -> bytes:
    match = _HASH.fullmatch(request.match_info["hash"])
    if match is None:
        raise ApiError(400, "blob name: expected `sha256:` and 64 lower-case hexadecimal digits")
    return bytes.fromhex(match[1])


def _integer(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not low <= int(text) <= high:
        raise ApiError(400, f"{name}: expected a whole number from {low:,} to {high:,}")
    return int(text)


def _wait(request: web.Request) -> dict[str, float]:
    if "wait" not in request.query:
        return {}
    return {"wait_s": min(WAIT_S_MAX, _number(request, "wait"))}


def _number(request: web.Request, name: str) -> float:
    try:
        value = float(request.query[name])
        if 0 <= value <= 1e6:
            return value
    except ValueError:
        pass
    raise ApiError(400, f"{name}: expected a number from 0 to 1,000,000")


def _range(request: web.Request, size: int) -> tuple[int, int]:
    try:
        part = request.http_range
    except ValueError:
        raise ApiError(416, "Range: expected one range of bytes, such as bytes=0-99") from None
    start, stop, _ = part.indices(size)
    if start >= stop:
        raise ApiError(416, f"the range is outside the file, which has {size:,} bytes")
    return start, stop


def _file(name: str, digest: str, size: int, holders: list[str]) -> File:
    return File(
        name=name,
        hash=bytes.fromhex(digest),
        size=size,
        holders=tuple(bytes.fromhex(h) for h in holders)[:16],
    )


async def _whole_body(request: web.Request) -> bytes:
    if request.content.is_eof():  # it has come with the head, and nothing is left to wait for
        return await request.read()
    async with asyncio.timeout(STALL_S):
        return await request.read()


async def _counted(request: web.Request, grow: Callable[[int], None]) -> AsyncIterator[bytes]:
    count = 0
    async for chunk in _chunks(request):
        count += len(chunk)
        grow(count)
        yield chunk


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    while True:
        async with asyncio.timeout(STALL_S):
            chunk = await request.content.read(1 << 20)
        if not chunk:
            return
        yield chunk
