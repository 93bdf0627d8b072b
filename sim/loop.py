"""An event loop whose clock jumps to the next timer: an hour takes as long as its events.

All that a simulated peer does carries its `Life` in its context, as tasks and timers hand it on. So
a peer can be killed between any two steps (nothing of it runs any more, no `finally`, no farewell)
and stopped (nothing of it runs until it goes on).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import gc
import heapq
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Life:
    """Of a process: from its start until it is killed."""

    def __init__(self) -> None:
        self.dead = False
        self.stopped = False
        self._held: list[_Soon | _Timer] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64
        self.context = NOBODY.copy()
        self.context.run(_LIFE.set, self)

    def kill(self) -> None:
        self.dead = True
        self._held.clear()
        # Nobody will wake these any more; were they cleaned away, their `finally` would run
        _FALLEN.extend(task for task in self._tasks if not task.done())
        self._tasks.clear()

    def began(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 2 * len(self._tasks) + 64

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        held, self._held = self._held, []
        asyncio.get_running_loop()._ready.extend(held)  # type: ignore[attr-defined]

    def hold(self, step: _Soon | _Timer) -> None:
        """It may not be done now: not by the dead; by the stopped once they go on (what is called
        off meanwhile stays undone)."""
        if not self.dead:
            self._held.append(step)


class _Soon(asyncio.Handle):
    """One thing that a peer is to do."""

    __slots__ = ("life",)
    life: Life


class _Timer(asyncio.TimerHandle):
    __slots__ = ("life",)
    life: Life


_FALLEN: list[asyncio.Task[Any]] = []
_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
#: the context of what belongs to no peer: the network, the disks, the one who looks on
NOBODY = contextvars.copy_context()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing outside is waited for: when nothing is left to do, the clock moves to the next timer.
    Timers are told apart by when they are due, then by who came first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._ready: collections.deque[asyncio.Handle]
        super().__init__()
        self.set_exception_handler(_unheard)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once: while a thread is at it, this clock would run away."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is None:
            handle = asyncio.Handle(callback, args, self, context)
        else:
            handle = _Soon(callback, args, self, context)
            handle.life = life
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is None:
            timer = asyncio.TimerHandle(when, callback, args, self, context)
        else:
            timer = _Timer(when, callback, args, self, context)
            timer.life = life
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers and not self._stopping:  # type: ignore[attr-defined]
                raise RuntimeError("nothing will ever happen again: every task waits for ever")
            if timers:
                self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if type(handle) is _Soon or type(handle) is _Timer:
                life = handle.life
                if life.dead or life.stopped:
                    life.hold(handle)
                    continue
            handle._run()

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **more)
        context = more.get("context")
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is not None:
            life.began(task)
        return task

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There are no threads here."""


def _unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A killed peer leaves tasks behind that nobody will ever wake; errors are another matter."""
    if "was destroyed but it is pending" not in context.get("message", ""):
        loop.default_exception_handler(context)


def run(work: Coroutine[Any, Any, T]) -> T:
    """To its end, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


_ENDED: list[VirtualLoop] = []


@contextlib.contextmanager
def _found_quickly(loop: VirtualLoop) -> Iterator[None]:
    """The only loop: before Python 3.12 the question for the running one is a system call, and
    thousands of peers ask for the time."""
    asked = asyncio.get_running_loop
    asyncio.get_running_loop = asyncio.events.get_running_loop = lambda: loop
    try:
        yield
    finally:
        asyncio.get_running_loop = asyncio.events.get_running_loop = asked


def with_fixed_hashes(module: str) -> None:
    """Begin this program anew if sets of bytes come in another order each time: a run is its
    seed, in every process."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execvpe(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def run_out(work: Coroutine[Any, Any, T]) -> T:
    """The same; but what others are still at then just stops, as the killed have.

    Their loop is kept, so that nothing of them wakes up to be cleaned away: for processes that do
    a few of these and end."""
    loop = VirtualLoop()
    _ENDED.append(loop)
    asyncio.set_event_loop(loop)
    gc.disable()  # it would take time, and find what must stay as it is
    try:
        with _found_quickly(loop):
            return loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        gc.enable()
