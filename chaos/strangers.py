"""Hostile documents, sent to live peers by an owner whom nobody trusts.

Each attack gets five fresh peers and an ordinary `submit` token. The peers held if all five daemons
live, none was silent for long, none answered 500, and each, asked directly, serves an honest
workflow of another owner in time: 20 s into the attack, and again after a restart on the same data.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from valence.client import Client, Problem, Unreachable
from valence.display import Display
from valence.peer.removal import remove_tree

from .processes import VALENCE, PeerProcesses, until

PEERS = 5
OFFER = ("--cpus", "2", "--memory", "2GiB", "--disk", "128MiB")
WATCH_S, HONEST_S = 20.0, 20.0
ANSWER_S = 45.0  # attackers are patient: they wait until honest owners have been served
SETTLE_S = 5.0  # after a restart the journaled attack resumes before honest owners ask
SILENT_S_MAX = 2.0
RSS_BYTES_MAX = 1536 << 20
DOWN_S, EXIT_S = 60.0, 3.0
JSON, YAML, BYTES = "application/json", "application/yaml", "application/octet-stream"


def _each(items: Iterable[Any], act: Callable[[Any], Any], at_once: int = PEERS) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(act, items))


class Caller(Client):
    """A client that reports the status of every response, and waits only as long as told."""

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = JSON,
        timeout_s: float = ANSWER_S, held: list[Any] | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        """The status and the body; 0 and the reason without a response. `held` keeps it open."""
        try:
            connection, response = self._open(method, path, body, {"Content-Type": kind}, timeout_s)
            if held is not None:
                held.append(connection)
                return response.status, b""
            with contextlib.closing(connection):
                return response.status, response.read()
        except Problem as problem:
            return problem.status, problem.detail.encode()
        except (Unreachable, OSError, http.client.HTTPException) as error:
            return 0, str(error).encode()


class Cluster(PeerProcesses):
    """Five peers that can be restarted on the same data, and can't take all memory."""

    def __init__(self, home: Path) -> None:
        self.overgrown: list[str] = []
        self._closed = threading.Event()
        threading.Thread(target=self._guard, daemon=True).start()
        super().__init__(home, PEERS, *OFFER)

    def stop(self) -> int:
        """The number of processes that outlived `valence down` and were killed."""
        down = [*VALENCE, "down"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(down, env=self.environment, stdout=subprocess.DEVNULL, timeout=DOWN_S)
        left = self._left()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._left()
        return len(left)

    def close(self) -> None:
        self._closed.set()
        self.stop()
        remove_tree(self.home)  # tasks leave trees that the standard library can't remove

    def last_words(self) -> list[str]:
        """The last line in the log of each dead daemon."""
        alive = self.up()
        lines = []
        for path in [Path(row["data"]) for row in self.rows() if row not in alive]:
            line = (path / "peer.log").read_text(errors="replace").strip().rpartition("\n")[2]
            lines.append(f"{path.name} died; the end of its log: {line[-200:]}")
        return lines

    def _guard(self) -> None:
        """Kills a daemon before it takes all of the machine's memory."""
        while not self._closed.wait(0.25):
            with contextlib.suppress(OSError):
                for pid in [int(row["pid"]) for row in self.up()]:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    used = pages * os.sysconf("SC_PAGE_SIZE")
                    if used > RSS_BYTES_MAX and pid in self._processes():
                        self.overgrown.append(f"a daemon was killed at {used >> 20} MiB")
                        os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Processes that do not end by themselves within a few seconds."""
        with contextlib.suppress(TimeoutError):
            until(lambda: not self._processes(), EXIT_S)
        return self._processes()

    def _processes(self) -> list[int]:
        """Recognised by their environment: a pid may belong to another process by now."""
        pids, mark = [], f"VALENCE_HOME={self.home}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        return pids


# --------------------------------------------------------------------------- honest owners

LITTLE = {"retries": 2, "needs": {"cpus": 0.2}}
MAKE = "cat in > o; head -c 1000000 /dev/zero > big"
READ = "wc -c < big > n; cat o n > p"
HONEST: dict[str, Any] = {
    "name": "honest",
    "inputs": {"in": {"text": "hello\n"}},
    "tasks": {
        "make": {"command": MAKE, "inputs": ["in"], "outputs": ["o", "big"], **LITTLE},
        "read": {"command": READ, "inputs": ["o", "big"], "outputs": ["p"], **LITTLE},
        "call": {"call": "operator:mul", "args": [6, 7], **LITTLE},
    },
}


def refused(caller: Caller) -> str:
    """Empty if this peer served an honest workflow in time; otherwise what went wrong."""
    deadline = time.monotonic() + HONEST_S

    def ask(
        method: str, path: str, body: bytes | None = None, done: Callable[[bytes], bool] = bool
    ) -> bytes:
        outcome = "no answer"
        while (left_s := deadline - time.monotonic()) > 0:
            status, answer = caller.ask(method, path, body, timeout_s=left_s)
            if status in (200, 201) and done(answer):
                return answer
            outcome = f"{status} {answer[:200].decode(errors='replace')}"
            time.sleep(0.1)
        raise TimeoutError(f"{method} {path}: {outcome}")

    try:
        workflow_id = json.loads(ask("POST", "/v1/workflows", json.dumps(HONEST).encode()))["id"]
        path = f"/v1/workflows/{workflow_id}"
        ended = ask("GET", f"{path}?wait=2", done=lambda a: json.loads(a)["state"] != "running")
        view = json.loads(ended)
        if view["state"] != "succeeded" or view["values"] != {"call": 42}:
            return f"{view['state']}: {view['reason']} {view['values']}"
        ask("GET", f"{path}/files/p", done=lambda a: a.split() == [b"hello", b"1000000"])
        ask("GET", f"{path}/events", done=lambda a: b'"final"' in a)
    except (TimeoutError, LookupError, ValueError) as error:
        return str(error)
    return ""


def silence_s(caller: Caller, end: float) -> float:
    """The longest wait for /healthz until then; a peer that has died was silent all the time."""
    worst_s = 0.0
    while (start := time.monotonic()) < end:
        status, _ = caller.ask("GET", "/healthz", timeout_s=end - start)
        now = time.monotonic()
        worst_s = max(worst_s, now - start if status == 200 or now >= end else WATCH_S)
        time.sleep(0.2)
    return worst_s


# --------------------------------------------------------------------------- attacks


class Stranger:
    """An attacker: the responses it got, its workflows, and the connections it holds open."""

    def __init__(self, cluster: Cluster) -> None:
        self.answers: list[int] = []
        self.ids: list[str] = []
        self.held: list[Any] = []
        self._urls = [row["http"] for row in cluster.rows()]
        self._token = cluster.owner("mallory")
        self._over = threading.Event()

    def ask(self, peer: int, method: str, path: str, *more: Any, **how: Any) -> tuple[int, bytes]:
        if self._over.is_set():
            return 0, b"the attack is over"
        status, answer = Caller(self._urls[peer], self._token).ask(method, path, *more, **how)
        self.answers.append(status)
        return status, answer

    def submit(self, document: dict[str, Any] | str, peer: int = 0) -> None:
        """Sends values as JSON, text as YAML."""
        text, kind = (document, YAML) if isinstance(document, str) else (json.dumps(document), JSON)
        status, answer = self.ask(peer, "POST", "/v1/workflows", text.encode(), kind)
        if status in (200, 201):
            self.ids.append(json.loads(answer)["id"])

    def everywhere(self, document: dict[str, Any]) -> None:
        """Submits to all peers at once."""
        _each(range(PEERS), lambda peer: self.submit(document, peer))

    def close(self) -> None:
        self._over.set()
        for connection in self.held:
            connection.close()


def one(task: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A document with a single task."""
    return {"name": "hostile", "tasks": {"t": task}, **more}


def rules(*policies: str, count: int = 1) -> dict[str, Any]:
    """A document whose policies react to tasks that fail."""
    return one({"foreach": count, "command": ["false"]}, policies=list(policies))


def control(x: Stranger) -> None:
    """Nothing hostile: shows what the machine does by itself."""
    x.submit(one({"command": ["true"]}))


def pilots_rank(x: Stranger) -> None:
    """A rank that raises once a task has waited for two seconds."""
    # the input makes pilots worthwhile; 1.5 of 2 cores leave capacity for honest owners
    task = {"foreach": 400, "command": ["sleep", "1"], "inputs": ["f"], "needs": {"cpus": 1.5}}
    rank = 'part((1:"a"), min(1, floor(waited - 1)))'
    x.submit(one(task, strategy="pilots", rank=rank, inputs={"f": {"size": "2MB"}}))


def policy_tree(x: Stranger) -> None:
    """A tree of 2^n leaves whose halves are shared, and which is hashed as a whole."""
    x.submit(rules("replace ENDED:t:f:c:v by A:1", "replace A:x by A:(x:x)"))


def policy_nested(x: Stranger) -> None:
    """A rule that never rests, inside a solution that is itself inside a molecule."""
    nest = "replace ENDED:t:f:c:v, r::rule by N:<r, X:0>"
    x.submit(rules(nest, "replace X:n by X:(n + 1)"))


def policy_sum(x: Stranger) -> None:
    """A sum of 5,000 terms, nested too deep for a recursive reader."""
    x.submit(rules(f"replace ENDED:t:f:c:v by A:({'+'.join(['1'] * 5000)})"))


def policy_floor(x: Stranger) -> None:
    """A rule that takes the floor of infinity, at every home."""
    x.everywhere(rules("replace ENDED:t:f:c:v by A:floor(1e999)", count=40))


def policy_deep(x: Stranger) -> None:
    """A chain that every reaction makes one level deeper, until Python's stack ends."""
    x.everywhere(rules("replace ENDED:t:f:c:v by A:1", "replace A:x by A:(x:1)", count=40))


def policy_doubling(x: Stranger) -> None:
    """A solution that doubles with every reaction: 2^n molecules after n steps."""
    x.submit(rules("replace ENDED:t:f:c:v by A:<1, 2>", "replace A:<?w> by A:<?w, ?w>"))


def retry_storm(x: Stranger) -> None:
    """A policy that retries tasks which fail at once, for ever."""
    x.submit(rules("replace ENDED:t:f:c:v by system.again(t)", count=300))


def nested_directories(x: Stranger) -> None:
    """1,900 directories inside each other: a path longer than any system call takes."""
    code = "import os\nfor i in range(1900):\n os.mkdir('d'); os.chdir('d')"
    x.submit(one({"foreach": 10, "command": ["python3", "-c", code, "{item}"]}))


def foreach_199000(x: Stranger) -> None:
    """A few bytes that expand to 199,000 tasks."""
    x.submit(one({"foreach": 199_000, "command": ["true"]}))


def did_you_mean(x: Stranger) -> None:
    """Twenty unknown files, each to be compared with two thousand long names."""
    made = {"foreach": 2000, "command": ["true"], "outputs": ["{item}" + "ab" * 90]}
    unknown = {"foreach": 20, "command": ["true"], "inputs": ["{item}x" + "ba" * 90]}
    x.submit({"name": "hostile", "tasks": {"a": made, "b": unknown}})


def streams(x: Stranger) -> None:
    """One owner opens every event stream that every peer has to offer."""
    x.submit(one({"command": ["sleep", "100"], "needs": {"cpus": 0.01}}))
    path = f"/v1/workflows/{x.ids[0]}/events"
    _each([*range(PEERS)] * 220, lambda peer: x.ask(peer, "GET", path, held=x.held))


def uploads(x: Stranger) -> None:
    """One owner's uploads fill the disk of every peer."""

    def upload(peer: int) -> None:
        data = os.urandom(2_000_000)
        x.ask(peer, "PUT", f"/v1/blobs/sha256:{hashlib.sha256(data).hexdigest()}", data, BYTES)

    _each([*range(PEERS)] * 80, upload)


def args_bomb(x: Stranger) -> None:
    """YAML aliases, just below the limit on values, in the arguments of 2,000 calls."""
    levels = zip("abcde", ("0", "*a", "*b", "*c", "*d"), strict=True)
    tens = [f"&{name} [{','.join([below] * 10)}]" for name, below in levels]
    args = ", ".join([*tens, "[*e,*e,*e,*e,*e,*e]"])
    x.submit(f"{{name: g, tasks: {{t: {{foreach: 2000, call: 'builtins:len', args: [{args}]}}}}}}")


def fifo_log(x: Stranger) -> None:
    """A fifo in place of the task's log: opening it waits for a reader for ever."""
    line = 'mkfifo "$HOME.log"; head -c 60000 /dev/zero; sleep 0.5'
    task = {"foreach": 5, "command": ["sh", "-c", line, "{item}"], "needs": {"cpus": 0.01}}
    x.everywhere(one(task))


def reply(value: str) -> str:
    """A program that writes this to the pipe on which its worker is expected to reply."""
    send = "os.write(3, struct.pack('!I', len(b)) + b)"
    return f"import os, struct, time, msgpack\nb = msgpack.packb({value})\n{send}\n"


def lying_reply(x: Stranger) -> None:
    """Calls that reply in place of their worker: the value is in a file, which is a fifo."""
    fifo = "import os\np = request['value_path']\nos.mkfifo(p)\n"
    code = fifo + reply("{'ok': True, 'encoding': 'json', 'data': b'', 'path': p}")
    call = {"call": "builtins:exec", "args": [f"{code}time.sleep(40)\n"]}
    x.submit(one({"foreach": 60, **call, "needs": {"cpus": 0.01}}))


LIES = (
    "{'ok': True, 'encoding': 7, 'data': {}}",
    "{'ok': True, 'encoding': 'json', 'data': 5}",
    "{'ok': True, 'encoding': 'json', 'data': b'[' * 9000}",
    "{'ok': False, 'error': b'\\xff' * 100000}",
    "{'ok': True, 'log': b'x' * 60000000}",
    "{'ok': True, 'path': '/etc/passwd'}",
    "{'ok': True, 'data': b'x' * 50000000}",
)


def lying_value(x: Stranger) -> None:
    """Calls that reply in place of their worker, with values of the wrong types and sizes."""
    call = {"foreach": 4, "call": "builtins:exec", "needs": {"cpus": 0.01}}
    tasks = {f"t{n}": {**call, "args": [reply(lie)]} for n, lie in enumerate(LIES)}
    x.submit({"name": "hostile", "tasks": tasks})


def gang_bomb(x: Stranger) -> None:
    """780 gangs of 256, each member hashed with the names of its whole gang."""
    x.submit(one({"foreach": 780, "peers": 256, "command": ["true"]}))


def edges_bomb(x: Stranger) -> None:
    """150 bytes with 1,960,000 edges, and forty questions that walk them."""
    before = {"foreach": 1400, "command": ["sleep", "2"]}
    behind = {"foreach": 1400, "command": ["true"], "after": ["a"]}
    x.submit({"name": "hostile", "tasks": {"a": before, "b": behind}})
    for workflow_id in x.ids:
        path = f"/v1/workflows/{workflow_id}/tasks/b%5B"
        _each(range(40), lambda n: x.ask(n % PEERS, "GET", f"{path}{n}%5D"), 8)  # noqa: B023


def parse_flood(x: Stranger) -> None:
    """Sixteen large YAML documents at once, to fill the threads that all requests share."""
    files = "".join(f"  f{n}: {{text: x}}\n" for n in range(60_000))
    task = "tasks:\n  t: {command: ['true'], inputs: [nothing]}\n"
    _each(range(16), lambda n: x.submit(f"name: q\ninputs:\n{files}{task}", n % 2), 16)


def large_work(x: Stranger) -> None:
    """Twelve megabytes of environment in one task: one message, one write, one spawn."""
    x.submit(one({"foreach": 8, "command": ["true"], "env": {"A": "x" * 12_000_000}}))


STRANGE = """
import os, socket, subprocess, sys
os.mkdir('a'); os.mkfifo('a/p'); os.symlink('.', 'a/loop'); os.symlink('/etc', 'a/out')
open(b'\\xff\\xfe\\n\\x1b[2J', 'w'); os.mkdir(b'x' * 255); os.mknod('a/n', 0o600)
socket.socket(socket.AF_UNIX).bind('a/s')
d = os.getcwd()
for i in range(40): os.mkdir('n' * 250); os.chdir('n' * 250)
os.chdir(d)
for i in range(20000): open(f'f{i}', 'w')
os.chmod('a', 0); os.chmod(d, 0)
for i in range(20): subprocess.Popen(['env', '-i', 'setsid', 'sleep', '30'])
sys.stdout.buffer.write(os.urandom(100000) + b'\\x1b]0;x\\x07')
"""


def strange_files(x: Stranger) -> None:
    """Odd names, fifos, sockets, loops, lost permissions and runaway children, all left behind."""
    x.submit(one({"foreach": 10, "command": ["python3", "-c", STRANGE, "{item}"]}))


def sized_inputs(x: Stranger) -> None:
    """Sixty bytes that make every peer generate 120 MB of input and keep it."""
    names = [f"i{n}" for n in range(4)]
    task = {"command": ["sleep", "60"], "inputs": names, "needs": {"cpus": 0.01}}
    x.everywhere(one(task, inputs={name: {"size": "30MB"} for name in names}))


ATTACKS: dict[str, Callable[[Stranger], None]] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        control, pilots_rank, policy_tree, policy_nested, policy_sum, policy_floor, policy_deep,
        policy_doubling, retry_storm, nested_directories, foreach_199000, did_you_mean, streams,
        uploads, args_bomb, fifo_log, lying_reply, lying_value, gang_bomb, edges_bomb, parse_flood,
        large_work, strange_files, sized_inputs,
    )
}  # fmt: skip


# --------------------------------------------------------------------------- the scenario


def honest(cluster: Cluster) -> list[Caller]:
    """A caller for each peer."""
    token = cluster.owner("honest")
    return [Caller(row["http"], token) for row in cluster.rows()]


def served(cluster: Cluster) -> tuple[int, int, list[str]]:
    """The daemons alive, the honest workflows served, and the reasons for the others."""
    refusals = _each(honest(cluster), refused)
    why = [*cluster.overgrown, *cluster.last_words(), *filter(None, refusals)]
    return len(cluster.up()), refusals.count(""), why


def restarted(cluster: Cluster) -> tuple[int, int, list[str]]:
    """The same counts after a restart on the same data."""
    outlived = cluster.stop()
    left = [f"outlived `valence down` and killed: {outlived}"] if outlived else []
    try:
        cluster.start()
    except (OSError, subprocess.SubprocessError) as error:
        return 0, 0, [*left, f"the cluster did not restart: {error}"]
    time.sleep(SETTLE_S)
    alive, done, why = served(cluster)
    return alive, done, [*left, *why]


def attacked(cluster: Cluster, attack: Callable[[Stranger], None]) -> dict[str, Any]:
    """The outcome of one attack."""
    stranger = Stranger(cluster)
    pool = ThreadPoolExecutor(1)
    attempt = pool.submit(attack, stranger)
    end = time.monotonic() + WATCH_S
    worst_s = max(_each(honest(cluster), lambda caller: silence_s(caller, end)))
    alive, done, why = served(cluster)
    stranger.close()
    failed = attempt.exception() if wait([attempt], 5.0).done else None
    pool.shutdown(wait=False)
    answers = dict(sorted(Counter(stranger.answers).items()))
    alive_again, done_again, why_again = restarted(cluster)
    wrong = [*why, *why_again]
    if failed:
        wrong.append(f"the attack itself failed: {failed!r}")
    if 500 in answers:
        wrong.append("a peer answered 500")
    if worst_s > SILENT_S_MAX:
        wrong.append(f"a peer was silent for {worst_s:.1f} s")
    return {
        "held": {alive, done, alive_again, done_again} == {PEERS} and not wrong,
        "answers": answers,
        "worst_healthz_s": round(worst_s, 2),
        "alive": alive,
        "honest": done,
        "alive_again": alive_again,
        "honest_again": done_again,
        "wrong": list(dict.fromkeys(wrong)),
    }


def hostile(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Hostile documents against 5 peers, one by one; all 5 keep serving another owner."""
    names = [name for name in getattr(options, "only", "").split(",") if name] or list(ATTACKS)
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        raise ValueError(f"unknown attack {unknown[0]}; choose from {', '.join(ATTACKS)}")
    display = Display(sys.stderr)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        cluster = Cluster(home / name)
        try:
            rows[name] = attacked(cluster, ATTACKS[name])
        finally:
            cluster.close()
        display.say(f"  {name}: {'held' if rows[name]['held'] else 'NOT HELD'}")
    held = sum(row["held"] for row in rows.values())
    return {"right": held == len(rows), "peers": PEERS, "held": held, "of": len(rows), **rows}
