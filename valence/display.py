"""Output for people: colours and a moving bar on a terminal, plain lines everywhere else.

Foreign text (names, reasons, logs) may contain control characters that a terminal obeys: they are
shown as escapes, and never sent. Our own colours are put in under a mark that nobody else knows,
and become escapes only on the way out.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from valence.workflow.quantities import show_seconds
from valence.workflow.shown import plain

_COLOURS = {
    "succeeded": "32", "ok": "32", "up": "32", "running": "36", "failed": "31", "dead": "31",
    "cancelled": "33", "suspect": "33", "left": "2", "waiting": "2", "skipped": "33",
    "retrying": "33", "error": "31", "bold": "1", "dim": "2",
}  # fmt: skip
#: a character of no alphabet, with a number that nobody can guess
_MARK = f"\ue000{secrets.token_hex(8)}"
BAR_S = 0.1
LINE_S = 2.0
TICK_S = 0.5


class Display:
    def __init__(self, out: TextIO | None = None) -> None:
        out = out or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self.out = out
        self.terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self.coloured = self.terminal and not os.environ.get("NO_COLOR")

    @property
    def columns(self) -> int:
        return shutil.get_terminal_size().columns

    def colour(self, text: str, name: str) -> str:
        code = _COLOURS.get(name)
        return f"{_MARK}{code}m{text}{_MARK}0m" if self.coloured and code else text

    def rendered(self, text: str) -> str:
        """The text as it goes to the terminal, which obeys nothing in it but our own colours."""
        return plain(text).replace(_MARK, "\033[")

    def say(self, text: str = "") -> None:
        print(self.rendered(text), file=self.out, flush=True)

    def error(self, text: str) -> None:
        self._to_stderr("error:", "31", text)

    def warn(self, text: str) -> None:
        self._to_stderr("warning:", "33", text)

    def _to_stderr(self, label: str, code: str, text: str) -> None:
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            label = f"\033[{code}m{label}\033[0m"
        print(f"{label} {plain(text)}", file=sys.stderr, flush=True)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints columns just wide enough for their texts, with states in their colours."""
        texts = [[("" if cell is None else plain(str(cell))) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
        head = "  ".join(h.ljust(w) for h, w in zip(heads, widths, strict=True)).rstrip()
        self.say(self.colour(head, "bold"))
        for row in texts:
            cells = [
                self.colour(cell.ljust(width), cell)
                for cell, width in zip(row, widths, strict=True)
            ]
            self.say("  ".join(cells).rstrip())


class Progress:
    """A workflow's progress, from its events: a bar that moves, or a line now and then."""

    def __init__(self, display: Display, view: dict[str, Any], verbose: bool = False) -> None:
        self._display = display
        self._verbose = verbose
        self._total = int(view["tasks"])
        self._start = float(view["submitted_at"])
        self._states: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._drawn_at = 0.0
        self._name = view["name"]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if display.terminal:  # the clock moves on while nothing happens, as a person expects
            threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                self._draw(time.time())

    def event(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        if event["type"] == "task":
            self._task(event)
        if event["type"] == "interrupted":
            self._note(event["reason"], "retrying")
            return
        self._redraw(float(event["at"]), bool(event.get("final")))
        if event["type"] == "inputs" and event.get("failed"):
            self._note(f"input {event['failed']}: {event['reason']}", "failed")
        if event["type"] == "home":
            self._taken_over(event)
        if event["type"] == "promise":
            self._promise(event)

    def _redraw(self, at: float, final: bool) -> None:
        """At most every `BAR_S` or `LINE_S`, but always at the end."""
        interval_s = BAR_S if self._display.terminal else LINE_S
        if not final and time.monotonic() - self._drawn_at < interval_s:
            return
        if self._display.terminal:
            self._draw(at)
        else:
            self._line(at)

    def _taken_over(self, event: dict[str, Any]) -> None:
        state = "failed" if event.get("forced") else "retrying"
        text = f"peer {event['peer'][:8]} has taken over this workflow"
        if self._verbose or event.get("forced"):
            text += f": {event['reason']}"
        self._note(text, state)

    def _promise(self, event: dict[str, Any]) -> None:
        state, reason = event["state"], event.get("reason", "")
        if state == "at-risk":
            self._note(f"at risk: {reason}", "retrying")
        elif state == "on-time":
            self._note("no longer at risk", "succeeded")
        elif state == "broken":
            self._note(f"its promise is broken ({event['cause']}): {reason}", "failed")
        elif state == "booked" and self._verbose:
            self._note(f"{event['count']} tasks booked again: {reason}", "retrying")

    def _task(self, event: dict[str, Any]) -> None:
        task, state = event["task"], event["state"]
        before = self._states.get(task)
        if before:
            self._counts[before] -= 1
        self._states[task] = state
        self._counts[state] = self._counts.get(state, 0) + 1
        if state in ("failed", "retrying"):
            self._note(f"{task} {state}: {event.get('reason', '')}", state)

    def _note(self, text: str, state: str) -> None:
        if self._display.terminal:
            self._display.out.write("\r\033[K")
        self._display.say(self._display.colour(text, state))

    def _done(self) -> int:
        return sum(self._counts.get(s, 0) for s in ("succeeded", "failed", "skipped", "cancelled"))

    def _summary(self, at: float) -> str:
        parts = [f"{self._done()}/{self._total}"]
        for state in ("running", "retrying", "failed", "skipped"):
            if self._counts.get(state):
                parts.append(f"{self._counts[state]} {state}")
        parts.append(show_seconds(max(0.0, at - self._start)))
        return ", ".join(parts)

    def _line(self, at: float) -> None:
        self._drawn_at = time.monotonic()
        self._display.say(f"{self._name}: {self._summary(at)}")

    def _draw(self, at: float) -> None:
        self._drawn_at = time.monotonic()
        summary = self._summary(at)
        width = max(10, min(40, shutil.get_terminal_size().columns - len(summary) - 4))
        filled = int(width * self._done() / max(1, self._total))
        active = min(
            width - filled, -(-width * self._counts.get("running", 0) // max(1, self._total))
        )
        bar = self._display.colour("█" * filled, "succeeded")
        bar += self._display.colour("▒" * active, "running") + "░" * (width - filled - active)
        self._display.out.write(f"\r\033[K{self._display.rendered(f'{bar} {summary}')}")
        self._display.out.flush()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._display.terminal and self._drawn_at:
                self._display.say()
