"""An event loop whose clock jumps to the next timer: an hour takes as long as its events.

All that a simulated peer does carries its `Life` in its context, as tasks and timers hand it on. So
a peer can be killed between any two steps (nothing of it runs any more, no `finally`, no farewell)
and stopped (nothing of it runs until it goes on).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Life:
    """Of a process: from its start until it is killed."""

    def __init__(self) -> None:
        self.dead = False
        self.stopped = False
        self.steps = 0
        self._held: list[tuple[contextvars.Context, _Step]] = []
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
        loop = asyncio.get_running_loop()
        held, self._held = self._held, []
        for context, step in held:
            loop.call_soon(step.late, context=context)

    def hold(self, step: _Step) -> None:
        self._held.append((contextvars.copy_context(), step))


class _Step:
    """One thing that a peer is to do, if it lives then, and once it goes on."""

    __slots__ = ("args", "callback", "handle", "life")

    def __init__(self, life: Life, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.life = life
        self.callback = callback
        self.args = args
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.life.dead:
            return
        if self.life.stopped:
            self.life.hold(self)
            return
        self.life.steps += 1
        self.callback(*self.args)

    def late(self) -> None:
        """After a stop: what was called off meanwhile stays undone."""
        if self.handle is None or not self.handle.cancelled():
            self()


_FALLEN: list[asyncio.Task[Any]] = []
_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
#: the context of what belongs to no peer: the network, the disks, the one who looks on
NOBODY = contextvars.copy_context()


class _Jump(selectors.SelectSelector):
    """Instead of waiting, move the clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again: every task waits for ever")
        if timeout > 0:
            self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(_unheard)

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is None:
            return super().call_soon(callback, *args, context=context)
        step = _Step(life, callback, args)
        step.handle = super().call_soon(step, context=context)
        return step.handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is None:
            return super().call_at(when, callback, *args, context=context)
        step = _Step(life, callback, args)
        step.handle = timer = super().call_at(when, step, context=context)
        return timer

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


def run_out(work: Coroutine[Any, Any, T]) -> T:
    """The same; but what others are still at then just stops, as the killed have.

    Their loop is kept, so that nothing of them wakes up to be cleaned away: for processes that do
    a few of these and end."""
    loop = VirtualLoop()
    _ENDED.append(loop)
    asyncio.set_event_loop(loop)
    gc.disable()  # it would take time, and find what must stay as it is
    try:
        return loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        gc.enable()
