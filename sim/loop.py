"""An event loop whose clock jumps to the next timer: an hour takes as long as its events.

Everything that a simulated peer does carries its `Life` in its context, which tasks and timers pass
on. So a peer can be killed between any two steps (nothing of it runs any more, no `finally`, no
farewell) and stopped (nothing of it runs until it resumes).
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
    """The life of a process: from its start until it is killed."""

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
        # nothing wakes these any more; but if they were collected, their `finally` would run
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
        """Keep a step that may not run now: if the process is stopped, until it resumes (steps that
        are cancelled meanwhile are not run). The dead never run it."""
        if not self.dead:
            self._held.append(step)


class _Soon(asyncio.Handle):
    """A callback that a peer is to run soon."""

    __slots__ = ("life",)
    life: Life


class _Timer(asyncio.TimerHandle):
    """A callback that a peer is to run later."""

    __slots__ = ("life",)
    life: Life


_FALLEN: list[asyncio.Task[Any]] = []
_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
#: the context of everything that belongs to no peer: the network, the disks, the checks
NOBODY = contextvars.copy_context()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing outside is waited for: when nothing is left to do, the clock moves to the next timer.
    Timers run in the order of their times; of equal times, the one made first runs first."""

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
        """Run it at once: while a thread ran it, this clock would run away."""
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
            self._advance()
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

    def _advance(self) -> None:
        """Move the clock to the next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers and not self._stopping:  # type: ignore[attr-defined]
            raise RuntimeError("deadlock: every task waits, and no timer is left")
        if timers:
            self.now = max(self.now, timers[0][0])

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
    """Report errors; but not the tasks of killed peers, which nothing will ever wake."""
    if "was destroyed but it is pending" not in context.get("message", ""):
        loop.default_exception_handler(context)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


_ENDED: list[VirtualLoop] = []


@contextlib.contextmanager
def _only_loop(loop: VirtualLoop) -> Iterator[None]:
    """Make this the running loop without asking: before Python 3.12 each such question is a system
    call, and thousands of peers ask for the time."""
    original = asyncio.get_running_loop
    asyncio.get_running_loop = asyncio.events.get_running_loop = lambda: loop
    try:
        yield
    finally:
        asyncio.get_running_loop = asyncio.events.get_running_loop = original


def with_fixed_hashes(module: str) -> None:
    """Start this program again with fixed hashes, unless they are: else the order of sets of bytes
    would change from process to process, and a run would not be its seed."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execvpe(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def run_out(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; all other tasks then just stop, as those of killed peers do.

    Their loop is kept, so that none of them wakes up to be collected: for processes that do a few
    such runs and end."""
    loop = VirtualLoop()
    _ENDED.append(loop)
    asyncio.set_event_loop(loop)
    gc.disable()  # it would take time, and collect tasks that must stay as they are
    try:
        with _only_loop(loop):
            return loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        gc.enable()
