"""The data plane, live: a hot file, a source killed during a transfer, bad chunks, a small cache.

python -m bench.data hot --mib 1024 --peers 20
python -m bench.data killed | corrupt | small-cache
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.processes import PeerProcesses, until
from valence.client import Client

MIB = 1 << 20
WON = "succeeded"


def counted(processes: PeerProcesses, rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Each peer's counters of transfers and of its cache."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        own = counts[row["id"]] = Counter()
        for line in processes.client(row).metrics().splitlines():
            name, _, value = line.rpartition(" ")
            for kind in ("transfer", "cache"):
                start = f'valence_{kind}_total{{kind="'
                if name.startswith(start):
                    own[name[len(start) : -2]] += int(float(value))
    return counts


class Origin:
    """An HTTP server on loopback that counts the bytes it sends."""

    def __init__(self, directory: Path) -> None:
        self.sent = 0
        origin = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def copyfile(self, source: Any, outputfile: Any) -> None:
                while data := source.read(MIB):
                    outputfile.write(data)
                    origin.sent += len(data)

            def log_message(self, template: str, *args: object) -> None:
                pass

        handler = functools.partial(Handler, directory=str(directory))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def made(directory: Path, mib: int) -> tuple[Path, str]:
    path = directory / "big"
    digest = hashlib.sha256()
    rng = random.Random(mib)
    with path.open("wb") as file:
        for _ in range(mib):
            data = rng.randbytes(MIB)
            digest.update(data)
            file.write(data)
    return path, digest.hexdigest()


def readers(url: str, count: int, hexdigest: str) -> dict[str, Any]:
    """Tasks that check the file they read; they need two cores, so each peer of two runs one."""
    check = f"echo '{hexdigest}  big' | sha256sum -c --quiet && echo {{item}} > ok.{{item}}"
    task = {
        "foreach": count,
        "command": ["sh", "-c", check],
        "inputs": ["big"],
        "outputs": ["ok.{item}"],
        "needs": {"cpus": 2},
    }
    return {"name": "hot file", "inputs": {"big": {"url": url}}, "tasks": {"read": task}}


def hot(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """A file that a task on every peer needs at once."""
    processes = PeerProcesses(home, args.peers, "--cpus", "2")
    _, digest = made(home, args.mib)
    origin = Origin(home)
    try:
        client = processes.anyone()
        began = time.monotonic()
        workflow = client.submit(readers(f"{origin.url}/big", args.peers, digest))
        assert workflow.wait() == "succeeded", workflow.view()
        took_s = time.monotonic() - began
        peers = Counter(workflow.task(f"read[{n}]")["peer"] for n in range(args.peers))
        by_peer = counted(processes, processes.up())
        served = {peer_id: c["bytes_served"] for peer_id, c in by_peer.items()}
        size = args.mib * MIB
        return {
            "peers": len(peers),
            "seconds": round(took_s, 1),
            "origin sent, times the file": round(origin.sent / size, 3),
            "most that one peer sent, times the file": round(max(served.values()) / size, 3),
            "all peers sent": round(sum(served.values()) / size, 2),
            "the home sent": round(served[workflow.view()["home"]] / size, 3),
            "bytes": workflow.view()["bytes"],
            "counts": sum(by_peer.values(), Counter()),
        }
    finally:
        origin.close()
        processes.close()


def killed(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """One of two holders is killed while a third peer fetches from both. If the whole file arrives
    before the kill, that tests nothing, and a larger file is used."""
    processes = PeerProcesses(home, 4, "--cpus", "2")
    try:
        rows = processes.up()
        first, second, third = rows[:3]

        def fetched() -> int:
            return counted(processes, [third])[third["id"]]["bytes_fetched"]

        def came(begun: int) -> bool:
            return fetched() > begun

        for mib in (args.mib, 4 * args.mib, 16 * args.mib):
            path, digest = made(home, mib)
            blob_id, size = f"sha256:{digest}", mib * MIB
            upload(processes.client(first), path, blob_id)
            upload(processes.client(second), path, blob_id)
            document = readers("", 1, digest)
            document["inputs"] = {"big": {"blob": blob_id}}
            begun = fetched()
            workflow = processes.client(third).submit(document)
            until(functools.partial(came, begun), 60, every_s=0.005)
            before = fetched() - begun
            if before < size:
                break
        else:
            raise SystemExit(
                "every file arrived before its source could be killed; choose a larger --mib"
            )
        processes.kill(first["id"])
        state = workflow.wait()
        return {
            "state": state,
            "fetched when the source was killed": round(before / size, 3),
            "fetched in all, times the file": round((fetched() - begun) / size, 3),
        }
    finally:
        processes.close()


def flip_bits(blob: Path, mib: int) -> None:
    """Flips a bit of each chunk."""
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        for chunk in range(mib):
            file.seek(chunk * MIB + 12345)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def corrupt(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """A bit of every chunk is flipped on the disks of all holders but one, so that some chunks are
    wrong whichever holder is asked first."""
    processes = PeerProcesses(home, 6, "--cpus", "2")
    path, digest = made(home, args.mib)
    try:
        first, second = processes.up()[:2]
        blob_id = f"sha256:{digest}"
        for row in (first, second):
            upload(processes.client(row), path, blob_id)
        # the manifest is known before the disk goes bad, as when the file is in use
        readers_of = readers("", 1, digest)
        readers_of["inputs"] = {"big": {"blob": blob_id}}
        assert processes.client(processes.up()[3]).submit(readers_of).wait() == "succeeded"
        where = {
            row["id"]: Path(row["data"]) / "blobs" / digest[:2] / digest for row in processes.up()
        }
        without = [row for row in processes.up() if not where[row["id"]].exists()]
        for peer_id, blob in where.items():
            if peer_id != second["id"] and blob.exists():
                flip_bits(blob, args.mib)
        workflow = processes.client(without[0]).submit(readers_of)
        state = workflow.wait()
        counts = counted(processes, processes.up())
        return {
            "state": state,
            "corrupt chunks that were found": sum(c["corrupt"] for c in counts.values()),
        }
    finally:
        processes.close()


def small_cache(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """A chain of stages moves a GiB through one peer that has 100 MiB for files."""
    processes = PeerProcesses(home, args.peers if args.peers != 20 else 1, "--disk", "100MiB")
    try:
        stages, width, mib = 16, 4, 16
        tasks: dict[str, Any] = {}
        for stage in range(stages):
            for i in range(width):
                name = f"s{stage}.{i}"
                if stage == 0:
                    command = f"head -c {mib * MIB} /dev/urandom > {name}"
                    tasks[name] = {"command": ["sh", "-c", command], "outputs": [name]}
                else:
                    before = f"s{stage - 1}.{i}"
                    command = (
                        f"(tail -c {mib * MIB - 16} {before}; head -c 16 /dev/urandom) > {name}"
                    )
                    tasks[name] = {
                        "command": ["sh", "-c", command],
                        "inputs": [before],
                        "outputs": [name],
                    }
        last = [f"s{stages - 1}.{i}" for i in range(width)]
        tasks["end"] = {"command": "cat s* | wc -c > total", "inputs": last, "outputs": ["total"]}
        client = processes.anyone()
        began = time.monotonic()
        workflow = client.submit({"name": "a GiB", "tasks": tasks, "policies": []})
        most = 0
        while workflow.view()["state"] in ("pending", "running"):
            time.sleep(0.2)
            for row in processes.up():
                blobs = Path(row["data"]) / "blobs"
                most = max(most, _disk(blobs) + _disk(Path(row["data"]) / "parts"))
        view = workflow.view()
        retried = sum(workflow.task(name)["attempts"] - 1 for name in tasks)
        return {
            "state": view["state"],
            "reason": view.get("reason", ""),
            "MiB made": stages * width * mib,
            "seconds": round(time.monotonic() - began, 1),
            "most MiB on a peer's disk": round(most / MIB, 1),
            "total": workflow.read("total").decode().strip() if view["state"] == WON else "",
            "attempts handed back": retried,
            "evicted": sum(c["evicted"] for c in counted(processes, processes.up()).values()),
        }
    finally:
        processes.close()


def _disk(path: Path) -> int:
    seen: dict[int, int] = {}
    for file in path.rglob("*"):
        try:
            status = file.stat()
        except OSError:
            continue
        if file.is_file():
            seen[status.st_ino] = status.st_size
    return sum(seen.values())


def upload(client: Client, path: Path, blob_id: str) -> None:
    client.upload(path, blob_id)


WORKS = {"hot": hot, "killed": killed, "corrupt": corrupt, "small-cache": small_cache}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__)
    parser.add_argument("work", nargs="*", choices=[*WORKS, []], help="all of them, by default")
    parser.add_argument("--mib", type=int, default=64, help="size of the file (64)")
    parser.add_argument("--peers", type=int, default=20)
    args = parser.parse_args()
    for work in args.work or WORKS:
        with tempfile.TemporaryDirectory() as home:
            print(json.dumps({"work": work, **WORKS[work](args, Path(home))}), flush=True)


if __name__ == "__main__":
    main()
