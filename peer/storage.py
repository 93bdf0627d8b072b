"""Storage elements: where inputs come from and results go to, outside of the peers' own caches.

`http(s)://host/path` is read with GET and written with PUT; `s3://bucket/key` is at the one
S3-compatible service that this peer was told of; `file:///path` is a file below one of the
directories that this peer's operator has opened. What a peer can't reach it says in a sentence, and
whether trying again may help (`passing`).
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
OWNER = "user.valence.owner"  # who delivered a file
S3_OWNER = "valence-owner"
NOT_YOURS = "{}: there is a file already, and nothing says that it is yours; choose another name"
#: where clouds tell their machines what only these may know, besides link-local addresses
METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
LOCAL = "workflows do not reach what is this machine's own (--local-urls allows it)"
QUEUE = "queue"  # the scheme of what a task queue has, or can fetch from another site
_QUEUE_BLOB = QUEUE + ":/v1/blobs/sha256:[0-9a-f]{64}"


class ExternalStorage:
    def __init__(self, settings: Settings, blobs: DiskBlobs) -> None:
        self._settings = settings
        self._blobs = blobs
        self._roots = [Path(os.path.realpath(root)) for root in settings.files]
        self._stores: dict[str, S3Store] = {}
        self._pilot_token = PilotToken(settings.token, time.time)

    # ----------------------------------------------------------------- in

    async def bring(self, url: str, hold: str) -> tuple[bytes, int]:
        """What is there becomes a blob; the other end's word for its size is only believed in so
        far as it says how much room is needed."""
        part = self._blobs.new_part()
        digest = hashlib.sha256()
        try:
            async with contextlib.aclosing(self._read(url)) as parts:
                size = await _number(parts)
                async with self._blobs.make_room(size or 0) as room:
                    count = await self._save(parts, part, room, digest)
                    if size is not None and size != count:
                        raise StorageError(f"{shown(url)}: {count:,} of {size:,} bytes came", True)
                    return await self._blobs.adopt(part, hold, digest.digest(), room)
        finally:
            part.unlink(missing_ok=True)

    async def fetch(self, file: File, hold: str, room: Reservation) -> None:
        """A file whose hash is known: where no peer has it any more."""
        part = self._blobs.new_part()
        digest = hashlib.sha256()
        try:
            async with contextlib.aclosing(self._read(file.url)) as parts:
                await _number(parts)
                await self._save(parts, part, room, digest)
            if digest.digest() != file.hash:
                raise WrongHash(
                    f"{shown(file.url)}: it is not what it was when the workflow read it first"
                )
            await self._blobs.adopt(part, hold, file.hash, room)
        finally:
            part.unlink(missing_ok=True)

    async def _save(
        self,
        parts: AsyncIterator[bytes | int | None],
        path: Path,
        room: Reservation,
        digest: Any,
    ) -> int:
        count = 0
        with path.open("wb") as file:
            async for data in parts:
                assert isinstance(data, bytes)
                count += len(data)
                self._blobs.widen(room, count)
                digest.update(data)
                await asyncio.to_thread(file.write, data)
        return count

    async def _read(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        """Its size, if the other end says it; then its bytes."""
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
                        raise StorageError(f"{shown(url)}: it is no plain file")
                    yield os.fstat(fd).st_size
                    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        yield data
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _told(url, error) from None  # (a `ValueError`: what is no URL, or leads to none)

    async def _read_http(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        limit = aiohttp.ClientTimeout(total=TRANSFER_S, sock_read=READ_S, sock_connect=CONNECT_S)
        headers = {}
        ours = urlsplit(url).scheme == QUEUE
        if ours:
            url = self._at_queue(url)
            headers["Authorization"] = f"Bearer {self._pilot_token}"
        local = ours or self._settings.local_urls
        async with self._session(limit, local, headers) as session:
            redirects = 0 if ours else REDIRECTS
            async with await self._get(session, URL(url, encoded=ours), redirects) as response:
                packed = "Content-Encoding" in response.headers
                yield None if packed else response.content_length
                async for data in response.content.iter_chunked(CHUNK_BYTES):
                    yield data

    async def _get(
        self, session: aiohttp.ClientSession, url: URL, redirects: int
    ) -> aiohttp.ClientResponse:
        """Each address is looked at before it is asked: where a redirect leads, too."""
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
        raise StorageError(f"{shown(str(url))}: it is elsewhere, and nobody says where")

    def _check_address(self, url: URL, ours: bool = False) -> None:
        if not ours and not self._settings.local_urls and _is_local(url.host or ""):
            raise StorageError(f"{shown(str(url))}: {LOCAL}")

    def _at_queue(self, url: str) -> str:
        """A blob of this peer's queue, and nothing else: what is asked for with a token of this
        peer's is for nobody to choose. (Documents can't have such a URL: only queues write it.)"""
        base = self._settings.queue.rstrip("/")
        if not base or not re.fullmatch(_QUEUE_BLOB, url):
            raise StorageError(f"{shown(url)}: this peer has no such queue")
        return base + url.removeprefix(f"{QUEUE}:")

    async def _read_s3(self, url: str) -> AsyncGenerator[bytes | int | None, None]:
        import obstore

        store, key = self._s3(url)
        try:
            found = await obstore.get_async(store, key)
            yield int(found.meta["size"])
            async for data in found.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(data)
        except obstore.exceptions.BaseError as error:
            raise _told(url, error) from None

    # ----------------------------------------------------------------- out

    async def deliver(self, hash: bytes, url: str, owner: str) -> None:
        """A blob of this peer's to its destination: whole, or not to be seen there."""
        path, size = self._blobs.path(hash), self._blobs.size(hash) or 0
        scheme = urlsplit(url).scheme
        try:
            if scheme in ("http", "https"):
                await self._put_http(path, size, url)
            elif scheme == "s3":
                await self._put_s3(path, url, owner)
            else:
                await asyncio.to_thread(self._put_file, path, url, owner)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _told(url, error) from None  # (a `ValueError`: what is no URL, or leads to none)

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
                raise StorageError(f"{shown(url)}: it is elsewhere (HTTP {response.status})")

    def _session(
        self, limit: aiohttp.ClientTimeout, local: bool, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientSession:
        """`local`: this machine may be meant, too."""
        resolver = aiohttp.ThreadedResolver()
        connector = aiohttp.TCPConnector(resolver=resolver if local else _Elsewhere(resolver))
        return aiohttp.ClientSession(timeout=limit, headers=headers, connector=connector)

    async def _put_s3(self, path: Path, url: str, owner: str) -> None:
        """All owners write with this peer's own rights: what is there already, and was not
        delivered for this one, stays. (Of two who deliver at one moment the later one wins.)"""
        import obstore

        store, key = self._s3(url)
        whose = owner.encode().hex() or "-"  # what a header may have
        try:
            with contextlib.suppress(FileNotFoundError):
                found = await obstore.get_async(store, key, options={"head": True})
                if found.attributes.get(S3_OWNER) != whose:
                    raise StorageError(NOT_YOURS.format(shown(url)))
            # ended in the middle it would leave its parts at the other end: let it come to its end
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
            raise _told(url, error) from None

    def _put_file(self, source: Path, url: str, owner: str) -> None:
        """Beside it first, then in its place; never in the place of what is another owner's, or
        was there before."""
        target = self._local(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}")
        try:
            copy_file(source, beside)
            with beside.open("rb") as file:
                os.fdatasync(file.fileno())
            with contextlib.suppress(OSError):  # a disk may not be able to say whose it is
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
        """The real file behind a name, if it is below a directory that is open to workflows."""
        split = urlsplit(url)
        if split.netloc not in ("", "localhost"):
            raise StorageError(f"{shown(url)}: a file is named file:///path")
        if not self._roots:
            raise StorageError(
                f"{shown(url)}: no directory of this peer is open to workflows (--files)"
            )
        real = Path(os.path.realpath(unquote(split.path)))
        if not any(real.is_relative_to(root) and real != root for root in self._roots):
            raise StorageError(
                f"{shown(url)}: it is outside of what this peer has opened (--files)"
            )
        return real

    def _s3(self, url: str) -> tuple[S3Store, str]:
        from obstore.store import S3Store

        settings = self._settings
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if not bucket or not key:
            raise StorageError(f"{shown(url)}: write s3://bucket/key")
        # without both keys the library would go and ask the machine's cloud for some
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
    """Names, but for those that mean this machine: what listens there trusts who is on it."""

    def __init__(self, resolver: aiohttp.abc.AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        kept = [row for row in found if not _is_local(row["host"])]
        if not kept:
            raise OSError(errno.EACCES, LOCAL)
        return kept

    async def close(self) -> None:
        await self._resolver.close()


def _is_local(host: str) -> bool:
    """An address that is this machine's own, or that only its link has."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name: see what it stands for
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast:
        return True
    return str(found) in METADATA or _is_mine(found)


def _is_mine(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Only a machine's own addresses can be bound to."""
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


async def _number(parts: AsyncIterator[bytes | int | None]) -> int | None:
    first = await anext(parts)
    assert not isinstance(first, bytes)
    return first


def _told(url: str, error: BaseException) -> StorageError:
    """In one line; libraries add what nobody asked for, and sometimes more than they should."""
    if isinstance(error, aiohttp.ClientResponseError):
        return StorageError(
            f"{shown(url)}: HTTP {error.status} {error.message}"[:500], error.status >= 500
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{shown(url)}: there is no such file")
    if isinstance(error, PermissionError) or "PermissionDenied" in type(error).__name__:
        return StorageError(f"{shown(url)}: access is refused")
    if isinstance(error, OSError) and error.strerror:
        return StorageError(f"{shown(url)}: {error.strerror}", True)
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return StorageError(f"{shown(url)}: {first}"[:500], True)
