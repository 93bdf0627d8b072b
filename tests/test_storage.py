"""Storage elements: inputs from, and results to, files, HTTP and S3, all of them real."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

import valence.peer.storage
from valence.peer.blobs import DiskBlobs
from valence.peer.settings import Settings
from valence.peer.storage import ExternalStorage
from valence.protocols.ports import StorageError
from valence.workflow.document import parse
from valence.workflow.problems import DocumentError

KEY, SECRET = "AKTEST0000", "SECRETSECRET0000"
DATA = random.Random(3).randbytes(20 << 20)


class S3:
    """SeaweedFS on loopback."""

    def __init__(self, directory: Path) -> None:
        weed = shutil.which("weed", path=sysconfig.get_path("scripts"))
        assert weed, "the dev extra installs it"
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(10)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            self.ports = [one.getsockname()[1] for one in sockets]
        names = ("master", "volume", "filer", "s3", "admin")
        kinds = [f"{name}.port{grpc}" for name in names for grpc in ("", ".grpc")]
        flags = [f"-{kind}={port}" for kind, port in zip(kinds, self.ports, strict=True)]
        off = ("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
               "-webdav=false", "-admin.ui=false", "-master.telemetry=false")  # fmt: skip
        command = [weed, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                   "-bucket=lab", *flags, *off]  # fmt: skip
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "HOME": str(directory),
            "PATH": os.environ["PATH"],
        }
        with (directory / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=log, stderr=log
            )
        self.url = f"http://127.0.0.1:{self.ports[6]}"
        self.store = S3Store(
            "lab", endpoint=self.url, access_key_id=KEY, secret_access_key=SECRET,
            region="us-east-1", client_options={"allow_http": True}, retry_config={"max_retries": 0},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                obstore.put(self.store, "ready", b"x")
                return
            except Exception:
                assert self._process.poll() is None, (directory / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for port in self.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    found = S3(tmp_path_factory.mktemp("s3"))
    yield found
    found.close()


class Web:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.fails = 0
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path in web.moved:
                    self.send_response(302)
                    self.send_header("Location", web.moved[self.path])
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self._answer(web.files.get(self.path))

            def do_PUT(self) -> None:
                web.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(b"")

            def _answer(self, body: bytes | None) -> None:
                web.fails -= 1
                status = 503 if web.fails >= 0 else 404 if body is None else 200
                self.send_response(status)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    found = Web()
    yield found
    found.close()


def storage(path: Path, **settings: Any) -> tuple[ExternalStorage, DiskBlobs]:
    blobs = DiskBlobs(path / "blobs-of-it", 100 << 20, 64 << 20)
    return ExternalStorage(Settings(**settings), blobs), blobs


async def test_s3_there_and_back(tmp_path: Path, s3: S3) -> None:
    place, blobs = storage(tmp_path, s3_endpoint=s3.url, s3_access_key=KEY, s3_secret_key=SECRET)
    obstore.put(s3.store, "in/large", DATA)
    hash, size = await place.bring("s3://lab/in/large", "wf")
    assert size == len(DATA)
    assert await blobs.read(hash, 0, size) == DATA
    await place.deliver(hash, "s3://lab/out/a%20b", "ada")
    assert bytes(obstore.get(s3.store, "out/a b").bytes()) == DATA
    with pytest.raises(StorageError, match="no such file") as missing:
        await place.bring("s3://lab/nothing", "wf")
    assert not missing.value.passing


async def test_s3_wrong_keys_and_none_are_said_and_nothing_is_left(tmp_path: Path, s3: S3) -> None:
    wrong, blobs = storage(tmp_path, s3_endpoint=s3.url, s3_access_key=KEY, s3_secret_key="x" * 16)
    with pytest.raises(StorageError, match="access denied"):
        await wrong.bring("s3://lab/ready", "wf")
    none, _ = storage(tmp_path / "none", s3_endpoint=s3.url)
    with pytest.raises(StorageError, match="VALENCE_S3_ACCESS_KEY"):
        await none.bring("s3://lab/ready", "wf")
    assert blobs.used_bytes == 0
    assert "x" * 16 not in repr(Settings(s3_secret_key="x" * 16))


async def test_what_another_owner_delivered_to_s3_stays(tmp_path: Path, s3: S3) -> None:
    place, blobs = storage(tmp_path, s3_endpoint=s3.url, s3_access_key=KEY, s3_secret_key=SECRET)
    first, second = [await blobs.put(data) for data in (b"ada's", b"ada's, later")]
    url = "s3://lab/results/of ada"
    await place.deliver(first, url, "ada")
    with pytest.raises(StorageError, match="not known to be yours"):
        await place.deliver(second, url, "bob")
    with pytest.raises(StorageError, match="not known to be yours"):
        await place.deliver(second, "s3://lab/ready", "ada")  # nobody's: it was there before
    await place.deliver(second, url, "ada")
    assert bytes(obstore.get(s3.store, "results/of ada").bytes()) == b"ada's, later"


async def test_files_only_below_what_was_opened(tmp_path: Path) -> None:
    opened, closed = tmp_path / "open", tmp_path / "closed"
    for directory in (opened, closed):
        directory.mkdir()
        (directory / "f").write_bytes(b"content")
    (opened / "link").symlink_to(closed / "f")
    os.mkfifo(opened / "pipe")
    place, blobs = storage(tmp_path, files=(str(opened),))
    hash, _ = await place.bring(f"file://{opened}/f", "wf")
    assert await blobs.read(hash, 0, 7) == b"content"
    for url in (f"file://{closed}/f", f"file://{opened}/../closed/f", f"file://{opened}/link",
                f"file://{opened}/%2e%2e/closed/f", f"file://{opened}"):  # fmt: skip
        with pytest.raises(StorageError, match="outside"):
            await place.bring(url, "wf")
        with pytest.raises(StorageError, match="outside"):
            await place.deliver(hash, url, "ada")
    with pytest.raises(StorageError, match="plain file"):
        await place.bring(f"file://{opened}/pipe", "wf")
    await place.deliver(hash, f"file://{opened}/new/place/g", "ada")
    assert (opened / "new/place/g").read_bytes() == b"content"
    assert [p.name for p in (opened / "new/place").iterdir()] == ["g"]
    again = await blobs.put(b"changed")
    await place.deliver(again, f"file://{opened}/new/place/g", "ada")
    for theirs in ("new/place/g", "f"):  # hers, and one that was there before
        with pytest.raises(StorageError, match="not known to be yours"):
            await place.deliver(hash, f"file://{opened}/{theirs}", "bob")
    assert (opened / "new/place/g").read_bytes() == b"changed"
    none, _ = storage(tmp_path / "none")
    with pytest.raises(StorageError, match="--files"):
        await none.bring(f"file://{opened}/f", "wf")


async def test_http_errors_are_told_apart_and_secrets_stay_out_of_them(
    tmp_path: Path, web: Web
) -> None:
    place, blobs = storage(tmp_path, local_urls=True)
    with pytest.raises(StorageError, match="404") as gone:
        await place.bring(f"{web.url}/nothing?signature=secret", "wf")
    assert not gone.value.passing
    assert "secret" not in str(gone.value)
    web.fails = 1
    with pytest.raises(StorageError, match="503") as busy:
        await place.bring(f"{web.url}/nothing", "wf")
    assert busy.value.passing
    web.files["/big"] = b"x" * (65 << 20)
    with pytest.raises(Exception, match="at most"):
        await place.bring(f"{web.url}/big", "wf")
    assert blobs.used_bytes == 0


async def test_what_listens_on_the_peers_own_machine_is_reached_only_if_the_peer_says_so(
    tmp_path: Path, web: Web
) -> None:
    web.files["/in"] = b"data"
    web.moved["/here"] = "/in"
    web.moved["/file"] = "file:///etc/passwd"
    web.moved["/round"] = "/round"
    web.moved["/garbage"] = "http://[::1"
    place, blobs = storage(tmp_path / "closed")
    hash = await blobs.put(b"result")
    own = (web.url, web.url.replace("127.0.0.1", "localhost"), "http://169.254.169.254")
    metadata = ("http://[fd00:ec2::254]", "http://100.100.100.200", "http://168.63.129.16")
    for url in (*own, *metadata, "http://[::ffff:127.0.0.1]:1", "http://0x7f000001:1"):
        with pytest.raises(StorageError, match="machine's own"):
            await place.deliver(hash, f"{url}/up", "ada")
        with pytest.raises(StorageError, match="machine's own"):
            await place.bring(f"{url}/in", "wf")
    assert "/up" not in web.files
    allowed, others = storage(tmp_path / "open", local_urls=True)
    await others.put(b"result")
    await allowed.deliver(hash, f"{web.url}/up", "ada")
    assert web.files["/up"] == b"result"
    assert await allowed.bring(f"{web.url}/here", "wf") == (hashlib.sha256(b"data").digest(), 4)
    for name in ("file", "round"):
        with pytest.raises(StorageError, match="too many redirects"):
            await allowed.bring(f"{web.url}/{name}", "wf")
    with pytest.raises(StorageError):
        await allowed.bring(f"{web.url}/garbage", "wf")
    url = "http://example.org:99999999/x"
    with pytest.raises(StorageError):
        await allowed.bring(url, "wf")
    with pytest.raises(StorageError):
        await allowed.deliver(hash, url, "ada")


async def test_a_redirect_does_not_lead_to_the_peers_own_machine(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.moved["/out"] = f"http://127.0.0.2:{web.url.rpartition(':')[2]}/in"
    web.files["/in"] = b"secret"
    place, _ = storage(tmp_path)
    real = valence.peer.storage._is_local
    monkeypatch.setattr(
        "valence.peer.storage._is_local", lambda host: host != "127.0.0.1" and real(host)
    )
    with pytest.raises(StorageError, match="machine's own"):
        await place.bring(f"{web.url}/out", "wf")


def test_what_is_wrong_with_a_delivery_is_said_with_its_place() -> None:
    def problems(deliver: Any) -> str:
        tasks = {"a": {"command": "x", "outputs": ["one", "two"]}}
        with pytest.raises(DocumentError) as found:
            parse(__import__("json").dumps({"name": "n", "tasks": tasks, "deliver": deliver}))
        return str(found.value)

    assert "/deliver/three" in problems({"three": "s3://b/k"})
    assert "write http" in problems({"one": "ftp://x/y"})
    assert "must end with '/'" in problems({"o*": "s3://b/k"})
    assert "two outputs" in problems({"one": "s3://b/k", "two": "s3://b/k"})
    assert "deliver" in problems({"one": 3})


def test_a_workflow_from_s3_to_s3_file_and_http(
    own_cluster: Any, tmp_path: Path, s3: S3, web: Web
) -> None:
    obstore.put(s3.store, "words", b"a b c\n" * 1000)
    web.files["/more"] = b"d e\n"
    shared = tmp_path / "shared"
    shared.mkdir()
    cluster = own_cluster(
        3, VALENCE_S3_ENDPOINT=s3.url, VALENCE_S3_ACCESS_KEY=KEY,
        VALENCE_S3_SECRET_KEY=SECRET, VALENCE_FILES=str(shared),
    )  # fmt: skip
    web.fails = 1
    document = {
        "name": "storage",
        "inputs": {"words": {"url": "s3://lab/words"}, "more": {"url": f"{web.url}/more"}},
        "tasks": {
            "count": {
                "command": "cat words more | wc -w > total",
                "inputs": ["words", "more"],
                "outputs": ["total"],
            },
            "part": {"foreach": 2, "command": "echo {item} > p.{item}", "outputs": ["p.{item}"]},
        },
        "deliver": {
            "total": "s3://lab/results/total",
            "p.*": f"file://{shared}/parts/",
            "p.1": f"{web.url}/p1",
        },
    }
    workflow = cluster.client().submit(document)
    assert workflow.wait() == "succeeded", str(workflow.view())
    assert bytes(obstore.get(s3.store, "results/total").bytes()).split() == [b"3002"]
    assert (shared / "parts/p.0").read_text() == "0\n"
    assert web.files["/p1"] == b"1\n"
    assert workflow.view()["bytes"]["origin"] == 6004
    document["deliver"] = {"total": f"file://{tmp_path}/elsewhere"}
    failed = cluster.client(1).submit(document)
    assert failed.wait() == "failed"
    assert "could not be delivered" in failed.view()["reason"]
    assert "--files" in failed.view()["reason"]
