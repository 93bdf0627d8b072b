"""What strangers, wrong tokens, hostile datagrams and hostile tasks can't do. See docs/security.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import VALENCE
from valence.client import Client, Problem
from valence.peer import limits as doors
from valence.peer import sandbox, tokens
from valence.peer.daemon import FAILURES_MAX
from valence.peer.http import STREAMS_PER_OWNER_MAX
from valence.peer.limits import ConnectionLimits, Rates
from valence.peer.seal import Dropped, Seal


def token(cluster: Any, owner: str, scope: str, *more: str) -> str:
    done = cluster.cli("token", "--owner", owner, "--scope", scope, *more)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def client(cluster: Any, given: str, index: int = 0) -> Client:
    return Client(cluster.peers()[index]["http"], given)


def refused(status: int, work: Any, *arguments: Any) -> str:
    with pytest.raises(Problem) as caught:
        work(*arguments)
    assert caught.value.status == status, caught.value
    return caught.value.detail


QUICK = {"name": "quick", "tasks": {"a": {"command": ["true"]}}}


# --------------------------------------------------------------------------- one owner, another


def test_one_owner_can_not_take_all_event_streams(cluster) -> None:
    greedy, other = (token(cluster, name, "submit") for name in ("greedy", "other"))
    waiting = {"name": "w", "tasks": {"a": {"command": ["sleep", "60"], "needs": {"cpus": 0.01}}}}
    mine = {given: client(cluster, given).submit(waiting) for given in (greedy, other)}
    port = cluster.peers()[0]["http_port"]
    with contextlib.ExitStack() as held:

        def open_stream(given: str) -> int:
            stream = held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            head = f"GET /v1/workflows/{mine[given].id}/events HTTP/1.1\r\nHost: x\r\n"
            stream.sendall(f"{head}Authorization: Bearer {given}\r\n\r\n".encode())
            return int(stream.recv(200).split()[1])

        found = Counter(open_stream(greedy) for _ in range(STREAMS_PER_OWNER_MAX + 5))
        assert found == {200: STREAMS_PER_OWNER_MAX, 429: 5}
        assert open_stream(other) == 200
    for workflow in mine.values():
        workflow.cancel()


def test_a_part_that_fails_is_begun_again_and_one_that_can_not_be_kept_ends_the_peer(
    tmp_path,
) -> None:
    """A peer whose gossip always raises, with less patience than by default."""
    code = """
import sys, valence.peer.daemon as daemon, valence.protocols.membership.liveness as liveness
daemon.RESTART_S_MIN = daemon.RESTART_S_MAX = 0.01
async def broken(self): raise RuntimeError("a bug")
liveness.Liveness.gossip = broken
from valence.cli import main
sys.exit(main(["peer", "--data", sys.argv[1], "--http-port", "0", "--port", "0", "--root-tasks"]))
"""
    environment = {**os.environ, "VALENCE_CLUSTER_KEY": "k" * 20, "VALENCE_TOKEN": "t" * 20}
    command = [sys.executable, "-c", code, str(tmp_path / "d")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: a bug" in done.stderr
    assert done.stderr.count("gossip ended by an error and is restarted") == FAILURES_MAX
    assert "gossip can't be kept running: this peer stops" in done.stderr


# --------------------------------------------------------------------------- tokens


def test_a_workflow_belongs_to_who_submitted_it_at_every_peer(cluster) -> None:
    alice, bob = (token(cluster, who, "submit") for who in ("alice", "bob"))
    mine = client(cluster, alice, 0).submit(QUICK)
    assert mine.wait() == "succeeded"
    assert mine.view()["owner"] == "alice"
    for index in (0, 3):
        assert client(cluster, alice, index).workflow(mine.id).view()["state"] == "succeeded"
        other = client(cluster, bob, index)
        assert "no workflow" in refused(404, other.workflow, mine.id)
        for path in ("", "/tasks", "/tasks/a", "/tasks/a/log", "/events", "/files", "/values"):
            refused(404, other.request, "GET", f"/v1/workflows/{mine.id}{path}")
        refused(404, other.request, "POST", f"/v1/workflows/{mine.id}/cancel")
        assert mine.id not in [w["id"] for w in other.workflows(1000)]
        assert mine.id in [w["id"] for w in client(cluster, alice, index).workflows(1000)]
        assert mine.id in [w["id"] for w in cluster.client(index).workflows(1000)]


def test_the_same_idempotency_key_of_two_owners_is_two_workflows(cluster) -> None:
    made = {
        client(cluster, token(cluster, who, "submit")).submit(QUICK, key="same-key").id
        for who in ("carol", "dave")
    }
    assert len(made) == 2


def test_a_token_does_what_its_scope_says_and_no_more(cluster) -> None:
    reader = client(cluster, token(cluster, "erin", "read"))
    assert reader.peers()
    assert reader.workflows() == []
    assert "needs a token with scope `submit`" in refused(403, reader.submit, QUICK)
    refused(403, reader.request, "PUT", "/v1/blobs/sha256:" + "0" * 64, b"x")
    admin = client(cluster, token(cluster, "root2", "admin"))
    workflow = cluster.client().submit(QUICK)
    assert admin.workflow(workflow.id).wait() == "succeeded"


def test_tokens_that_are_forged_changed_expired_or_revoked_are_refused(cluster) -> None:
    good = token(cluster, "frank", "read")
    mark, payload, signature = good.split(".")
    _, stolen, _ = token(cluster, "frank", "admin").split(".")
    foreign, _ = tokens.make("another root, long enough", "frank", "admin", time.time() + 99)
    ended = token(cluster, "frank", "read", "--lasting", "0s")
    for bad in (
        f"{mark}.{stolen}.{signature}",
        f"{mark}.{payload}.",
        f"{mark}.{payload}.{signature[:-2]}AA",
        f"v2.{payload}.{signature}",
        foreign,
        "v1..",
        "v1.ä.ö",
        "v1.\xff.x",
        "x" * 5000,
    ):
        assert "not valid" in refused(401, client(cluster, bad.encode().decode("latin-1")).peers)
    time.sleep(1.1)  # it counts in whole seconds
    assert "expired" in refused(401, client(cluster, ended).peers)
    made, id = tokens.make("root", "g", "read", 100.0)
    assert tokens.Tokens("root", (), lambda: 50.0).check(made).owner == "g"
    with pytest.raises(tokens.BadToken, match="revoked"):
        tokens.Tokens("root", (id,), lambda: 50.0).check(made)
    done = cluster.cli("token", "--owner", "no blanks", "--scope", "read")
    assert done.returncode != 0
    assert "owner" in done.stderr


def test_who_guesses_tokens_waits_and_who_has_one_does_not(own_cluster) -> None:
    cluster = own_cluster(1)
    statuses = Counter()
    for number in range(80):
        with pytest.raises(Problem) as caught:
            client(cluster, f"guess number {number:04}").peers()
        statuses[caught.value.status] += 1
    assert statuses[401] >= 50
    assert statuses[429] > 0
    assert cluster.client().peers()


def test_rates_and_their_memory_are_bounded(monkeypatch) -> None:
    rates = Rates(per_s=10, burst=5)
    assert [rates.take("a", 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert rates.take("a", 0.11)
    monkeypatch.setattr(doors, "BUCKETS_MAX", 10)
    for number in range(100):
        rates.take(str(number), 1.0)
    assert len(rates._buckets) <= 10


# --------------------------------------------------------------------------- connections


async def test_silent_and_surplus_connections_are_closed(monkeypatch) -> None:
    monkeypatch.setattr(doors, "FIRST_REQUEST_S", 0.2)
    monkeypatch.setattr(doors, "SWEEP_S", 0.05)
    monkeypatch.setattr(doors, "CONNECTIONS_PER_ADDRESS_MAX", 20)
    counts: Counter[str] = Counter()
    made = ConnectionLimits(asyncio.Protocol, counts)
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
    for reader, _ in streams:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
    assert counts["connections_refused"] == 10
    assert counts["connections_idle_closed"] == 20
    for _, writer in streams:
        writer.close()
    made.close()
    server.close()


def test_a_thousand_idle_connections_at_both_ports_stop_nothing(own_cluster) -> None:
    cluster = own_cluster(2)
    found = cluster.peers()[0]
    web = int(found["http"].rpartition(":")[2])
    held = []
    try:
        for port in (web, found["port"]):
            for _ in range(1000):
                stream = socket.socket()
                stream.connect(("127.0.0.1", port))
                held.append(stream)
        document = {"name": "w", "tasks": {"a": {"foreach": 50, "command": ["true"]}}}
        assert cluster.client().submit(document).wait() == "succeeded"
        assert len(cluster.client().peers()) == 2
    finally:
        for stream in held:
            stream.close()


# --------------------------------------------------------------------------- datagrams


def test_a_peer_with_another_key_is_never_seen(own_cluster, tmp_path) -> None:
    cluster = own_cluster(2)
    environment = {**cluster.environment, "VALENCE_CLUSTER_KEY": "another key, long enough",
                   "VALENCE_TOKEN": "another token, long enough"}  # fmt: skip
    seed = f"127.0.0.1:{cluster.peers()[0]['port']}"
    stranger = subprocess.Popen(
        [*VALENCE, "peer", "--data", str(tmp_path / "stranger"), "--join", seed],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert stranger.stderr is not None
        while "check --join and the cluster key" not in stranger.stderr.readline():
            assert stranger.poll() is None
        ids = {p["id"] for p in cluster.client().peers()}
        assert ids == {p["id"] for p in cluster.peers()}
        told = Client(
            json.loads((tmp_path / "stranger" / "peer.json").read_text())["http"],
            "another token, long enough",
        )
        assert len(told.peers()) == 1
    finally:
        stranger.terminate()
        stranger.wait(20)
        stranger.stderr.close()


def _memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_a_hundred_thousand_hostile_datagrams_change_nothing(own_cluster) -> None:
    cluster = own_cluster(2)
    target = cluster.peers()[0]
    rng = random.Random(7)
    # made by somebody who once had the key: what can be recorded on a wire
    insider = Seal(rng.randbytes(20), (cluster.home / "key").read_text().strip(), time.time)
    recorded = [insider.seal(bytes.fromhex(target["id"]), rng.randbytes(80)) for _ in range(50)]
    work = {"name": "meanwhile", "tasks": {"a": {"foreach": 60, "command": ["sleep", "0.1"]}}}
    run = cluster.client().submit(work)
    before = _memory_bytes(target["pid"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(("127.0.0.1", target["port"]))
        for number in range(100_000):
            kind = number % 4
            if kind == 0:
                data = rng.randbytes(rng.randrange(1, 1400))
            elif kind == 1:
                data = recorded[number % 50]
            elif kind == 2:
                data = recorded[number % 50][: rng.randrange(1, 150)]
            else:
                data = bytearray(recorded[number % 50])
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            udp.send(data)
            if number % 100 == 99:
                time.sleep(0.002)
    assert run.wait() == "succeeded"
    assert _memory_bytes(target["pid"]) - before < 20 * 2**20
    metrics = cluster.client().metrics()
    got = {
        line.split('"')[1]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith('valence_link_total{kind="dropped_')
    }
    assert got["dropped_replay"] > 1000
    assert got["dropped_garbage"] > 1000
    assert got["dropped_key"] > 1000
    assert {p["state"] for p in cluster.client().peers()} == {"up"}


def test_in_a_flood_the_known_are_still_heard() -> None:
    now = [1000.0]
    key = "a key that is long enough"
    mine, theirs = (Seal(bytes([n] * 20), key, lambda: now[0]) for n in (1, 2))
    assert mine.open(theirs.seal(bytes([1] * 20), b"hello"))[1] == b"hello"
    stranger = Seal(bytes([3] * 20), "some other key, long too", lambda: now[0])
    why = Counter()
    for _ in range(5000):
        with pytest.raises(Dropped) as caught:
            mine.open(stranger.seal(bytes([1] * 20), b"x"))
        why[str(caught.value)] += 1
    assert why["flood"] > 2700
    assert mine.open(theirs.seal(bytes([1] * 20), b"again"))[1] == b"again"
    newcomer = Seal(bytes([5] * 20), key, lambda: now[0])
    heard = 0
    for _ in range(40):  # it repeats itself until it is answered
        with contextlib.suppress(Dropped):
            heard += mine.open(newcomer.seal(bytes([1] * 20), b"me too"))[1] == b"me too"
    assert heard
    now[0] += 1
    newcomer = Seal(bytes([4] * 20), key, lambda: now[0])
    assert mine.open(newcomer.seal(bytes([1] * 20), b"new"))[1] == b"new"


# --------------------------------------------------------------------------- the sandbox


def _no_sandbox() -> str:
    try:
        sandbox.Sandbox.find(Path("/nowhere"))
    except sandbox.NoSandbox as error:
        return str(error)
    return ""


_WHY = _no_sandbox() if shutil.which("bwrap") else "bwrap is not installed"


@pytest.mark.skipif(bool(_WHY), reason=_WHY)
def test_in_the_sandbox_a_task_has_its_directory_and_nothing_else(own_cluster, tmp_path) -> None:
    cluster = own_cluster(1, "--sandbox", "bwrap")
    data = cluster.peers()[0]["data"]
    secret = tmp_path / "secret"
    secret.write_text("of somebody else on this machine")
    scratch = f"/tmp/valence-test-{os.getpid()}"
    checks = {
        "own": "echo ok > out && cat out",
        "input": "cat in.txt",
        "tmp": f"echo x > {scratch} && cat {scratch} | grep -q x && echo ok",
        "usr": "! touch /usr/x 2>/dev/null && echo ok",
        "remount": "! mount -o remount,rw /usr 2>/dev/null && ! touch /usr/x 2>/dev/null && echo ok",
        "nobody": "test $(id -u) -ne 0 && grep -q 'CapEff:.0000000000000000' /proc/self/status "
        "&& ! unshare -rm mount -o remount,rw,bind /usr 2>/dev/null && echo ok",
        "data": f"! ls {data}/peer.db 2>/dev/null && ! ls {cluster.home}/key 2>/dev/null && echo ok",
        "others": f"! cat {secret} 2>/dev/null && echo ok",
        "processes": "test $(ls /proc | grep -c '^[0-9]') -lt 10 && echo ok",
        "net": "test $(ls /sys/class/net 2>/dev/null | wc -l) -le 1; cat /proc/net/dev | grep -c : | grep -qx 1 && echo ok",
    }
    tasks: dict[str, Any] = {k: {"command": ["sh", "-c", c]} for k, c in checks.items()}
    tasks["input"]["inputs"] = ["in.txt"]
    tasks["open"] = {"command": ["cat", "/proc/net/dev"], "network": True}
    tasks["sum"] = {"call": "operator:add", "args": [2, 3]}
    tasks["again"] = {"call": "operator:add", "args": [{"result": "sum"}, 1]}
    tasks["large"] = {"call": "operator:mul", "args": ["ab", 50_000]}
    tasks["length"] = {"call": "builtins:len", "args": [{"result": "large"}]}
    tasks["loader"] = {"command": ["true"], "env": {"LD_PRELOAD": "./evil.so", "X": "1"}}
    tasks["variables"] = {"command": ["sh", "-c", "echo $X $VALENCE_TASK"], "env": {"X": "y z"}}
    tasks["twice"] = {"call": "operator:eq", "args": [{"result": "large"}, {"result": "large"}]}
    tasks["bad"] = {"call": "builtins:int", "args": ["x"]}
    tasks["escape"] = {"call": "os:listdir", "args": [data]}
    document = {"name": "walled", "inputs": {"in.txt": {"text": "ok"}}, "tasks": tasks}
    workflow = cluster.client().submit(document)
    assert workflow.wait() == "failed"
    states = {t["id"]: t["state"] for t in workflow.tasks()}
    assert {k for k, v in states.items() if v != "succeeded"} == {"bad"}
    assert not Path(scratch).exists()
    for name in checks:
        assert workflow.log(name).decode().strip() == "ok", name
    assert workflow.log("open").count(b":") > 1
    # it is preloaded inside, where it is not there either: bwrap itself never heard of it
    assert b"bwrap" not in workflow.log("loader")
    assert workflow.log("variables") == b"y z variables\n"
    assert workflow.task("twice")["value"] is True
    assert workflow.task("again")["value"] == 6
    assert workflow.task("length")["value"] == 100_000
    assert "invalid literal" in workflow.task("bad")["reason"]
    assert workflow.task("escape")["value"] == ["work"], "the way to its own directory, no more"


def test_a_sandbox_that_can_not_be_had_is_an_error_at_the_start(tmp_path) -> None:
    environment = {
        "PATH": str(tmp_path),
        "VALENCE_CLUSTER_KEY": "k" * 20,
        "VALENCE_TOKEN": "t" * 20,
        "VALENCE_SANDBOX": "bwrap",
        "VALENCE_ROOT_TASKS": "yes",
    }
    done = subprocess.run(
        [sys.executable, "-m", "valence", "peer", "--data", str(tmp_path / "d")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=os.getcwd(),
    )
    assert done.returncode == 1
    assert "install bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr
