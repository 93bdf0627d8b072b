"""Real clusters for tests: `valence up` in a directory of their own, gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reaper import naming
from valence.client import Client

#: with processes of their own, or whole simulated worlds: not for the edit loop (`make quick`)
SLOW = {"sim", "queue", "foreign", "containers", "fuzz", "pilots", "space", "cluster", "faults"}

VALENCE = [sys.executable, "-m", "valence"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side: what takes longest begins first, and one process has the shared cluster."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "cluster" in fixtures:
            item.add_marker(pytest.mark.xdist_group("cluster"))
        module = item.nodeid.partition(".py")[0].rpartition("test_")[2]
        if fixtures & {"cluster", "own_cluster", "s3"} or module in SLOW:
            item.add_marker(pytest.mark.slow)


class Cluster:
    def __init__(self, home: Path, peers: int, *more: str, **variables: str) -> None:
        self.home = home
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")} | {
            "VALENCE_HOME": str(home),
            "NO_COLOR": "1",
            "VALENCE_ROOT_TASKS": "yes",  # where there is neither a sandbox nor another user
            **variables,
        }
        self._again: list[subprocess.Popen[bytes]] = []
        home.mkdir(parents=True, exist_ok=True)  # and begun there: no folder of ours is on its path
        done = self.cli("up", "--peers", str(peers), "--detach", *more, timeout=60, cwd=home)
        assert done.returncode == 0, done.stderr

    def cli(self, *arguments: str, timeout: float = 60, **more: Any) -> Any:
        return subprocess.run(
            [*VALENCE, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            **more,
        )

    def peers(self) -> list[dict[str, Any]]:
        rows = []
        for path in sorted(self.home.glob("peer-*/peer.json")):
            rows.append({**json.loads(path.read_text()), "data": str(path.parent)})
        return rows

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def client(self, index: int = 0) -> Client:
        return Client(self.peers()[index]["http"], self.token)

    def peer(self, id: str) -> dict[str, Any]:
        return next(p for p in self.peers() if p["id"] == id)

    def kill(self, id: str) -> dict[str, Any]:
        found = self.peer(id)
        os.kill(found["pid"], signal.SIGKILL)
        return found

    def restart(self, id: str) -> None:
        """As the message of `valence up` says."""
        found = self.peer(id)
        process = subprocess.Popen(
            [*VALENCE, "peer", "--data", found["data"], "--quiet"], env=self.environment
        )
        self._again.append(process)
        wait_for(lambda: self.peer(id)["pid"] == process.pid)

    def stop(self) -> None:
        for process in self._again:
            process.send_signal(signal.SIGINT)
        done = self.cli("down", timeout=60)
        for process in self._again:
            process.wait(20)
        assert done.returncode == 0, done.stderr
        assert not self.processes(), "a process was left behind"

    def processes(self) -> list[str]:
        """All processes that name this cluster's directory or were started in it."""
        mine = [pid for pid in naming(str(self.home)) if pid != os.getpid()]
        return [f"{pid} {command(pid)}" for pid in mine]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")[:100]
    except OSError:
        return "(gone)"


#: no test is about how fast this machine is: whatever is waited for this long hangs
HANGS_S = 90.0


def wait_for(condition: Callable[[], Any]) -> Any:
    """What an event outside this process can't tell us: look until it is so."""
    deadline = time.monotonic() + HANGS_S
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not true within {HANGS_S:g} s"
        time.sleep(0.05)


@contextlib.contextmanager
def reaped(directory: Path) -> Iterator[None]:
    """Whatever happens to this process, what it has started in that directory ends."""
    script = Path(__file__).parent / "reaper.py"
    reaper = subprocess.Popen(
        [sys.executable, str(script), str(directory)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert reaper.stdin is not None
    reaper.wait()  # it goes on as nobody's child: a test may end all children of this process
    try:
        yield
        reaper.stdin.write(b".")
    finally:
        reaper.stdin.close()


@pytest.fixture(scope="session", autouse=True)
def _reaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with reaped(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Eight peers, shared by tests that do them no harm."""
    found = Cluster(tmp_path_factory.mktemp("shared"), 8)
    wait_for(lambda: len(found.client().peers()) == 8)
    yield found
    found.stop()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """A cluster to break."""
    started = []

    def start(peers: int, *more: str, **variables: str) -> Cluster:
        found = Cluster(tmp_path / f"cluster-{len(started)}", peers, *more, **variables)
        started.append(found)
        for index in range(peers):  # who is left must know of those that a test takes away
            wait_for(lambda index=index: len(found.client(index).peers()) == peers)
        return found

    yield start
    for found in started:
        found.stop()
