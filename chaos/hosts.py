"""Peers as hosts: each in a network namespace of its own, behind one of two switches.

The switches are bridges in a namespace of ours, joined by one cable: to pull it makes an island.
The machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .processes import VALENCE, committed, until

PORT, HTTP = 7000, 8470


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    def __init__(self, home: Path, count: int, cut_off: int = 0, disk_mib: int = 0) -> None:
        self.home = home
        self.count = count
        self._disk_mib = disk_mib  # size of a disk for each data directory; 0: none
        self._name = f"vc{os.getpid()}"
        self._switch = f"{self._name}-sw"
        self._island = set(range(count - cut_off, count))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")},
            "VALENCE_CLUSTER_KEY": secrets.token_hex(24),
            "VALENCE_ROOT_TASKS": "yes",  # the tasks are the scenario's own
            "VALENCE_SANDBOX": "off",
            "VALENCE_TOKEN": secrets.token_hex(24),
        }
        self._build()
        for index in range(count):
            self._start(index)
        until(lambda: len(self.ask(0, "GET", "/v1/peers")["peers"]) == count, 90)

    def _build(self) -> None:
        switch = self._switch
        ip("netns", "add", switch)
        for bridge in ("main", "island"):
            ip("-n", switch, "link", "add", bridge, "type", "bridge")
            ip("-n", switch, "link", "set", bridge, "up")
        ip("-n", switch, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        for cable, bridge in (("cable0", "main"), ("cable1", "island")):
            ip("-n", switch, "link", "set", cable, "master", bridge, "up")
        for index in range(self.count):
            space = self._space(index)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            port = f"p{index}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
               "netns", space)  # fmt: skip
            bridge = "island" if index in self._island else "main"
            ip("-n", switch, "link", "set", port, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{self._address(index)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def data(self, index: int) -> Path:
        return self.home / f"host-{index}"

    def _space(self, index: int) -> str:
        return f"{self._name}-{index}"

    def _address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def _start(self, index: int) -> None:
        address = self._address(index)
        if self._disk_mib and not self.data(index).exists():
            self.data(index).mkdir(mode=0o700)
            options = f"size={self._disk_mib}m,mode=0700"
            mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.data(index))]
            subprocess.run(mount, check=True)
        command = ["ip", "netns", "exec", self._space(index), *VALENCE, "peer", "--quiet"]
        command += ["--data", str(self.data(index)), "--cpus", "1"]
        command += ["--host", address, "--port", str(PORT)]
        command += ["--http-host", address, "--http-port", str(HTTP)]
        if index:
            command += ["--join", f"{self._address(0)}:{PORT}"]
        self._processes[index] = subprocess.Popen(command, env=self._environment)

    # ----------------------------------------------------------------- using it

    def ask(self, index: int, method: str, path: str, body: bytes = b"") -> Any:
        """Asks from the host itself, which the machine's own network does not reach."""
        program = (
            "import sys, json; from valence.client import Client; import os; "
            "c = Client(sys.argv[1], os.environ['VALENCE_TOKEN']); "
            "d = sys.stdin.buffer.read(); "
            "h = {'Content-Type': 'application/json'} if d else None; "
            "r = c.request(sys.argv[2], sys.argv[3], d or None, h); "
            "sys.stdout.write(r.decode() if isinstance(r, bytes) else json.dumps(r))"
        )
        url = f"http://{self._address(index)}:{HTTP}"
        command = ["ip", "netns", "exec", self._space(index), sys.executable, "-c", program]
        done = subprocess.run(
            [*command, url, method, path],
            input=body,
            env=self._environment,
            capture_output=True,
            timeout=60,
        )
        if done.returncode:
            raise OSError(done.stderr.decode()[-500:])
        return json.loads(done.stdout)

    def submit(self, index: int, document: dict[str, Any]) -> str:
        return str(self.ask(index, "POST", "/v1/workflows", json.dumps(document).encode())["id"])

    def view(self, index: int, workflow_id: str) -> dict[str, Any] | None:
        try:
            view: dict[str, Any] = self.ask(index, "GET", f"/v1/workflows/{workflow_id}")
        except OSError:
            return None
        return view

    def final(self, index: int, workflow_id: str) -> str:
        view = self.view(index, workflow_id)
        state = view["state"] if view else ""
        return state if state in ("succeeded", "failed", "cancelled") else ""

    def commits(self, workflow: str) -> Counter[str]:
        best: Counter[str] = Counter()
        for path in self.home.glob("host-*/peer.db"):
            counts = committed(path, workflow)
            if sum(counts.values()) > sum(best.values()):
                best = counts
        return best

    # ----------------------------------------------------------------- breaking it

    def cut(self) -> None:
        ip("-n", self._switch, "link", "set", "cable0", "down")

    def heal(self) -> None:
        ip("-n", self._switch, "link", "set", "cable0", "up")

    def lossy(self, percent: int) -> None:
        """Drops this percentage of all packets that arrive at any host."""
        rule = f"numgen random mod 100 < {percent} drop"
        hook = "type filter hook input priority 0"
        rules = f"table inet chaos {{\n chain incoming {{\n {hook}\n {rule}\n }}\n}}\n"
        for index in range(self.count):
            command = ["ip", "netns", "exec", self._space(index), "nft", "-f", "-"]
            subprocess.run(command, input=rules.encode(), check=True)

    def kill(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()

    def restart(self, index: int) -> None:
        self._start(index)

    def fill(self, index: int) -> None:
        """Fills its disk to the last byte."""
        with contextlib.suppress(OSError), self._filler(index).open("wb", buffering=0) as file:
            while file.write(bytes(65536)):
                pass

    def free(self, index: int) -> None:
        self._filler(index).unlink()

    def _filler(self, index: int) -> Path:
        return self.data(index) / "filler"

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._disk_mib:
            for index in range(self.count):
                subprocess.run(["umount", str(self.data(index))], stderr=subprocess.DEVNULL)
        for space in [*(self._space(i) for i in range(self.count)), self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
