"""A real cluster: workflows from submission to results, through any peer, and what goes wrong."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import VALENCE, wait_for
from valence.client import Problem
from valence.peer.routes import ROUTES

EXAMPLES = Path(__file__).parent.parent / "examples"
INSTANCES = Path(__file__).parent.parent.parent / "shared" / "workflows"


def raw(cluster, method, path, body=None, index=0, token=None, headers=None):
    """A request without the client's help: status, headers, body."""
    url = urlsplit(cluster.peers()[index]["http"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    every = dict(headers or {})
    if token is not None:
        every["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body, every)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def submit(cluster, tasks, index=0, **more):
    return cluster.client(index).submit({"name": "test", "tasks": tasks, **more})


# --------------------------------------------------------------------------- what works


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_gives_its_result(cluster, path, tmp_path) -> None:
    done = cluster.cli("submit", str(path), "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    id = re.search(r"\((w\w+)\)", done.stdout)[1]
    fetched = cluster.cli("get", id, str(tmp_path / "out"))
    assert fetched.returncode == 0, fetched.stderr
    expected = re.search(r"# expect: (\S+) (.*)", path.read_text())
    assert expected[2] in (tmp_path / "out" / expected[1]).read_text()


def test_claims_meet_tickets(cluster) -> None:
    """By `--strategy`, which also goes for what can't say one itself; more tasks than cores."""
    tasks = {"t": {"foreach": 30, "command": ["sleep", "0.2"]}}
    workflow = cluster.client(1).submit({"name": "t", "tasks": tasks}, strategy="tickets")
    assert workflow.wait() == "succeeded"
    assert workflow.view()["strategy"] == "tickets"
    placed = [workflow.task(f"t[{n}]")["history"][-1] for n in range(30)]
    assert {one["placement"]["strategy"] for one in placed} == {"tickets"}
    assert all(
        "matched with this peer's free capacity" in one["placement"]["why"] for one in placed
    )
    assert len({one["peer"] for one in placed}) > 3
    with pytest.raises(Problem, match="expected one of auto, probe, tickets"):
        cluster.client().submit({"name": "t", "tasks": tasks}, strategy="astrology")


@pytest.mark.skipif(not INSTANCES.is_dir(), reason="the WfCommons instances are not here")
@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.json")), ids=lambda p: p.stem)
def test_every_instance_replays_to_success(cluster, path) -> None:
    workflow = cluster.client().submit(path, time_scale=0.001, size_scale=0.000001)
    assert workflow.wait() == "succeeded"
    view = workflow.view()
    if view["tasks"] >= 20:
        assert view["peers"] >= 4


def test_any_peer_sees_watches_cancels_and_fetches(cluster) -> None:
    data = os.urandom(3_000_000)
    made = "import os,sys; open('big','wb').write(bytes(range(256))*12000); print('made')"
    workflow = submit(
        cluster,
        {
            "big": {"command": ["python3", "-c", made], "outputs": ["big"]},
            "small": {"command": ["cp", "big", "copy"], "inputs": ["big"], "outputs": ["copy"]},
            "slow": {"command": ["sleep", "60"], "after": ["small"]},
        },
        index=0,
    )
    expected = bytes(range(256)) * 12000
    for index in range(8):
        other = cluster.client(index)
        assert workflow.id in [w["id"] for w in other.workflows()]
        seen = other.workflow(workflow.id)
        for event in seen.events():
            if event.get("task") == "slow":
                break
        assert seen.read("copy") == expected
        assert seen.log("big") == b"made\n"
        assert seen.task("slow")["state"] == "running"
    cluster.client(5).workflow(workflow.id).cancel()
    assert cluster.client(3).workflow(workflow.id).wait() == "cancelled"
    hash = "sha256:" + hashlib.sha256(data).hexdigest()
    assert raw(cluster, "PUT", f"/v1/blobs/{hash}", data, 2, cluster.token)[0] == 201
    status, headers, body = raw(
        cluster, "GET", f"/v1/blobs/{hash}", None, 6, cluster.token, {"Range": "bytes=5-104"}
    )
    assert (status, body) == (206, data[5:105])
    assert headers["Content-Range"] == f"bytes 5-104/{len(data)}"
    other = cluster.client(7).submit(
        {
            "name": "blob",
            "inputs": {"x": {"blob": hash}},
            "tasks": {"a": {"command": ["cp", "x", "y"], "inputs": ["x"], "outputs": ["y"]}},
        }
    )
    assert other.wait() == "succeeded"
    assert cluster.client(1).workflow(other.id).read("y") == data


def test_values_flow_between_calls_small_and_large_json_and_not(cluster) -> None:
    workflow = submit(
        cluster,
        {
            "n": {"foreach": 5, "call": "operator:mul", "args": ["{item}", 10]},
            "sum": {"call": "builtins:sum", "args": [{"result": "n"}]},
            "set": {"call": "builtins:frozenset", "args": [{"result": "n"}]},
            "size": {"call": "builtins:len", "args": [{"result": "set"}]},
            "large": {"call": "operator:mul", "args": ["x", 500_000]},
            "length": {"call": "builtins:len", "args": [{"result": "large"}]},
        },
    )
    assert workflow.wait() == "succeeded"
    values = {name: workflow.task(name)["value"] for name in ("sum", "size", "length")}
    assert values == {"sum": 100, "size": 5, "length": 500_000}
    assert workflow.task("set")["value_encoding"] == "pickle"


def test_a_value_that_json_can_not_say_is_had_by_who_asks_and_run_by_nobody_else(
    own_cluster, tmp_path
) -> None:
    """`get` unpickled it: the owner of a workflow ran code where somebody fetched its results."""
    (tmp_path / "only_there.py").write_text("class Thing: pass\n")
    cluster = own_cluster(1, PYTHONPATH=str(tmp_path))
    workflow = submit(
        cluster,
        {
            "mean": {"call": "numpy:mean", "args": [[1, 2, 6]]},
            "set": {"call": "builtins:frozenset", "args": [[1, 2]]},
            "thing": {"call": "only_there:Thing"},
            "long": {"call": "operator:mul", "args": ["x", 100_000]},
            "file": {"command": "echo mine > value-0.pickle", "outputs": ["value-0.pickle"]},
        },
    )
    assert workflow.wait() == "succeeded"
    assert workflow.value("mean") == 3.0
    assert workflow.value("set") == frozenset({1, 2})
    assert workflow.value("long") == "x" * 100_000
    assert set(workflow.json_values()[1]) == {"mean", "set", "thing", "long"}
    del cluster.environment["PYTHONPATH"]  # who reads has no such module, and needs none
    done = cluster.cli("get", workflow.id, str(tmp_path / "got"))
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "got" / "values.json").read_text())
    assert values["long"] == "x" * 100_000
    kept = (tmp_path / "got" / values["thing"]["pickle"]).read_bytes()
    assert b"only_there" in kept
    assert kept == workflow.raw_value("thing")[1]
    assert (tmp_path / "got" / "value-0.pickle").read_bytes() == b"mine\n"


def test_inputs_come_as_text_as_made_up_bytes_and_from_a_url(cluster) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/there" else 404)
            self.end_headers()
            self.wfile.write(b"from a url")

        def log_message(self, *arguments) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        task = {
            "command": "cat t u > out; wc -c < s >> out",
            "inputs": ["t", "u", "s"],
            "outputs": ["out"],
        }
        inputs = {"t": {"text": "text "}, "u": {"url": f"{base}/there"}, "s": {"size": "10kB"}}
        workflow = submit(cluster, {"a": task}, inputs=inputs)
        assert workflow.wait() == "succeeded"
        assert workflow.read("out") == b"text from a url10000\n"
        inputs["u"] = {"url": f"{base}/missing"}
        workflow = submit(cluster, {"a": task, "b": {"command": ["true"]}}, inputs=inputs)
        assert workflow.wait() == "failed"
        assert "404" in workflow.task("a")["reason"]
        assert workflow.task("b")["state"] == "succeeded"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_input_may_be_uploaded_after_the_submission(cluster) -> None:
    data = b"later"
    hash = hashlib.sha256(data).hexdigest()
    workflow = submit(
        cluster,
        {"a": {"command": ["cp", "x", "y"], "inputs": ["x"], "outputs": ["y"]}},
        inputs={"x": {"blob": f"sha256:{hash}"}},
    )
    waiting = wait_for(lambda: "not been uploaded" in (workflow.task("a")["waiting_for"] or ""))
    assert waiting
    assert raw(cluster, "PUT", f"/v1/blobs/sha256:{hash}", data, 4, cluster.token)[0] == 201
    assert workflow.wait() == "succeeded"


def test_events_go_on_where_they_broke_off(cluster) -> None:
    workflow = submit(cluster, {"a": {"foreach": 6, "command": ["true"]}})
    everything = list(workflow.events())
    ids = [event["id"] for event in everything]
    assert len(set(ids)) == len(ids)
    assert everything[0]["type"] == "workflow"
    assert everything[-1]["state"] == "succeeded"
    done = [e["task"] for e in everything if e.get("state") == "succeeded" and e["type"] == "task"]
    assert sorted(done) == [f"a[{n}]" for n in range(6)]
    for index, cut in enumerate(ids[:-1]):
        rest = list(cluster.client(index % 8).workflow(workflow.id).events(after=cut))
        assert [e["id"] for e in rest] == ids[index + 1 :]


def test_a_repeated_submission_with_a_key_is_one(cluster) -> None:
    document = {"name": "once", "tasks": {"a": {"command": ["true"]}}}
    first = cluster.client(0).submit(document, key="key-1")
    assert cluster.client(0).submit(document, key="key-1").id == first.id
    assert cluster.client(5).submit(document, key="key-1").id == first.id
    assert cluster.client(5).submit(document, key="key-2").id != first.id
    with pytest.raises(Problem, match="another document"):
        cluster.client(3).submit({**document, "name": "other"}, key="key-1")


def test_lists_are_paged(cluster) -> None:
    workflow = submit(cluster, {"a": {"foreach": 25, "command": ["true"]}})
    workflow.wait()
    names, after = [], ""
    while True:
        query = f"?limit=10&after={after}" if after else "?limit=10"
        path = f"/v1/workflows/{workflow.id}/tasks{query}"
        page = json.loads(raw(cluster, "GET", path, None, 3, cluster.token)[2])
        names += [t["id"] for t in page["tasks"]]
        after = page["next"]
        if not after:
            break
        after = after.replace("[", "%5B").replace("]", "%5D")
    assert names == [f"a[{n}]" for n in range(25)]
    seen, before = [], ""
    for _ in range(100):
        path = f"/v1/workflows?limit=3&before={before}"
        page = json.loads(raw(cluster, "GET", path, None, 1, cluster.token)[2])
        seen += [w["id"] for w in page["workflows"]]
        before = page["next"]
        if not before:
            break
    assert len(seen) == len(set(seen))
    assert set(seen) == {w["id"] for w in cluster.client(2).workflows(1000)}


# --------------------------------------------------------------------------- what goes wrong


def test_a_failing_task_is_retried_then_fails_and_the_others_finish(cluster) -> None:
    workflow = submit(
        cluster,
        {
            "bad": {"command": "echo told; exit 3", "retries": 2},
            "behind": {"command": ["true"], "after": ["bad"]},
            "apart": {"command": ["sleep", "1"]},
            "after": {"command": ["true"], "after": ["apart"]},
        },
    )
    assert workflow.wait() == "failed"
    bad = workflow.task("bad")
    assert (bad["state"], bad["exit_code"], bad["attempts"]) == ("failed", 3, 3)
    assert len({a["peer"] for a in bad["history"]}) == 3, "a retry goes to another peer"
    assert workflow.log("bad") == b"told\n"
    assert workflow.task("behind")["state"] == "skipped"
    assert workflow.task("after")["state"] == "succeeded"
    done = cluster.cli("status", workflow.id)
    assert "exit code 3" in done.stdout
    assert f"valence logs {workflow.id} 'bad'" in done.stdout


TRICKS = {
    "missing": ("true", "output 'out' is missing"),
    "a link out": ("ln -s /etc/hostname out", "leads out of the task's directory"),
    "a link through a directory": ("ln -s /etc d; ln -s d/hostname out", "leads out"),
    "a directory": ("mkdir out", "is a directory"),
    "a pipe": ("mkfifo out", "is not a plain file"),
    "a device": ("ln -s /dev/null out", "leads out"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_an_output_that_is_no_file_of_the_task_fails_it(cluster, name) -> None:
    command, reason = TRICKS[name]
    workflow = submit(cluster, {"a": {"command": command, "outputs": ["out"]}})
    assert workflow.wait() == "failed"
    assert reason in workflow.task("a")["reason"]


def test_links_inside_and_odd_names_are_fine(cluster) -> None:
    command = (
        "mkdir -p d; echo x > 'd/a b;$(c)'; ln 'd/a b;$(c)' hard; ln -s hard soft; echo y >> x"
    )
    workflow = submit(
        cluster,
        {
            "a": {
                "command": command,
                "inputs": ["x"],
                "outputs": ["d/a b;$(c)", "hard", "soft"],
            }
        },
        inputs={"x": {"text": "mine"}},
    )
    assert workflow.wait() == "succeeded", workflow.view()
    assert [workflow.read(n) for n in ("d/a b;$(c)", "hard", "soft")] == [b"x\n"] * 3
    assert workflow.read("x") == b"mine", "a task that writes to its input has a copy"


def test_commands_that_can_not_start_time_out_or_use_too_much(cluster) -> None:
    hog = "x = bytearray(400_000_000); import time; time.sleep(30)"
    workflow = submit(
        cluster,
        {
            "no": {"command": ["no-such-program"]},
            "slow": {"command": "trap '' TERM; sleep 60 & sleep 60", "timeout": "1s"},
            "hog": {"command": ["python3", "-c", hog], "needs": {"memory": "100MiB"}},
            "killed": {"command": "kill -9 $$"},
            "loud": {"command": ["sh", "-c", "yes | head -c 5000000"]},
            "call": {"call": "time:sleep", "args": [60], "timeout": "1s"},
            "crash": {"call": "os:_exit", "args": [7]},
            "raise": {"call": "operator:truediv", "args": [1, 0]},
            "lost": {"call": "no_such_module:f"},
            "fine": {"call": "operator:add", "args": [1, 2]},
        },
    )
    assert workflow.wait() == "failed"
    reasons = {t["id"]: t["reason"] for t in workflow.tasks()}
    assert "could not be started: no-such-program" in reasons["no"]
    assert "timeout of 1.0 s" in reasons["slow"]
    assert "used" in reasons["hog"]
    assert "more than the 100 MiB it asked for" in reasons["hog"]
    assert reasons["killed"] == "killed by SIGKILL (signal 9)"
    assert "timeout" in reasons["call"]
    assert "worker process died" in reasons["crash"]
    assert "ZeroDivisionError" in reasons["raise"]
    assert b"Traceback" in workflow.log("raise")
    assert "no_such_module" in reasons["lost"]
    assert workflow.task("fine")["value"] == 3
    assert workflow.task("loud")["state"] == "succeeded"
    assert 1_000_000 <= len(workflow.log("loud")) <= 1_100_000, "output is bounded"


def test_what_a_task_leaves_running_is_ended_with_it(cluster) -> None:
    mark = f"31.{os.getpid()}"
    command = f"setsid sleep {mark} & nohup sleep {mark} & (sleep {mark} &) ; sleep 0.2; exit 0"
    workflow = submit(cluster, {"a": {"command": command}})
    assert workflow.wait() == "succeeded"
    wait_for(lambda: not [p for p in _running() if mark in p])


def _running() -> list[str]:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("sleep")]


def test_cancelling_kills_what_runs(cluster) -> None:
    mark = f"32.{os.getpid()}"
    workflow = submit(cluster, {"a": {"foreach": 3, "command": f"sleep {mark}; true"}})
    wait_for(lambda: len([p for p in _running() if mark in p]) == 3)
    done = cluster.cli("cancel", workflow.id)
    assert done.returncode == 0
    assert workflow.wait() == "cancelled"
    wait_for(lambda: not [p for p in _running() if mark in p])
    with_error = cluster.cli("watch", workflow.id)
    assert with_error.returncode == 1


def test_unsatisfiable_needs_wait_and_say_which(cluster) -> None:
    workflow = submit(cluster, {"a": {"command": ["true"], "needs": {"gpus": 2}}})
    waiting = wait_for(
        lambda: (
            (workflow.task("a")["waiting_for"] or "").startswith("needs") and workflow.task("a")
        ),
    )
    assert waiting["waiting_for"] == "needs 2 GPUs, but none of the 8 peers has that"
    assert "none of the 8 peers" in cluster.cli("why", workflow.id, "a").stdout
    workflow.cancel()


def test_why_shows_who_was_asked_and_who_was_chosen(cluster) -> None:
    workflow = submit(cluster, {"a": {"foreach": 8, "command": ["sleep", "0.2"]}})
    workflow.wait()
    (attempt,) = workflow.task("a[0]")["history"]
    placement = attempt["placement"]
    assert placement["strategy"] == "probe"
    assert placement["matching"] == placement["known"] == 8
    assert attempt["peer"] in [a["peer"] for a in placement["asked"]]
    assert placement["why"]
    assert "offered" in cluster.cli("why", workflow.id, "a[0]").stdout
    alone = submit(cluster, {"a": {"command": ["true"]}})
    alone.wait()
    assert "the peer it was submitted to" in cluster.cli("why", alone.id, "a").stdout


# --------------------------------------------------------------------------- the door


def test_every_route_without_a_token_is_closed_but_health(cluster) -> None:
    for route in ROUTES:
        path = route.path.replace("{id}", "w1").replace("{task}", "t").replace("{name}", "n")
        path = path.replace("{hash}", "sha256:" + "0" * 64)
        for token in (None, "wrong", cluster.token[:-1]):
            status, headers, body = raw(cluster, route.method, path, None, 0, token)
            if route.path == "/healthz":
                assert status == 200
            else:
                assert status == 401, route
                assert headers.get_content_type() == "application/problem+json"
                assert headers["WWW-Authenticate"] == "Bearer"
                assert json.loads(body)["status"] == 401


REFUSED = [
    ("GET", "/nowhere", 404),
    ("DELETE", "/v1/workflows", 405),
    ("GET", "/v1/workflows/w123", 404),
    ("GET", "/v1/workflows/%2e%2e", 404),
    ("GET", "/v1/workflows/w123/tasks/x", 404),
    ("POST", "/v1/workflows/w123/cancel", 404),
    ("GET", "/v1/workflows?limit=x", 400),
    ("GET", "/v1/workflows?limit=0", 400),
    ("GET", "/v1/workflows?before=x", 400),
    ("GET", "/v1/blobs/xyz", 400),
    ("GET", "/v1/blobs/sha256:" + "0" * 64, 404),
    ("PUT", "/v1/blobs/md5:00", 400),
]


@pytest.mark.parametrize(("method", "path", "expected"), REFUSED)
def test_a_bad_request_is_a_problem_document(cluster, method, path, expected) -> None:
    status, headers, body = raw(cluster, method, path, None, 0, cluster.token)
    assert status == expected
    assert headers.get_content_type() == "application/problem+json"
    problem = json.loads(body)
    assert problem["status"] == expected
    assert problem["detail"]


def test_a_malformed_document_names_every_place(cluster) -> None:
    text = "name: x\ntasks:\n  a: {comand: [x]}\n  b: {command: [x], inputs: [y]}\n"
    headers = {"Content-Type": "application/yaml"}
    status, _, body = raw(cluster, "POST", "/v1/workflows", text, 0, cluster.token, headers)
    problem = json.loads(body)
    assert status == 422
    places = {(e["pointer"], e["line"]) for e in problem["errors"]}
    assert ("/tasks/a/comand", 3) in places
    assert ("/tasks/b/inputs/0", 4) in places


def test_uploads_are_whole_and_right_or_not_there(cluster) -> None:
    data = b"x" * 100_000
    hash = "sha256:" + hashlib.sha256(data).hexdigest()
    status, _, body = raw(cluster, "PUT", f"/v1/blobs/{hash}", data[:-1], 0, cluster.token)
    assert status == 422
    assert "hash" in json.loads(body)["detail"]
    assert raw(cluster, "GET", f"/v1/blobs/{hash}", None, 0, cluster.token)[0] == 404
    # a client that goes away in the middle
    url = urlsplit(cluster.peers()[0]["http"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.putrequest("PUT", f"/v1/blobs/{hash}")
    connection.putheader("Authorization", f"Bearer {cluster.token}")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders()
    connection.send(data[:50_000])
    connection.close()
    assert raw(cluster, "GET", f"/v1/blobs/{hash}", None, 0, cluster.token)[0] == 404
    wait_for(lambda: not list((cluster.home / "peer-000" / "parts").iterdir()))
    too_large = "x" * (16 * 2**20 + 10)
    headers = {"Content-Type": "application/yaml"}
    status, _, body = raw(cluster, "POST", "/v1/workflows", too_large, 0, cluster.token, headers)
    assert status == 413


def test_openapi_and_metrics_describe_what_is_there(cluster) -> None:
    document = json.loads(raw(cluster, "GET", "/openapi.json", None, 0, cluster.token)[2])
    assert document["openapi"] == "3.1.0"
    assert {r.path for r in ROUTES} == set(document["paths"])
    text = json.dumps(document)
    for ref in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert ref in document["components"]["schemas"]
    body = raw(cluster, "GET", "/metrics", None, 0, cluster.token)[2].decode()
    assert re.search(r'valence_members{kind="alive"} 8', body)
    assert "valence_disk_total" in body


def test_garbage_on_the_wire_is_counted_and_harms_nobody(cluster) -> None:
    import random
    import socket

    def dropped() -> float:
        body = raw(cluster, "GET", "/metrics", None, 0, cluster.token)[2].decode()
        return sum(float(n) for n in re.findall(r'kind="dropped_\w+"} (\S+)', body))

    host, port = cluster.peers()[0]["address"].split(":")
    rng = random.Random(1)
    before = dropped()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:

        def seen() -> bool:
            """A busy peer's kernel drops what its buffer has no room for: go on until 1,000 came."""
            for size in range(200):
                udp.sendto(rng.randbytes(size * 7 % 1400), (host, int(port)))
            return dropped() - before >= 1000

        wait_for(seen)
    with socket.create_connection((host, int(port)), timeout=10) as tcp:
        tcp.sendall(b"GET / HTTP/1.0\r\n\r\n")
        tcp.settimeout(10)
        try:
            assert tcp.recv(100)[:1] in (b"", b"\x15"), "an alert or nothing"
        except ConnectionResetError:
            pass
    assert submit(cluster, {"a": {"command": ["true"]}}).wait() == "succeeded"


def test_secrets_on_disk_are_for_their_owner_only(cluster) -> None:
    for path in [cluster.home / "key", cluster.home / "token", *cluster.home.glob("peer-*/*.pem")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for path in [cluster.home, *cluster.home.glob("peer-*")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in cluster.home.glob("peer-*/peer.log"):
        assert cluster.token not in path.read_text()


# --------------------------------------------------------------------------- the command line


def test_the_command_lines_manners(cluster, tmp_path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\ntasks:\n  a: {comand: [x]}\n")
    done = cluster.cli("submit", str(bad))
    assert done.returncode == 2
    assert f"{bad}:3: /tasks/a/comand: unknown key 'comand'; did you mean 'command'?" in done.stderr
    good = tmp_path / "good.yaml"
    good.write_text(
        "name: x\ninputs: {y: {path: y.txt}}\ntasks: {a: {command: [cat, y], inputs: [y]}}\n"
    )
    done = cluster.cli("submit", str(good))
    assert done.returncode == 2
    assert "y.txt: file not found" in done.stderr
    (tmp_path / "y.txt").write_text("from a file")
    done = cluster.cli("submit", str(good), "--watch", "--json")
    assert done.returncode == 0
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["final"]
    assert cluster.cli("submit", str(tmp_path / "none.yaml")).returncode == 2
    assert cluster.cli("status", "nosuch").returncode == 1
    peers = json.loads(cluster.cli("peers", "--json").stdout)
    assert {"id", "address", "http", "site", "capacity", "free", "state", "pid"} <= set(peers[0])
    assert all(p["state"] == "up" and p["pid"] for p in peers)
    listed = json.loads(cluster.cli("ls", "--json", "--limit", "1").stdout)
    assert cluster.cli("token").stdout.strip() == cluster.token
    shown = json.loads(cluster.cli("status", listed[0]["id"][:10], "--json").stdout)
    assert shown["id"] == listed[0]["id"]
    many = submit(cluster, {"count": {"foreach": ["aa"], "command": ["true"]}})
    assert "count[aa]" in cluster.cli("why", many.id, "count").stderr
    for done in (cluster.cli("status", "nosuch"), cluster.cli("logs", shown["id"], "nosuch")):
        assert "Traceback" not in done.stderr
    alone = {**cluster.environment, "VALENCE_HOME": str(tmp_path / "empty")}
    done = subprocess.run([*VALENCE, "ls"], env=alone, capture_output=True, text=True, check=False)
    assert (done.returncode, "valence up" in done.stderr) == (3, True)
    done = subprocess.run(
        [*VALENCE, "peer"], env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "VALENCE_CLUSTER_KEY" in done.stderr


def test_ctrl_c_while_watching_is_clean(cluster, tmp_path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text("name: slow\ntasks: {a: {command: [sleep, '60']}}\n")
    process = subprocess.Popen(
        [*VALENCE, "submit", str(path), "--watch"],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a runner in the background may have SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    line = process.stdout.readline()
    id = re.search(r"\((w\w+)\)", line)[1]
    wait_for(lambda: cluster.client().workflow(id).view()["counts"].get("running"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"valence watch {id}" in err
    cluster.client().workflow(id).cancel()


def test_a_progress_bar_on_a_terminal(cluster, tmp_path) -> None:
    import pty

    path = tmp_path / "quick.yaml"
    path.write_text("name: quick\ntasks: {a: {foreach: 4, command: [sleep, '0.3']}}\n")
    main, side = pty.openpty()
    process = subprocess.Popen(
        [*VALENCE, "submit", str(path), "--watch"],
        env={**cluster.environment, "TERM": "xterm", "COLUMNS": "80"},
        stdout=side,
        stderr=side,
    )
    os.close(side)
    text = b""
    while True:
        try:
            data = os.read(main, 4096)
        except OSError:
            break
        if not data:
            break
        text += data
    os.close(main)
    assert process.wait(20) == 0
    assert "█" in text.decode()
    assert b"4/4" in text
    assert b"\033[32m" not in text, "NO_COLOR is honoured"


def test_documents_that_could_poison_a_home_are_refused(cluster) -> None:
    long = {f"v{n}": ["x" * 80] for n in range(8)}
    for change in (
        {"deadline": "0001-01-01"},
        {"tasks": {"a": {"call": "operator:neg", "args": [10**30]}}},
        {"tasks": {"a": {"command": ["true"], "foreach": long}}},
    ):
        document = {"name": "x", "tasks": {"a": {"command": ["true"]}}, **change}
        text = json.dumps(document)
        headers = {"Content-Type": "application/json"}
        status, _, body = raw(cluster, "POST", "/v1/workflows", text, 0, cluster.token, headers)
        assert status == 422, body


def test_requests_that_are_no_http_people_write(cluster) -> None:
    document = json.dumps({"name": "x", "tasks": {"a": {"command": ["true"]}}})
    json_ = {"Content-Type": "application/json"}
    for headers, expected in (
        ({**json_, "Content-Encoding": "gzip"}, 400),
        ({**json_, "Idempotency-Key": "x" * 300}, 400),
        ({**json_, "Idempotency-Key": b"\xff"}, 400),
        ({"Content-Type": "image/png"}, 415),
    ):
        status, _, body = raw(cluster, "POST", "/v1/workflows", document, 0, cluster.token, headers)
        assert status == expected, (headers, body)


def test_an_output_left_open_by_a_worker_can_not_change_its_blob(cluster) -> None:
    workflow = submit(
        cluster,
        {
            "a": {
                "call": "builtins:exec",
                "args": [
                    "import sys; sys.kept = open('f', 'w'); sys.kept.write('a'); sys.kept.flush()",
                    {},
                ],
                "outputs": ["f"],
            },
            "b": {
                "call": "builtins:exec",
                "args": [
                    "import sys; k = getattr(sys, 'kept', None); k and (k.write('LATER'), k.flush())",
                    {},
                ],
                "after": ["a"],
                "foreach": 20,
            },
        },
    )
    assert workflow.wait() == "succeeded"
    assert workflow.read("f") == b"a"


def test_a_long_log_keeps_its_beginning_and_its_end(cluster) -> None:
    loud = {"command": "echo begin; seq 1 400000; echo the reason >&2; exit 3"}
    call = {
        "call": "builtins:exec",
        "args": ["print('begin'); print('x' * 3_000_000); raise ValueError('why')", {}],
    }
    workflow = submit(cluster, {"loud": loud, "call": call})
    assert workflow.wait() == "failed"
    for name, end in (("loud", b"the reason\n"), ("call", b"ValueError: why\n")):
        text = workflow.log(name)
        assert text.startswith(b"begin\n")
        assert text.endswith(end)
        assert b"bytes left out" in text


def test_get_fails_where_a_result_is_missing_and_overwrites_nothing(cluster, tmp_path) -> None:
    workflow = submit(
        cluster,
        {
            "a": {"command": "echo mine > values.json", "outputs": ["values.json"]},
            "b": {"command": "exit 1", "outputs": ["b"]},
            "c": {"call": "operator:add", "args": [1, 1]},
        },
    )
    workflow.wait()
    done = cluster.cli("get", workflow.id, str(tmp_path))
    assert done.returncode == 1
    assert "b is not there" in done.stderr
    assert (tmp_path / "values.json").read_text() == "mine\n"
    assert json.loads((tmp_path / "valence-values.json").read_text()) == {"c": 2}


def test_status_says_what_waits(cluster) -> None:
    workflow = submit(cluster, {"a": {"command": ["true"], "needs": {"memory": "10TiB"}}})
    wait_for(lambda: "none of the 8 peers" in cluster.cli("status", workflow.id).stdout)
    workflow.cancel()


def test_clusters_that_start_at_the_same_moment_take_no_port_from_each_other(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
    homes = [{**environment, "VALENCE_HOME": str(tmp_path / name)} for name in "abcd"]
    up = [sys.executable, "-m", "valence", "up", "--peers", "2", "--detach"]
    started = [subprocess.Popen(up, env=home, stdout=subprocess.PIPE) for home in homes]
    told = [process.communicate(timeout=60)[0] for process in started]
    for home in homes:
        subprocess.run([*up[:3], "down"], env=home, check=True, stdout=subprocess.DEVNULL)
    assert [process.returncode for process in started] == [0] * 4, told
    assert len({text.split()[-1] for text in (t.splitlines()[0] for t in told)}) == 4, told


def test_a_peer_that_can_not_start_says_what_to_do(tmp_path) -> None:
    keys = {"VALENCE_CLUSTER_KEY": "k" * 20, "VALENCE_TOKEN": "t" * 20}
    plain = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")} | keys
    (tmp_path / "d" / "peer.db").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for data, number, told in (
            (tmp_path / "c", port, f"port {port} is already in use (choose another with `--port`)"),
            (tmp_path / "d", "0", f"can't use the database in {tmp_path / 'd'}: "),
        ):
            command = [sys.executable, "-m", "valence", "peer", "--quiet", "--root-tasks"]
            command += ["--port", number, "--http-port", "0", "--data", str(data)]
            done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1
            assert done.stderr.startswith(f"valence peer: {told}"), done.stderr
