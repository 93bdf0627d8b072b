"""A local cluster whose peers can be killed, stopped and restarted, one by one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from valence.client import Client
from valence.peer import tokens
from valence.protocols.wire.entries import AttemptsFinished, TasksReopened, read

VALENCE = [sys.executable, "-m", "valence"]
UP_S = 90.0


class PeerProcesses:
    def __init__(
        self, home: Path, peers: int, *more: str, keepers: int = 3, **variables: str
    ) -> None:
        self.home = home
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        self.environment["VALENCE_HOME"] = str(home)
        self.environment["VALENCE_KEEPERS"] = str(keepers)
        self.environment.update(variables)
        self.gone: set[str] = set()
        self._again: list[subprocess.Popen[bytes]] = []
        self._up = [*VALENCE, "up", "--peers", str(peers), "--detach", *more]
        self._peers = peers
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Starts the cluster; after `close`, restarts it on the same data."""
        subprocess.run(
            self._up, env=self.environment, check=True, stdout=subprocess.DEVNULL, timeout=UP_S
        )
        self.token = (self.home / "token").read_text().strip()
        until(lambda: len(self.client(self.rows()[0]).peers()) == self._peers, 60)

    def owner(self, name: str) -> str:
        """A token for an owner who can submit workflows, and sees only those."""
        return tokens.make(self.token, name, "submit", time.time() + 3600)[0]

    def rows(self) -> list[dict[str, Any]]:
        described = []
        for path in sorted(self.home.glob("peer-*/peer.json")):
            with contextlib.suppress(OSError, ValueError):
                described.append({**json.loads(path.read_text()), "data": str(path.parent)})
        return described

    def row(self, peer_id: str) -> dict[str, Any]:
        return next(row for row in self.rows() if row["id"] == peer_id)

    def client(self, row: dict[str, Any]) -> Client:
        return Client(row["http"], self.token)

    def up(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row["id"] not in self.gone and _alive(row["pid"])]

    def anyone(self, but: str = "") -> Client:
        return self.client(next(row for row in self.up() if row["id"] != but))

    def kill(self, peer_id: str, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.row(peer_id)["pid"], number)

    def restart(self, peer_id: str) -> None:
        command = [*VALENCE, "peer", "--data", self.row(peer_id)["data"], "--quiet"]
        self._again.append(subprocess.Popen(command, env=self.environment))

    def close(self) -> None:
        for process in self._again:
            process.send_signal(signal.SIGINT)
        down = [*VALENCE, "down"]
        subprocess.run(down, env=self.environment, stdout=subprocess.DEVNULL, timeout=120)
        for process in self._again:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def commits(self, workflow: str) -> Counter[str]:
        """How often each task was committed, by the most complete replica on disk."""
        best: Counter[str] = Counter()
        for row in self.rows():
            counts = committed(Path(row["data"]) / "peer.db", workflow)
            if sum(counts.values()) > sum(best.values()):
                best = counts
        return best


def open_directory(path: Path) -> Path:
    """Makes a directory that tasks can write to, whatever user they run as."""
    path.mkdir(parents=True)
    path.parent.chmod(0o711)
    path.chmod(0o777)
    return path


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def committed(path: Path, workflow: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        sql = "select kind, body from entries where workflow = ? order by seq"
        for kind, body in database.execute(sql, (workflow,)):
            entry = read(kind, body)
            if isinstance(entry, AttemptsFinished):
                won = (row for row in entry.outcomes if row.verdict == "succeeded")
                counts.update(row.outcome.key.task for row in won)
            elif isinstance(entry, TasksReopened):  # its outputs were lost, so it must run again
                counts.subtract(row.task for row in entry.tasks)
    return counts


def until(condition: Callable[[], Any], within_s: float, every_s: float = 0.1) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(Exception):
            result = condition()
            if result:
                return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {within_s:g} s")
        time.sleep(every_s)
