"""The task queue and its sites, live: pulled in bulk, nothing lost, nothing twice."""

from __future__ import annotations

import json
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos import losses
from chaos.processes import committed
from chaos.queues import Queue, work
from tests.conftest import Cluster, wait_for
from valence.client import Client, Problem, Unreachable


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    made = Queue(tmp_path / "queue")
    yield made
    made.close()


def joined(queue: Queue, cluster: Cluster, pilots: int) -> None:
    queue.start(cluster.token)
    wait_for(lambda: _pilots(queue) == pilots)


def _pilots(queue: Queue) -> int:
    try:
        return len(queue.client().peers())
    except (OSError, Problem, Unreachable):
        return 0


def test_a_workflow_through_the_queue_files_and_all(
    own_cluster: Callable[..., Cluster], queue: Queue
) -> None:
    cluster = own_cluster(3, VALENCE_QUEUE=queue.url)
    joined(queue, cluster, 3)
    client = queue.client()
    big = "head -c 300000 /dev/zero > big; echo done"
    document = {
        "name": "through the queue",
        "inputs": {"words": {"text": "a b c"}},
        "tasks": {
            "count": {"command": "wc -w < words > n", "inputs": ["words"], "outputs": ["n"]},
            "make": {"command": big, "outputs": ["big"]},
            "size": {"command": "wc -c < big > size", "inputs": ["big", "n"], "outputs": ["size"]},
            "keep": {"command": "cp big kept", "inputs": ["big"], "outputs": ["kept"]},
            "seven": {"call": "operator:add", "args": [3, 4]},
        },
    }
    workflow = client.submit(document)
    assert workflow.id.startswith("q")
    assert workflow.wait() == "succeeded", workflow.view()
    assert workflow.read("size") == b"300000\n"
    assert workflow.read("kept") == bytes(300_000), "from the pilot that made it"
    assert workflow.read("big") == bytes(300_000), "an intermediate one"
    assert workflow.values()["seven"] == 7
    assert workflow.log("make") == b"done\n"
    made_by = workflow.task("make")["history"][-1]["peer"]
    assert made_by in {peer["id"] for peer in cluster.peers()}, "the pilot, not its site"
    shown = queue.shown()
    assert shown["sites"][0]["pilots"] == 3
    assert shown["sites"][0]["out"] == 0
    failing = client.submit({"name": "f", "tasks": {"x": {"command": "exit 3"}}})
    assert failing.wait() == "failed"
    assert failing.task("x")["exit_code"] == 3
    sleeping = client.submit({"name": "s", "tasks": {"x": {"command": "sleep 60"}}})
    wait_for(lambda: sleeping.task("x")["state"] == "running")
    assert sleeping.task("x")["history"][-1]["peer"].startswith("site ")
    wait_for(lambda: ": it was sent to peer " in sleeping.task("x")["waiting_for"])
    sleeping.cancel()
    assert sleeping.wait() == "cancelled"
    wait_for(lambda: all(p["running"] == 0 for p in cluster.client().peers()))


def test_the_master_and_the_queue_killed_in_the_middle(
    own_cluster: Callable[..., Cluster], queue: Queue
) -> None:
    cluster = own_cluster(4, "--cpus", "2", VALENCE_QUEUE=queue.url)
    joined(queue, cluster, 4)
    count = 150
    workflow = queue.client().submit(work(count, 0.1))
    wait_for(lambda: workflow.view()["counts"].get("succeeded", 0) > 20)
    cluster.kill(min(peer["id"] for peer in cluster.peers()))
    wait_for(lambda: workflow.view()["counts"].get("succeeded", 0) > 60)
    queue.kill()
    lowest = min(peer["id"] for peer in cluster.peers())
    left = next(i for i, peer in enumerate(cluster.peers()) if peer["id"] != lowest)
    direct = cluster.client(left)
    assert direct.submit(work(10, 0.01)).wait() == "succeeded", "without the queue"
    queue.start(cluster.token)
    wait_for(lambda: _pilots(queue) == 3)
    again = queue.client().workflow(workflow.id)
    assert again.wait() == "succeeded"
    assert again.read("total").split() == [str(sum(range(count))).encode()]
    each = committed(queue.data / "peer.db", workflow.id)
    assert len(each) == count + 1
    assert set(each.values()) == {1}


@pytest.mark.parametrize("name", ["pinned", "spread"])
def test_two_clusters_on_one_queue_exchange_files(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes files, one merges them all, the queue is killed in between: nothing runs twice."""
    monkeypatch.setattr(losses, "PARTS", 20)
    monkeypatch.setattr(losses, "SITE_PEERS", 2)
    with tempfile.TemporaryDirectory() as home:
        state, total, _, began = losses._merge(Path(home), name)
    assert state == "succeeded"
    assert total == 20 * losses.PART_BYTES
    assert set(began.values()) == {1}
    assert len(began) == 20


def test_who_may_ask_and_what_is_no_question(queue: Queue, cluster: Cluster) -> None:
    queue.start(cluster.token, VALENCE_LOCAL_URLS="yes")
    wait_for(lambda: _healthy(queue))

    def post(body: bytes, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{queue.url}/v1/queue", body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            assert json.load(error)["detail"]
            return int(error.code)

    made = cluster.cli("token", "--owner", "eve", "--scope", "submit", "--lasting", "1h")
    eve = made.stdout.strip()
    assert post(b"", "wrong-token-of-some-length") == 401
    assert post(b"", eve) == 403, "tasks are for the cluster's own"
    assert post(b"", cluster.token) == 400
    assert post(b"\xc1" * 100, cluster.token) == 400
    gang = {"name": "g", "tasks": {"a": {"command": "true", "peers": 2}}}
    with pytest.raises(Problem, match="several peers"):
        queue.client().submit(gang)
    url = f"{queue.url}/v1/blobs/../workflows/{'q' * 17}/files/o"
    reads = {"name": "r", "tasks": {"a": {"command": "cat o", "inputs": ["o"]}}}
    spying = Client(queue.url, eve).submit({**reads, "inputs": {"o": {"url": url}}})
    assert spying.wait() == "failed"
    assert "401" in spying.view()["reason"], "nobody's token is shown there"
    ours = {"o": {"url": "queue:/v1/blobs/sha256:" + "0" * 64}}
    headers = {"Authorization": f"Bearer {eve}", "Content-Type": "application/json"}
    text = json.dumps({**reads, "inputs": ours}).encode()  # no client would send it
    request = urllib.request.Request(f"{queue.url}/v1/workflows", text, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(request, timeout=10)
    with told.value:
        assert "write http" in json.load(told.value)["detail"]
    lonely = queue.client().submit({"name": "l", "tasks": {"a": {"command": "true"}}})
    assert "no peer of any site has asked" in lonely.task("a")["waiting_for"]


def _healthy(queue: Queue) -> bool:
    try:
        with urllib.request.urlopen(f"{queue.url}/healthz", timeout=5):
            return True
    except OSError:
        return False


def test_help_and_bad_settings_of_the_queue(tmp_path: Path) -> None:
    import sys

    def run(*words: str, **variables: str) -> Any:
        environment = {"PATH": "/usr/bin:/bin", **variables}
        command = [sys.executable, "-m", "master", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    assert "--http-port" in run("--help").stdout
    assert "--join" not in run("--help").stdout
    found = run("--data", str(tmp_path / "q"))
    assert found.returncode == 2
    assert "token" in found.stderr
    assert "Traceback" not in found.stderr
