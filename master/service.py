"""The task queue as a service, with HTTP, SQLite and files; its workflow API is that of a peer.

`POST /v1/queue` takes one packed message of a site's master pilot and returns its answer; the token
is one that sites derive from the cluster's token. `GET /v1/queue` shows the sites.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar

import aiohttp
from aiohttp import web

from valence.peer.blobs import BlobError, DiskBlobs
from valence.peer.daemon import Daemon
from valence.peer.http import Http
from valence.peer.tokens import PILOT, PilotToken
from valence.protocols.consensus.placement import QUEUED
from valence.protocols.data.transfer import Transfer, TransferResult, Unavailable
from valence.protocols.engine import views
from valence.protocols.engine.gateway import Gateway
from valence.protocols.engine.home import Home
from valence.protocols.engine.targets import Targets
from valence.protocols.wire.codec import FrameKind, Malformed, decode, encode
from valence.protocols.wire.messages import Capacity, File, Message, Moved, PullTasks, StillHeld
from valence.protocols.wire.rpc import Refused

from .queue import Sites

log = logging.getLogger("valence.queue")

FETCH_S = 600.0
CHUNK_BYTES = 1 << 20
PACKED = "application/msgpack"


class QueueTransfer(Transfer):
    """Fetches files of the sites' pilots over HTTP: the queue is no member of their cluster."""

    _blobs: DiskBlobs
    sites: Sites
    token: PilotToken

    def _urls(self, file: File) -> Iterable[str]:
        for pilot in file.holders:
            for site in self.sites.sites.values():
                member = site.pilots.get(pilot)
                if member is not None and member.http:
                    yield f"{member.http}/v1/blobs/sha256:{file.hash.hex()}"
        # any pilot can find it in the catalog
        for site in self.sites.sites.values():
            for member in list(site.pilots.values())[:2]:
                if member.http:
                    yield f"{member.http}/v1/blobs/sha256:{file.hash.hex()}"

    async def _open(self, file: File, start: int, end: int) -> AsyncIterator[bytes]:
        reasons = []
        headers = {"Authorization": f"Bearer {self.token}"}
        limit = aiohttp.ClientTimeout(total=FETCH_S, sock_read=60, sock_connect=5)
        position = start
        async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
            for url in self._urls(file):
                if position >= end:
                    return
                ask = {"Range": f"bytes={position}-{end - 1}"} if end > position else {}
                try:
                    async with session.get(
                        url, headers=ask, raise_for_status=True, allow_redirects=False
                    ) as response:
                        async for data in response.content.iter_chunked(CHUNK_BYTES):
                            position += len(data)
                            yield data
                    if position >= end:
                        return
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    reasons.append(f"{url.partition('/v1/')[0]}: {error}"[:200])
        if position < end or not file.size:
            why = "; ".join(reasons[:4]) or "no peer that holds it is known"
            raise Unavailable(f"{file.name}: no peer could send it ({why})")

    async def find(self, digest: bytes) -> list[bytes]:
        """Its holders at the sites, as their results say."""
        file = self.sites.find_file(digest)
        return list(file.holders) if file is not None else []

    async def size(self, digest: bytes, holders: list[bytes]) -> int | None:
        file = self.sites.find_file(digest)
        return file.size if file is not None else None

    async def read(self, file: File, start: int, end: int) -> AsyncIterator[bytes]:
        here = file.hash in self._blobs
        async for data in super().read(file, start, end) if here else self._open(file, start, end):
            yield data

    async def fetch_all(self, files: Iterable[File], hold: str = "") -> TransferResult:
        result = TransferResult()
        moved_bytes = 0
        for file in files:
            if file.hash in self._blobs:
                self._blobs.hold(file.hash, hold)
                continue
            try:
                parts = self._open(file, 0, file.size)
                await self._blobs.receive(parts, file.hash, file.size, hold)
                moved_bytes += file.size
            except (BlobError, TimeoutError) as error:
                result.errors.append((file, error))
        result.moved = Moved(peer=moved_bytes)
        return result


class QueueHttp(Http):
    scopes: ClassVar[dict[str, str]] = {**Http.scopes, "_queue": PILOT, "_sites": "read"}
    sites: Sites

    async def add_routes(self, app: web.Application) -> None:
        app.router.add_route("POST", "/v1/queue", self._queue)
        app.router.add_route("GET", "/v1/queue", self._sites)

    async def _queue(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            message = decode(body).message
        except Malformed as error:
            return web.json_response({"title": "Invalid message", "detail": str(error)}, status=400)
        try:
            answer: Message
            if isinstance(message, PullTasks):
                answer = await self.sites.pull(message)
            elif isinstance(message, StillHeld):
                answer = await self.sites.unheld(message)
            else:
                text = f"a task queue does not answer {type(message).__name__} messages"
                raise Refused("unsupported", text)
        except Refused as error:
            problem = {"title": "Refused", "detail": error.text, "code": error.code}
            return web.json_response(problem, status=409)
        return web.Response(body=encode(FrameKind.REPLY, 0, answer), content_type=PACKED)

    async def _sites(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        rows = [
            {
                "site": site.name,
                "pilots": len(site.pilots),
                "cores": sum(m.capacity.millicores for m in site.pilots.values()) / 1000,
                "given": site.given,
                "done": site.done,
                "out": len(self.sites.given_to(site)),
                "heard_s_ago": round(now - site.heard_at, 1),
            }
            for site in self.sites.sites.values()
        ]
        counts = dict(self.sites.counts)
        return web.json_response(
            {"sites": rows, "waiting": len(self.sites.pulled), "counts": counts}
        )


class QueueGateway(Gateway):
    sites: Sites

    async def peers(self) -> views.PeerList:
        """The pilots that sites have named."""
        sites = self.sites.sites.values()
        return views.PeerList(
            peers=[self._peer(m, None, False) for site in sites for m in site.pilots.values()]
        )


class QueueDaemon(Daemon):
    """A daemon without other peers and without capacity: it has a journal, and sites ask it."""

    what = "task queue"
    runs_tasks = False
    sites: Sites

    def make_transfer(self, *parts: Any) -> Transfer:
        self._transfer = QueueTransfer(*parts)
        return self._transfer

    def make_targets(self, home: Home) -> Targets:
        self.sites = self._transfer.sites = Sites(home)
        self._transfer.token = PilotToken(self._settings.token, time.time)
        return self.sites

    def make_gateway(self, *parts: Any) -> Gateway:
        gateway = QueueGateway(*parts)
        gateway.sites, gateway.prefix = self.sites, QUEUED
        return gateway

    def make_http(self, **parts: Any) -> Http:
        http = QueueHttp(**parts)
        http.sites = self.sites
        return http

    def _capacity(self) -> Capacity:
        return Capacity(disk_bytes=self._settings.disk)

    async def start(self) -> None:
        await super().start()
        self._run("sites", self.sites.watch)
        self.metrics.counters(
            "queue", "Requests of sites, tasks given out, outcomes", lambda: dict(self.sites.counts)
        )
