"""Storage elements: reads inputs from, and delivers results to, places outside of the cluster.

`http(s)://host/path` is read with GET and written with PUT; `s3://bucket/key` is at the one
S3-compatible service of this peer's settings; `file:///path` is a file below one of the directories
that this peer's operator has opened. If a peer can't reach a place, the error says why in one
sentence, and whether trying again may help (`passing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import aiohttp
import aiohttp.abc
from yarl import URL

from valence.protocols.data.cache import Reservation
from valence.protocols.engine.delivery import shown
from valence.protocols.ports import StorageError
from valence.protocols.wire.messages import File

from .blobs import CHUNK_BYTES, DiskBlobs, WrongHash, copy_file
from .settings import Settings
from .tokens import PilotToken

if TYPE_CHECKING:
    from obstore.store import S3Store

TRANSFER_S = 3600.0
READ_S = 60.0
CONNECT_S = 10.0
PART_BYTES = 8 << 20
AT_ONCE = 4
STORES_MAX = 64
REDIRECTS = 5
TRIES = 4
OWNER = "user.valence.owner"  # the owner who delivered a file
S3_OWNER = "valence-owner"
NOT_YOURS = "{}: the file exists already, and is not known to be yours; choose another name"
#: metadata services, where clouds tell their machines secrets, besides link-local addresses
METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
LOCAL = "workflows may not use this machine's own addresses (the peer's --local-urls allows it)"
QUEUE = "queue"  # URL scheme of files that a task queue has, or can fetch from another site
_QUEUE_BLOB = QUEUE + ":/v1/blobs/sha256:[0-9a-f]{64}"


class ExternalStorage:
    """Reads and writes the URLs of a document, as this peer's settings allow."""

    def __init__(self, settings: Settings, blobs: DiskBlobs) -> None:
        self._settings = settings
        self._blobs = blobs
        self._roots = [Path(os.path.realpath(root)) for root in settings.files]
        self._stores: dict[str, S3Store] = {}
        self._pilot_token = PilotToken(settings.token, time.time)

    # ----------------------------------------------------------------- in

    async def bring(self, url: str, hold: str) -> tuple[bytes, int]:
        """Make the content of a URL a blob. The size that the server announces is only trusted for
        how much disk space to reserve."""
        part = self._blobs.new_part()
        hasher = hashlib.sha256()
        try:
            async with contextlib.aclosing(self._read(url)) as parts:
                size = await _size(parts)
                async with self._blobs.make_room(size or 0) as room:
                    count = await self._save(parts, part, room, hasher)
                    if size is not None and size != count:
                        text = f"the transfer ended after {count:,} of {size:,} bytes"
                        raise StorageError(f"{shown(url)}: {text}", True)
                    return await self._blobs.adopt(part, hold, hasher.digest(), room)
        finally:
            part.unlink(missing_ok=True)

    async def fetch(self, file: File, hold: str, room: Reservation) -> None:
        """Fetch a file whose hash is known again, as no peer has it any more."""
        part = self._blobs.new_part()
        hasher = hashlib.sha256()
        try:
            async with contextlib.aclosing(self._read(file.url)) as parts:
                await _size(parts)
                await self._save(parts, part, room, hasher)
            if hasher.digest() != file.hash:
                raise WrongHash(
                    f"{shown(file.url)}: the content has changed since the workflow first read it; "
                    "submit the workflow again"
                )
            await self._blobs.adopt(part, hold, file.hash, room)
        finally:
            part.unlink(missing_ok=True)

    async def _save(
        self,
        parts: AsyncIterator[bytes | int | None],
        path: Path,
        room: Reservation,
        hasher: Any,
    ) -> int:
        count = 0
        with path.open("wb") as file:
            async for data in parts:
                assert isinstance(data, bytes)
                count += len(data)
                self._blobs.widen(room, count)
                hasher.update(data)
                await asyncio.to_thread(file.write, data)
        return count

    async def _read(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        """The size first, or None if the server does not announce it; then the bytes."""
        scheme = urlsplit(url).scheme
        try:
            if scheme in ("http", "https", QUEUE, "s3"):
                parts = self._read_s3(url) if scheme == "s3" else self._read_http(url)
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        yield part
            else:
                path = self._local(url)
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(fd, "rb") as file:
                    if not path.is_file():
                        raise StorageError(f"{shown(url)}: not a plain file")
                    yield os.fstat(fd).st_size
                    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        yield data
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _storage_error(url, error) from None  # (`ValueError`: not a valid URL)

    async def _read_http(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        limit = aiohttp.ClientTimeout(total=TRANSFER_S, sock_read=READ_S, sock_connect=CONNECT_S)
        headers = {}
        at_queue = urlsplit(url).scheme == QUEUE
        if at_queue:
            url = self._at_queue(url)
            headers["Authorization"] = f"Bearer {self._pilot_token}"
        local = at_queue or self._settings.local_urls
        async with self._session(limit, local, headers) as session:
            redirects = 0 if at_queue else REDIRECTS
            async with await self._get(session, URL(url, encoded=at_queue), redirects) as response:
                packed = "Content-Encoding" in response.headers
                yield None if packed else response.content_length
                async for data in response.content.iter_chunked(CHUNK_BYTES):
                    yield data

    async def _get(
        self, session: aiohttp.ClientSession, url: URL, redirects: int
    ) -> aiohttp.ClientResponse:
        """Each address is checked before the request, the targets of redirects too."""
        for _ in range(redirects + 1):
            self._check_address(url, redirects == 0)
            response = await session.get(url, allow_redirects=False)
            if response.status not in (301, 302, 303, 307, 308):
                response.raise_for_status()
                return response
            response.release()
            target = URL(response.headers.get("Location", ""))
            if not redirects or target.scheme not in ("", "http", "https"):
                break
            url = url.join(target)
        raise StorageError(f"{shown(str(url))}: too many redirects, or one that can't be followed")

    def _check_address(self, url: URL, at_queue: bool = False) -> None:
        if not at_queue and not self._settings.local_urls and _is_local(url.host or ""):
            raise StorageError(f"{shown(str(url))}: {LOCAL}")

    def _at_queue(self, url: str) -> str:
        """The URL of a blob of this peer's queue, and of nothing else: this peer's token is sent
        there. (Documents can't have such a URL: only queues write it.)"""
        base = self._settings.queue.rstrip("/")
        if not base or not re.fullmatch(_QUEUE_BLOB, url):
            raise StorageError(f"{shown(url)}: not a file of this peer's task queue")
        return base + url.removeprefix(f"{QUEUE}:")

    async def _read_s3(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        import obstore

        store, key = self._s3(url)
        try:
            answer = await obstore.get_async(store, key)
            yield int(answer.meta["size"])
            async for data in answer.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(data)
        except obstore.exceptions.BaseError as error:
            raise _storage_error(url, error) from None

    # ----------------------------------------------------------------- out

    async def deliver(self, digest: bytes, url: str, owner: str) -> None:
        """Write a blob of this peer to its destination, where it appears whole or not at all."""
        path, size = self._blobs.path(digest), self._blobs.size(digest) or 0
        scheme = urlsplit(url).scheme
        try:
            if scheme in ("http", "https"):
                await self._put_http(path, size, url)
            elif scheme == "s3":
                await self._put_s3(path, url, owner)
            else:
                await asyncio.to_thread(self._put_file, path, url, owner)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _storage_error(url, error) from None  # (`ValueError`: not a valid URL)

    async def _put_http(self, path: Path, size: int, url: str) -> None:
        self._check_address(URL(url))

        async def parts() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield data

        limit = aiohttp.ClientTimeout(total=TRANSFER_S, sock_read=READ_S, sock_connect=CONNECT_S)
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        async with (
            self._session(limit, self._settings.local_urls) as session,
            session.put(
                url, data=parts(), headers=headers, raise_for_status=True, allow_redirects=False
            ) as response,
        ):
            if response.status >= 300:
                text = f"the server redirects elsewhere (HTTP {response.status})"
                raise StorageError(f"{shown(url)}: {text}; write the final URL")

    def _session(
        self, limit: aiohttp.ClientTimeout, local: bool, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientSession:
        """`local`: this machine's own addresses are allowed, too."""
        resolver = aiohttp.ThreadedResolver()
        connector = aiohttp.TCPConnector(resolver=resolver if local else _Elsewhere(resolver))
        return aiohttp.ClientSession(timeout=limit, headers=headers, connector=connector)

    async def _put_s3(self, path: Path, url: str, owner: str) -> None:
        """All owners write with this peer's own rights, so an object that was not delivered for
        this owner is not overwritten. (If two deliver at the same moment, the later one wins.)"""
        import obstore

        store, key = self._s3(url)
        whose = owner.encode().hex() or "-"  # only characters that a header may have
        try:
            with contextlib.suppress(FileNotFoundError):
                answer = await obstore.get_async(store, key, options={"head": True})
                if answer.attributes.get(S3_OWNER) != whose:
                    raise StorageError(NOT_YOURS.format(shown(url)))
            # cancelled half-way, an upload would leave its parts at the server: let it finish
            put = obstore.put_async(
                store,
                key,
                path,
                attributes={S3_OWNER: whose},
                chunk_size=PART_BYTES,
                max_concurrency=AT_ONCE,
            )
            await asyncio.shield(put)
        except obstore.exceptions.BaseError as error:
            raise _storage_error(url, error) from None

    def _put_file(self, source: Path, url: str, owner: str) -> None:
        """Write beside the target first, then move into place; never overwrite a file of another
        owner, or one that was not delivered."""
        target = self._local(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}")
        try:
            copy_file(source, beside)
            with beside.open("rb") as file:
                os.fdatasync(file.fileno())
            with contextlib.suppress(OSError):  # some file systems can't record an owner
                os.setxattr(beside, OWNER, owner.encode())
            try:
                os.link(beside, target)
            except FileExistsError:
                if _owner_of(target) != owner.encode():
                    raise StorageError(NOT_YOURS.format(shown(url))) from None
                beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    # ----------------------------------------------------------------- where

    def _local(self, url: str) -> Path:
        """The real path of a file, if it is below a directory that is open to workflows."""
        split = urlsplit(url)
        if split.netloc not in ("", "localhost"):
            raise StorageError(f"{shown(url)}: write file:///path, without a host")
        if not self._roots:
            raise StorageError(
                f"{shown(url)}: this peer opens no directory to workflows (start it with --files)"
            )
        real = Path(os.path.realpath(unquote(split.path)))
        if not any(real.is_relative_to(root) and real != root for root in self._roots):
            raise StorageError(
                f"{shown(url)}: outside of the directories that this peer opens with --files"
            )
        return real

    def _s3(self, url: str) -> tuple[S3Store, str]:
        from obstore.store import S3Store

        settings = self._settings
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if not bucket or not key:
            raise StorageError(f"{shown(url)}: write s3://bucket/key")
        # without both keys, the library would ask the machine's cloud for some
        if not settings.s3_access_key or not settings.s3_secret_key:
            raise StorageError(
                f"{shown(url)}: this peer has no S3 credentials: set VALENCE_S3_ACCESS_KEY and "
                f"VALENCE_S3_SECRET_KEY (or …_FILE), and VALENCE_S3_ENDPOINT"
            )
        store = self._stores.get(bucket)
        if store is None:
            if len(self._stores) >= STORES_MAX:
                self._stores.clear()
            endpoint = settings.s3_endpoint or None
            store = self._stores[bucket] = S3Store(
                bucket,
                endpoint=endpoint,
                access_key_id=settings.s3_access_key,
                secret_access_key=settings.s3_secret_key,
                region=settings.s3_region,
                virtual_hosted_style_request=endpoint is None,
                client_options={
                    "allow_http": (endpoint or "").startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "read_timeout": timedelta(seconds=READ_S),
                    "timeout": timedelta(seconds=TRANSFER_S),
                },
                retry_config={
                    "max_retries": TRIES,
                    "retry_timeout": timedelta(seconds=READ_S),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=200),
                        "max_backoff": timedelta(seconds=5),
                        "base": 2,
                    },
                },
            )
        return store, unquote(key)


class _Elsewhere(aiohttp.abc.AbstractResolver):
    """Resolves names, except to this machine's own addresses: services there trust local users."""

    def __init__(self, resolver: aiohttp.abc.AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        rows = await self._resolver.resolve(host, port, family)
        allowed = [row for row in rows if not _is_local(row["host"])]
        if not allowed:
            raise OSError(errno.EACCES, LOCAL)
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


def _is_local(host: str) -> bool:
    """True for an address of this machine, a link-local one, or a cloud's metadata service."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name: checked again when it is resolved
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or address.is_link_local:
        return True
    if address.is_unspecified or address.is_multicast:
        return True
    return str(address) in METADATA or _is_own(address)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """A socket can only be bound to the machine's own addresses."""
    kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _owner_of(path: Path) -> bytes:
    try:
        return os.getxattr(path, OWNER)
    except OSError:
        return b""


async def _size(parts: AsyncIterator[bytes | int | None]) -> int | None:
    first = await anext(parts)
    assert not isinstance(first, bytes)
    return first


def _storage_error(url: str, error: BaseException) -> StorageError:
    """The error in one line: libraries write more, and sometimes a secret."""
    if isinstance(error, aiohttp.ClientResponseError):
        return StorageError(
            f"{shown(url)}: HTTP {error.status} {error.message}"[:500], error.status >= 500
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{shown(url)}: no such file")
    if isinstance(error, PermissionError) or "PermissionDenied" in type(error).__name__:
        return StorageError(f"{shown(url)}: access denied")
    if isinstance(error, TimeoutError):
        return StorageError(f"{shown(url)}: the transfer timed out", True)
    if isinstance(error, OSError) and error.strerror:
        return StorageError(f"{shown(url)}: {error.strerror}", True)
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return StorageError(f"{shown(url)}: {first}"[:500], True)
