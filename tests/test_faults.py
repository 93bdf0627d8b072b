"""A real cluster, broken on purpose: kill -9, restarts, peers that never come back, full disks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import VALENCE, wait_for
from tests.test_cluster import raw, submit
from valence.client import Client, Problem
from valence.protocols.wire.entries import AttemptsFinished, TasksReopened, read

DIAMOND = {
    "first": {"command": "seq 1 100 > seed", "outputs": ["seed"]},
    "work": {
        "foreach": 198,
        "command": "sleep 0.15; echo $(( $(wc -l < seed) + {item} )) > out.{item}",
        "inputs": ["seed"],
        "outputs": ["out.{item}"],
    },
    "last": {
        "command": "cat out.* | awk '{s+=$1} END {print s}' > total",
        "inputs": ["out.*"],
        "outputs": ["total"],
    },
}
TOTAL = str(sum(100 + n for n in range(198)))


def committed(data: str, workflow: str) -> Counter[str]:
    """How often each task was committed, by the journal on disk; anew after its files were lost."""
    sql = "select kind, body from entries where workflow = ? order by seq"
    with sqlite3.connect(f"file:{data}/peer.db?mode=ro", uri=True) as database:
        rows = database.execute(sql, (workflow,)).fetchall()
    database.close()
    found: Counter[str] = Counter()
    for kind, body in rows:
        said = read(kind, body)
        if isinstance(said, AttemptsFinished):
            for outcome, _, verdict in said.outcomes:
                found[outcome.key.task] += verdict == "succeeded"
        elif isinstance(said, TasksReopened):
            found.subtract(one.task for one in said.tasks)
    return found


def check(workflow, cluster) -> None:
    """Every keeper's copy says the same, once all have heard of the end."""
    assert workflow.wait() == "succeeded"
    assert workflow.read("total").decode().strip() == TOTAL
    keepers = workflow.view()["keepers"]
    copies = [p["data"] for p in cluster.peers() if p["id"] in keepers]
    assert len(copies) == 3
    for data in copies:
        wait_for(lambda data=data: len(committed(data, workflow.id)) == 200)
        assert set(committed(data, workflow.id).values()) == {1}


def progress(client, id: str) -> int:
    return client.workflow(id).view()["counts"].get("succeeded", 0)


def is_gone(client, id: str) -> bool:
    return "up" not in {peer["state"] for peer in client.peers() if peer["id"] == id}


def test_the_home_is_killed_and_goes_on_where_it_was(own_cluster) -> None:
    cluster = own_cluster(5, "--cpus", "2")
    home = cluster.peers()[1]
    workflow = submit(cluster, DIAMOND, index=1)
    wait_for(lambda: progress(cluster.client(1), workflow.id) > 40)
    cluster.kill(home["id"])
    other = cluster.client(3)
    wait_for(lambda: is_gone(other, home["id"]))
    cluster.restart(home["id"])
    wait_for(lambda: any(p["id"] == home["id"] and p["state"] == "up" for p in other.peers()))
    again = cluster.cli("up", "--peers", "5", "--detach")
    assert again.returncode == 1
    assert "stop it with `valence down`" in again.stderr
    check(other.workflow(workflow.id), cluster)


def test_an_executing_peer_is_killed_and_restarted(own_cluster) -> None:
    cluster = own_cluster(5, "--cpus", "2")
    victim = cluster.peers()[4]
    workflow = submit(cluster, DIAMOND, index=0)
    wait_for(lambda: progress(cluster.client(0), workflow.id) > 40)
    cluster.kill(victim["id"])
    wait_for(lambda: is_gone(cluster.client(0), victim["id"]))
    cluster.restart(victim["id"])
    check(workflow, cluster)
    assert victim["id"] in {t["peer"] for t in workflow.tasks()}


def test_what_a_peer_ran_that_never_comes_back_runs_elsewhere(own_cluster) -> None:
    cluster = own_cluster(5, "--cpus", "2")
    home = cluster.peers()[0]
    tasks = {
        "long": {
            "foreach": 10,
            "command": "[ -e stop ] || sleep 6; echo {item} > o.{item}",
            "outputs": ["o.{item}"],
        }
    }
    workflow = submit(cluster, tasks, index=0)
    client = cluster.client(0)
    wait_for(lambda: client.workflow(workflow.id).view()["counts"].get("running") == 10)
    lost = [t for t in workflow.tasks() if t["peer"] != home["id"]]
    victim = lost[0]["peer"]
    mine = [t["id"] for t in lost if t["peer"] == victim]
    cluster.kill(victim)
    wait_for(lambda: _again(workflow, mine))
    assert workflow.wait() == "succeeded"
    assert victim not in {t["peer"] for t in workflow.tasks() if t["id"] in mine}


def _again(workflow, tasks: list[str]) -> bool:
    """All of them were lost, and placed a second time."""
    histories = [workflow.task(name)["history"] for name in tasks]
    return all(len(some) > 1 and some[0]["state"] == "lost" for some in histories)


def test_files_lost_with_their_peer_are_made_again(own_cluster) -> None:
    cluster = own_cluster(4)
    tasks = {
        "make": {
            "foreach": 8,
            "command": "head -c 200000 /dev/zero | tr '\\0' {item} > f.{item}",
            "outputs": ["f.{item}"],
        },
        "gate": {"command": ["sleep", "12"]},
        "use": {
            "command": "cat f.* | wc -c > size",
            "inputs": ["f.*"],
            "outputs": ["size"],
            "after": ["gate"],
        },
    }
    workflow = submit(cluster, tasks, index=0)
    home = cluster.peers()[0]
    wait_for(lambda: workflow.view()["counts"].get("succeeded", 0) == 8)
    gate = wait_for(lambda: workflow.task("gate")["peer"])
    holders = {t["peer"] for t in workflow.tasks() if t["id"].startswith("make")}
    victim = next(p for p in holders if p not in (home["id"], gate))
    cluster.kill(victim)
    assert workflow.wait() == "succeeded"
    assert workflow.read("size").strip() == b"1600000"


def test_sigterm_finishes_what_runs_and_leaves(own_cluster) -> None:
    cluster = own_cluster(3)
    workflow = submit(cluster, {"a": {"foreach": 3, "command": "sleep 3; echo done"}}, index=0)
    wait_for(lambda: workflow.view()["counts"].get("running") == 3)
    home = cluster.peers()[0]
    leaving = next(p for p in cluster.peers() if p["id"] != home["id"])
    os.kill(leaving["pid"], signal.SIGTERM)
    left = wait_for(
        lambda: [
            p
            for p in cluster.client(0).peers()
            if p["id"] == leaving["id"] and p["state"] == "left"
        ],
    )
    assert left
    assert workflow.wait() == "succeeded"
    assert all(t["attempts"] == 1 for t in workflow.tasks()), "nothing had to run twice"
    assert leaving["id"] in {t["peer"] for t in workflow.tasks()}


def test_no_orphan_outlives_a_killed_peer(own_cluster) -> None:
    cluster = own_cluster(2)
    mark = f"44.{os.getpid()}"
    workflow = submit(cluster, {"a": {"foreach": 2, "command": f"sleep {mark}; true"}}, index=0)
    wait_for(lambda: workflow.view()["counts"].get("running") == 2)
    wait_for(lambda: len(_sleeping(mark)) == 2)
    for peer in cluster.peers():
        cluster.kill(peer["id"])
    wait_for(lambda: not _sleeping(mark))


def _sleeping(mark: str) -> list[str]:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line == f"sleep {mark}"]


def test_ctrl_c_on_up_stops_everything(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
    environment["VALENCE_HOME"] = str(tmp_path / "home")
    process = subprocess.Popen(
        [*VALENCE, "up", "--peers", "3"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "3 peers up" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert [line for line in err.splitlines() if "tasks will run as root" not in line] == []
    text = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in text


def test_a_full_quota_refuses_and_leaves_nothing(own_cluster) -> None:
    cluster = own_cluster(2, "--disk", "1MiB")
    data = random.Random(1).randbytes(2_000_000)
    hash = "sha256:" + hashlib.sha256(data).hexdigest()
    status, _, body = raw(cluster, "PUT", f"/v1/blobs/{hash}", data, 0, cluster.token)
    assert status == 507, body
    assert not list(cluster.home.glob("peer-*/parts/*"))
    workflow = submit(
        cluster, {"a": {"command": "head -c 3000000 /dev/zero > big", "outputs": ["big"]}}, index=0
    )
    assert workflow.wait() == "failed"
    assert "quota" in workflow.task("a")["reason"]
    workflow = submit(cluster, {"a": {"command": "echo x > small", "outputs": ["small"]}}, index=0)
    assert workflow.wait() == "succeeded"
    assert workflow.read("small") == b"x\n"


@pytest.mark.parametrize("index", range(2))
def test_a_cluster_comes_back_with_all_it_knew(own_cluster, index: int) -> None:
    cluster = own_cluster(3)
    done = submit(cluster, {"a": {"command": "echo kept > k", "outputs": ["k"]}}, index=index)
    assert done.wait() == "succeeded"
    open_ = submit(cluster, {"b": {"foreach": 30, "command": ["sleep", "0.4"]}}, index=index)
    wait_for(lambda: open_.view()["counts"].get("succeeded", 0) > 2)
    assert cluster.cli("down").returncode == 0
    assert cluster.cli("up", "--peers", "3", "--detach").returncode == 0
    client = cluster.client(2)
    wait_for(lambda: len([p for p in client.peers() if p["state"] == "up"]) == 3)
    assert client.workflow(done.id).read("k") == b"kept\n"
    assert client.workflow(open_.id).wait() == "succeeded"


def test_down_stops_peers_that_were_started_again_by_hand(own_cluster) -> None:
    cluster = own_cluster(2)
    first = cluster.peers()[0]
    cluster.kill(first["id"])
    cluster.restart(first["id"])
    assert cluster.cli("down").returncode == 0
    assert cluster.cli("ls").returncode == 3
    assert "No local cluster" in cluster.cli("down").stdout


def test_a_workflow_outlives_the_peer_that_accepted_it(own_cluster) -> None:
    """Running and finished; the peer never comes back, nor does its disk."""
    cluster = own_cluster(4, "--cpus", "2")
    home = cluster.peers()[1]
    done = submit(cluster, {"a": {"command": "echo kept > k", "outputs": ["k"]}}, index=1)
    assert done.wait() == "succeeded"
    running = submit(cluster, DIAMOND, index=1)
    wait_for(lambda: progress(cluster.client(1), running.id) > 20)
    cluster.kill(home["id"])
    other = cluster.client(2)
    assert other.workflow(done.id).view()["state"] == "succeeded"
    again = other.workflow(running.id)
    assert again.wait() == "succeeded"
    assert again.read("total").decode().strip() == TOTAL
    view = again.view()
    assert view["home"] != home["id"]
    assert home["id"] not in view["keepers"]
    moves = [event for event in again.events() if event["type"] == "home"]
    assert moves
    assert moves[-1]["peer"] == view["home"]
    check(again, cluster)


def test_ls_says_whose_workflows_are_missing(own_cluster) -> None:
    cluster = own_cluster(3)
    one, two, three = cluster.peers()
    workflow = submit(cluster, {"a": {"command": ["sleep", "60"]}}, index=0)
    cluster.kill(one["id"])
    cluster.kill(two["id"])
    wait_for(lambda: two["id"][:8] in cluster.cli("ls").stderr)
    away = "2 of the 3 peers that keep its journal are away"
    wait_for(lambda: away in cluster.cli("status", workflow.id).stderr)
    why = cluster.cli("status", workflow.id)
    assert why.returncode == 1
    assert one["id"][:8] in why.stderr
    watch = [*VALENCE, "watch", workflow.id]
    watching = subprocess.Popen(
        watch, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    left = Client(three["http"], cluster.token)
    asked = urllib.request.Request(f"{three['http']}/v1/workflows/{workflow.id}")
    asked.add_header("Authorization", f"Bearer {cluster.token}")
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError) as told:
            urllib.request.urlopen(asked, timeout=5)
        with told.value:
            assert "It goes on when 1 of them is back" in json.load(told.value)["detail"]
    assert watching.poll() is None, "it goes on waiting"
    cluster.restart(two["id"])
    wait_for(lambda: _view(left, workflow.id))
    left.workflow(workflow.id).cancel()
    assert watching.wait(30) == 1
    assert b"Traceback" not in watching.communicate()[1]


def _view(client: Client, id: str) -> object:
    with contextlib.suppress(Problem):
        return client.workflow(id).view()
    return None


def test_who_leaves_hands_on_the_files_that_nobody_else_has(own_cluster) -> None:
    cluster = own_cluster(3)
    client = cluster.client()
    document = {
        "name": "kept",
        "tasks": {
            "make": {
                "command": "head -c 300000 /dev/zero > large; echo x > small; echo said",
                "outputs": ["large", "small"],
            }
        },
    }
    workflow = client.submit(document)
    assert workflow.wait() == "succeeded"
    last = cluster.peers()[2]
    for peer in cluster.peers()[:2]:  # one after the other, whoever has the files
        os.kill(peer["pid"], signal.SIGTERM)
        wait_for(lambda peer=peer: not Path(f"/proc/{peer['pid']}").exists())
    left = Client(last["http"], cluster.token).workflow(workflow.id)
    assert left.read("large") == bytes(300_000)
    assert left.read("small") == b"x\n"
    assert left.log("make") == b"said\n"
