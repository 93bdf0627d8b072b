"""`make fuzz`: hostile input for ten minutes, guided by coverage, and by the API's schema.

`python -m fuzz [--seconds N] [--json]`. The decoders of datagrams and streams and the parser of
documents run under atheris; Schemathesis sends a live cluster every request that its OpenAPI
document allows or forbids. The exit code is 1 if anything crashed, grew without bound, or answered
with 5xx.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from valence.client import Client
from valence.display import Display

from .targets import TARGETS

VALENCE = [sys.executable, "-m", "valence"]
GROWTH_BYTES_MAX = 100 * 2**20
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


def guided(target: str, seconds: int, directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.guided", target, str(seconds), str(directory)],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )
    runs = re.findall(r"#(\d+)\s", done.stderr)
    memory = re.findall(r"rss: (\d+)Mb", done.stderr)
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    failed = done.returncode != 0
    return {
        "what": target,
        "inputs": int(runs[-1]) if runs else 0,
        "coverage": int(coverage[-1]) if coverage else 0,
        "memory_mib": int(memory[-1]) if memory else 0,
        "failed": failed,
        "why": done.stderr[-3000:] if failed else "",
    }


def _memory_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def http(seconds: int, home: Path, examples: int) -> dict[str, Any]:
    """Runs Schemathesis against a cluster of its own, and measures the cluster's memory."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
    environment["VALENCE_HOME"] = str(home)
    up = [*VALENCE, "up", "--peers", "2", "--cpus", "1", "--detach"]
    subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        token = (home / "token").read_text().strip()
        peers = [json.loads(p.read_text()) for p in sorted(home.glob("peer-*/peer.json"))]
        client = Client(peers[0]["http"], token)
        workflow = client.submit({"name": "seed", "tasks": {"a": {"command": ["true"]}}})
        workflow.wait()
        pids = [peer["pid"] for peer in peers]
        start, rounds, tried = time.monotonic(), 0, 0
        before, failed, why = 0, False, ""
        while not failed and (rounds == 0 or time.monotonic() - start < seconds):
            result = _ask_all(peers[0]["http"], token, examples, rounds)
            tried += result["cases"]
            failed, why = result["failed"], result["why"]
            rounds += 1
            if rounds == 1:
                before = _memory_bytes(pids)  # after a first round: caches are full
        grown = _memory_bytes(pids) - before
        if grown > GROWTH_BYTES_MAX:
            failed, why = True, f"the peers grew by {grown:,} bytes"
        client.peers()
        return {
            "what": "http",
            "inputs": tried,
            "coverage": rounds,
            "memory_mib": grown // 2**20,
            "failed": failed,
            "why": why,
        }
    finally:
        subprocess.run([*VALENCE, "down"], env=environment, check=True, stdout=subprocess.DEVNULL)


def _ask_all(url: str, token: str, examples: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {token}", "--checks", CHECKS]
    # one worker: with threads Hypothesis now and then fails to read its own source (CPython 3.11)
    command += [
        "--workers",
        "1",
        "--max-examples",
        str(examples),
        "--seed",
        str(seed + 1),
        "--no-color",
    ]
    command += ["--phases", "examples,coverage,fuzzing,stateful"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    cases = re.search(r"(\d[\d,]*) generated", done.stdout)
    count = int(cases.group(1).replace(",", "")) if cases else 0
    return {"cases": count, "failed": done.returncode != 0, "why": done.stdout[-6000:]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="time for everything together")
    parser.add_argument("--examples", type=int, default=25, help="examples per operation and round")
    parser.add_argument("--keep", metavar="DIR", help="directory for the inputs that failed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    each = max(5, options.seconds // (len(TARGETS) + 1))
    rows = []
    with tempfile.TemporaryDirectory(prefix="valence-fuzz-") as scratch:
        directory = Path(options.keep or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for target in TARGETS:
            print(f"{target}: {each} s", file=sys.stderr, flush=True)
            rows.append(guided(target, each, directory))
        print(f"http: {each} s", file=sys.stderr, flush=True)
        rows.append(http(each, Path(scratch) / "home", options.examples))
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        table = [
            (
                row["what"],
                f"{row['inputs']:,}",
                str(row["coverage"]),
                f"{row['memory_mib']} MiB",
                "FAILED" if row["failed"] else "ok",
            )
            for row in rows
        ]
        Display().table(("WHAT", "INPUTS", "COVERAGE", "MEMORY", "RESULT"), table)
        for row in rows:
            if row["failed"]:
                print(f"\n--- {row['what']}\n{row['why']}")
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
