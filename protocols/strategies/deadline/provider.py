"""A peer's side of promises: it books sequences in its calendar, and keeps its bookings on disk.

A booking is on disk before its home hears that it is confirmed. One that was used or released is
deleted from the disk later: should it come back after a restart, nobody affirms it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from ...capacity.bookings import length_here
from ...capacity.calendar import BookingAsk
from ...capacity.door import Door
from ...capacity.matching import unmet
from ...ports import BookingStorage, DatabaseError
from ...wire.messages import Contact, Done, Message
from ...wire.rpc import Rpc
from .config import DeadlineConfig
from .messages import (
    Confirm,
    Confirmed,
    Held,
    HeldTask,
    Hold,
    Renew,
    SequenceAnswer,
    TaskSequence,
    WindowedTask,
)

log = logging.getLogger("valence.deadline")


class Provider:
    def __init__(
        self,
        rpc: Rpc,
        door: Door,
        boot: int,
        storage: BookingStorage | None,
        clock: Callable[[], float],
        config: DeadlineConfig,
    ) -> None:
        self._door = door
        self._bookings = door.admission.bookings
        self._boot = boot
        self._storage = storage
        self._clock = clock
        self._config = config
        self._turn = asyncio.Lock()
        rpc.on(Hold, self._hold)
        rpc.on(Confirm, self._confirm)
        rpc.on(Renew, self._renew)

    def load(self) -> None:
        """What an earlier process of this peer had promised is promised still."""
        if self._storage is not None:
            rows = self._storage.rows()
            self._bookings.load(rows, self._boot, self._wall_s(), self._now())
            self._door.booked()

    async def run(self) -> None:
        """Deletes bookings from the disk that are not needed any more."""
        while True:
            await asyncio.sleep(self._config.forget_s)
            gone = self._bookings.take_gone(self._now())
            if not gone or self._storage is None:
                continue
            try:
                await self._storage.write((), gone)
            except DatabaseError as error:
                log.warning("%d used bookings stay on the disk: %s", len(gone), error)

    async def _hold(self, sender: Contact, message: Hold) -> Held:
        """One message at a time, and other work of this peer in between."""
        async with self._turn:
            return await self._answers(sender, message)

    async def _answers(self, sender: Contact, message: Hold) -> Held:
        answers: list[SequenceAnswer] = []
        refused: dict[TaskSequence, SequenceAnswer] = {}  # the same again is refused at once
        begun = paused = self._now()
        self._bookings.refresh(begun)
        for sequence in message.sequences:
            now = self._now()
            if now - paused > self._config.pause_after_s:
                await asyncio.sleep(0)
                paused = self._now()
            answer = refused.get(sequence)
            if now - begun > self._config.hold_s_max:
                answer = SequenceAnswer(why="it has too much to plan just now")
            if answer is None:
                answer = self.answer(sender.id, message.workflow, message.owner, sequence)
            if not answer.held:
                refused[sequence] = answer
            answers.append(answer)
        return Held(answers=tuple(answers))

    def refresh(self) -> None:
        self._bookings.refresh(self._now())

    def answer(
        self, home: bytes, workflow: str, owner: str, sequence: TaskSequence
    ) -> SequenceAnswer:
        """Slots for a sequence, held for that home; or why there are none."""
        admission, now = self._door.admission, self._now()
        if admission.closed:
            return SequenceAnswer(why=admission.closed)
        for task in sequence.tasks:
            missing = unmet(admission.capacity, admission.traits, task.needs)
            if missing:
                return SequenceAnswer(why="does not have " + " and ".join(missing))
        asks = [self._ask(task, now) for task in sequence.tasks]
        owner = owner or "-"
        held = self._bookings.hold(home, workflow, owner, asks, now)
        if held is not None:
            self._door.booked()
            return SequenceAnswer(
                held=tuple(
                    HeldTask(p.id, max(0.0, p.booking.start_at - now), p.booking.end_at - now)
                    for p in held
                )
            )
        if not self._bookings.may_have(owner, len(asks)):
            return SequenceAnswer(why="one owner can't have more tasks booked here")
        return SequenceAnswer(why="its time is promised to others")

    def _ask(self, task: WindowedTask, now: float) -> BookingAsk:
        speed = self._door.admission.traits.speed or 1.0
        due_at = math.inf if task.due_in_s is None else now + task.due_in_s
        return BookingAsk(
            task.needs.capacity,
            length_here(task.length_s, speed),
            now + task.start_in_s,
            due_at,
            task.length_s / speed,
        )

    async def _confirm(self, sender: Contact, message: Confirm) -> Message:
        now = self._now()
        unknown, rows = [], []
        for lease, due_in_s in message.booked:
            promise = self._bookings.confirm(
                lease, message.workflow, sender.id, message.epoch, now + due_in_s, now
            )
            if promise is None:
                unknown.append(lease)
            elif promise.unit is None:  # (else its attempt speaks for it)
                rows.append(self._bookings.row(promise, self._wall_s()))
        self._door.booked()
        if rows and self._storage is not None:
            try:
                await self._storage.write(rows, ())
            except DatabaseError as error:
                log.warning("%d bookings can't be written: %s", len(rows), error)
                unknown += [row.lease for row in rows]
        return Confirmed(unknown=tuple(unknown))

    def _renew(self, sender: Contact, message: Renew) -> Done:
        for lease in message.leases:
            self._bookings.renew(lease, message.workflow, sender.id, self._now())
        return Done()

    def _wall_s(self) -> float:
        return self._clock() - self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
