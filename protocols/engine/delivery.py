"""Delivers results: writes files to the URLs that a document names, once they are committed.

The workflow's home writes each file, in several tries. A new home starts again with those that the
journal does not list as delivered: writing a result twice has the same effect as writing it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Callable
from functools import partial

from ..data.cache import BlobError
from ..data.transfer import Transfer
from ..ports import Blobs, StorageElements, StorageError
from ..tasks import Tasks
from ..wire.entries import DeliveredFile, FilesDelivered
from .run import Delivering, Run

log = logging.getLogger("valence.delivery")

AT_ONCE = 8
TRIES = 6
RETRY_S = 0.5

Write = Callable[[Run, FilesDelivered], None]


def shown(url: str) -> str:
    """The URL without the parts that may be secret: user, password and query."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"[:300]


class Delivery:
    def __init__(
        self,
        storage: StorageElements | None,
        blobs: Blobs,
        transfer: Transfer,
        rng: random.Random,
        written: Write,
    ) -> None:
        self._storage = storage
        self._blobs = blobs
        self._transfer = transfer
        self._rng = rng
        self._written = written
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._under_way: set[tuple[str, str]] = set()
        self._tasks = Tasks()

    def begin(self, run: Run) -> None:
        """Delivers all files that are made and not delivered yet."""
        for name in run.to_deliver():
            key = (run.id, name)
            if key not in self._under_way:
                self._under_way.add(key)
                task = self._tasks.spawn(self._deliver(run, name))
                task.add_done_callback(partial(self._done, key))

    def _done(self, key: tuple[str, str], _: asyncio.Task[None]) -> None:
        self._under_way.discard(key)

    async def _deliver(self, run: Run, name: str) -> None:
        url = run.workflow.deliver[name]
        for attempt in range(TRIES):
            words = f"writing to {shown(url)} (try {attempt + 1})"
            run.note(Delivering(name, words))
            try:
                async with self._slots:
                    await self._once(run, name, url)
            except BlobError as error:
                log.info("delivery of %s: %s", name, error)
                run.note(Delivering(name, str(error)))
                if isinstance(error, StorageError) and not error.passing:
                    return self._over(run, name, str(error))
                last = str(error)
            else:
                return self._over(run, name, "")
            await asyncio.sleep(RETRY_S * 2**attempt * self._rng.uniform(0.75, 1.25))
        return self._over(run, name, last)

    async def _once(self, run: Run, name: str, url: str) -> None:
        file = run.file(name)
        if file is None:
            raise BlobError(f"every peer that held {name} is gone; making it again")
        if self._storage is None:
            raise StorageError(f"{shown(url)}: this peer can't write files outside the cluster")
        with self._blobs.pinned([file.hash]):
            await self._transfer.fetch(file)
            await self._storage.deliver(file.hash, url, run.owner)

    def _over(self, run: Run, name: str, reason: str) -> None:
        run.note(Delivering(name, ""))
        with contextlib.suppress(LookupError):
            self._written(run, FilesDelivered(files=(DeliveredFile(name, reason[:1000]),)))

    async def close(self) -> None:
        await self._tasks.close()
