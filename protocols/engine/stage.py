"""A workflow's inputs, brought to its home: texts and made-up bytes at once, blobs when they are
uploaded somewhere, URLs fetched with a few tries. Tasks wait for their own inputs only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from valence.workflow.model import Source
from valence.workflow.quantities import show_bytes

from ..data.cache import BlobError
from ..data.transfer import Transfer, Unavailable
from ..ports import Blobs, StorageElements, StorageError
from ..wire.entries import InputReason
from ..wire.messages import File
from .delivery import shown
from .run import Bringing, Run

AT_ONCE = 16
BATCH = 500
URL_TRIES = 4
LOOK_AGAIN_S_MIN, LOOK_AGAIN_S_MAX = 0.5, 10.0

Staged = tuple[str, bytes, int]


class Stage:
    def __init__(
        self,
        run: Run,
        blobs: Blobs,
        transfer: Transfer,
        storage: StorageElements | None,
        rng: random.Random,
    ) -> None:
        self.arrived = asyncio.Event()
        self._run = run
        self._blobs = blobs
        self._transfer = transfer
        self._storage = storage
        self._rng = rng
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def bring(self) -> AsyncIterator[tuple[list[Staged], list[InputReason]]]:
        """Inputs as they come, several at a time."""
        tasks = [
            asyncio.ensure_future(self._one(name, self._run.workflow.inputs[name]))
            for name in list(self._run.unstaged)
        ]
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if waiting:  # let those that are nearly there share the entry
                    more, waiting = await asyncio.wait(waiting, timeout=0.01)
                    done |= more
                results = [task.result() for task in tasks if task in done]
                for start in range(0, len(results), BATCH):
                    part = results[start : start + BATCH]
                    yield (
                        [(n, h, s) for n, h, s, why in part if not why],
                        [InputReason(n, why) for n, _, _, why in part if why],
                    )
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _one(self, name: str, source: Source) -> tuple[str, bytes, int, str]:
        try:
            if source.kind == "blob":
                hash, size = await self._uploaded(name, bytes.fromhex(source.value[7:]))
            else:
                async with self._slots:
                    hash, size = await self._made(name, source)
        except (BlobError, OSError, TimeoutError) as error:
            return name, b"", 0, str(error) or type(error).__name__
        return name, hash, size, ""

    async def _made(self, name: str, source: Source) -> tuple[bytes, int]:
        if source.kind == "text":
            data = source.value.encode()
            return await self._blobs.put(data, self._run.id), len(data)
        if source.kind == "url":
            return await self._fetch_url(name, source.value)
        size = int(source.value)
        self._run.note(Bringing(name, f"{show_bytes(size)} are being made up"))
        return await self._blobs.make_up(name, size, self._run.id)

    async def _uploaded(self, name: str, hash: bytes) -> tuple[bytes, int]:
        """Here, or at a peer that the catalog names; or wait until it is."""
        delay_s = LOOK_AGAIN_S_MIN
        while True:
            self.arrived.clear()
            size = self._blobs.size(hash)
            if size is not None:
                self._blobs.touch(hash)
                self._blobs.hold(hash, self._run.id)
                return hash, size
            holders = await self._transfer.find(hash)
            if holders:
                size = await self._transfer.size(hash, holders)
            if size is not None:
                file = File(name=name, hash=hash, size=size, holders=tuple(holders[:16]))
                try:
                    async with self._slots:
                        await self._transfer.fetch(file, self._run.id)
                    return hash, size
                except Unavailable:
                    pass  # its holder went away: wait for another one
            text = hash.hex()
            words = f"blob sha256:{text[:12]}… has not been uploaded yet"
            self._run.note(Bringing(name, words))
            try:
                async with asyncio.timeout(delay_s * (0.75 + self._rng.random() / 2)):
                    await self.arrived.wait()
            except TimeoutError:
                delay_s = min(LOOK_AGAIN_S_MAX, delay_s * 1.5)

    async def _fetch_url(self, name: str, url: str) -> tuple[bytes, int]:
        if self._storage is None:
            raise StorageError(f"{shown(url)}: this peer reads nothing from outside")
        attempt = 0
        while True:
            words = f"{shown(url)} is being fetched (try {attempt + 1})"
            self._run.note(Bringing(name, words))
            try:
                return await self._storage.bring(url, self._run.id)
            except StorageError as error:
                attempt += 1
                if not error.passing or attempt >= URL_TRIES:
                    raise
            await asyncio.sleep(0.25 * 2**attempt)
