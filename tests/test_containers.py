"""The image, the compose files and the Kubernetes manifest; by a real engine where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.conftest import wait_for
from valence.client import Client
from valence.peer import healthy
from valence.peer.settings import _memory_bytes, _millicores

ROOT = Path(__file__).parents[1]
COMPOSE = [ROOT / "docker-compose.yml", ROOT / "deploy" / "docker-compose.secrets.yml"]


def _compose() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        asked = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if asked.returncode == 0:
            return ["docker", "compose"]
    return None


def _no_engine() -> str:
    if _compose() is None:
        return "there is no docker compose here"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=20)
    return "" if asked.returncode == 0 else "no Docker engine answers here (DOCKER_HOST?)"


def test_kubernetes_accepts_the_manifest() -> None:
    found = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    for resource in found:
        kubernetes_validate.validate(resource, "1.29", strict=True)
    kinds = {resource["kind"] for resource in found}
    assert {"StatefulSet", "Service", "NetworkPolicy"} <= kinds
    headless = next(r for r in found if r["metadata"]["name"] == "valence-peers")
    assert headless["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.name)
def test_compose_publishes_one_gateway_and_runs_nobody_as_root_with_rights(path: Path) -> None:
    services = yaml.safe_load(path.read_text())["services"]
    published = [name for name, service in services.items() if "ports" in service]
    assert [name for name in published if "profiles" not in services[name]] == ["gateway"]
    assert set(published) <= {"gateway", "queue"}
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert not service.get("privileged")
    assert "USER valence" in (ROOT / "Dockerfile").read_text()


def test_secrets_are_made_once_and_for_nobody_else(tmp_path: Path) -> None:
    env, files = tmp_path / "env", tmp_path / "files"
    environment = {**os.environ, "VALENCE_ENV": str(env), "VALENCE_SECRETS": str(files)}
    for _ in range(2):
        for more in ((), ("--files",)):
            subprocess.run(
                [ROOT / "deploy" / "secrets", *more],
                env=environment,
                check=True,
                capture_output=True,
            )
        found = env.read_text(), (files / "token").read_text()
    lines = found[0].split()
    assert [line.partition("=")[0] for line in lines] == ["VALENCE_CLUSTER_KEY", "VALENCE_TOKEN"]
    assert all(re.fullmatch(r"\w+=[\w-]{43}", line) for line in lines)
    assert len(found[1]) == 43
    assert found == (env.read_text(), (files / "token").read_text()), "what is there stays"
    assert env.stat().st_mode & 0o077 == 0
    assert files.stat().st_mode & 0o077 == 0


def test_capacity_is_what_the_container_may_use(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{300 * 2**20}\n")
    assert _millicores(tmp_path) == 500
    assert _memory_bytes(tmp_path) == 300 * 2**20
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _millicores(tmp_path) == 1000 * len(os.sched_getaffinity(0))
    assert _memory_bytes(tmp_path) > 300 * 2**20


def test_health_is_told_by_exit_code(cluster, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VALENCE_HTTP_PORT", cluster.peers()[0]["http"].rpartition(":")[2])
    assert healthy.main() == 0
    monkeypatch.setenv("VALENCE_HTTP_PORT", "1")
    assert healthy.main() == 1
    assert "port 1" in capsys.readouterr().err


@pytest.mark.skipif(_compose() is None, reason="there is no docker compose here")
def test_a_missing_secret_is_an_error_that_says_how_to_make_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
    (tmp_path / "empty").touch()
    chosen = ["--env-file", str(tmp_path / "empty"), "-f", str(COMPOSE[0])]
    command = [*(_compose() or []), *chosen, "config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "./deploy/secrets makes one" in done.stderr


# --------------------------------------------------------------------------- with an engine


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Any]:
    compose = _compose() or []
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")},
        "COMPOSE_PROJECT_NAME": f"valence-test-{os.getpid()}",
        "VALENCE_IMAGE": "valence-test",
        "VALENCE_BUILD_NETWORK": os.environ.get("VALENCE_BUILD_NETWORK", "host"),
        "VALENCE_PUBLISH": "127.0.0.1:18470",
    }
    secrets = {**os.environ, "VALENCE_ENV": str(tmp_path / "env")}
    subprocess.run([ROOT / "deploy" / "secrets"], env=secrets, check=True)
    for line in (tmp_path / "env").read_text().split():
        name, _, value = line.partition("=")
        environment[name] = value

    def run(*arguments: str, limit_s: float = 300) -> Any:
        return subprocess.run(
            [*compose, "-f", str(COMPOSE[0]), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    build = ["docker", "build", "--network", environment["VALENCE_BUILD_NETWORK"]]
    built = subprocess.run(
        [*build, "--tag", "valence-test", str(ROOT)], capture_output=True, text=True, timeout=600
    )
    if built.returncode:
        pytest.skip(f"the image can't be built here: {built.stderr.strip()[-200:]}")
    yield run, environment
    run("down", "--timeout", "5")


_WHY = _no_engine()


@pytest.mark.skipif(bool(_WHY), reason=_WHY)
@pytest.mark.timeout(600)
def test_a_scaled_service_is_one_cluster(containers) -> None:
    run, environment = containers
    up = run("up", "-d", "--scale", "peer=4")
    assert up.returncode == 0, up.stderr
    client = Client("http://127.0.0.1:18470", environment["VALENCE_TOKEN"])

    def everybody() -> bool:
        try:
            return sum(p["state"] == "up" for p in client.peers()) == 5
        except Exception:
            return False

    wait_for(everybody)
    tasks = {"a": {"foreach": 20, "command": ["sh", "-c", "sleep 0.3; id -u"]}}
    workflow = client.submit({"name": "containers", "tasks": tasks})
    assert workflow.wait() == "succeeded"
    assert workflow.view()["peers"] >= 3
    assert workflow.log("a[0]").strip() == b"10001"
    assert run("down", "--timeout", "10").returncode == 0


@pytest.mark.skipif(bool(_WHY), reason=_WHY)
@pytest.mark.timeout(600)
def test_the_queue_is_a_profile_of_its_own(containers) -> None:
    run, environment = containers
    environment["VALENCE_QUEUE"] = "http://queue:8470"
    environment["VALENCE_PUBLISH_QUEUE"] = "127.0.0.1:18471"
    up = run("--profile", "queue", "up", "-d", "--scale", "peer=2")
    assert up.returncode == 0, up.stderr
    client = Client("http://127.0.0.1:18471", environment["VALENCE_TOKEN"])

    def pilots() -> int:
        try:
            return len(client.peers())
        except Exception:
            return 0

    wait_for(lambda: pilots() == 3)
    tasks = {
        "a": {"foreach": 10, "command": "head -c 30000 /dev/zero > {item}", "outputs": ["{item}"]},
        "all": {"command": "cat ? | wc -c > sum", "inputs": ["?"], "outputs": ["sum"]},
    }
    workflow = client.submit({"name": "queue", "strategy": "pilots", "tasks": tasks})
    assert workflow.wait() == "succeeded"
    assert workflow.read("sum").strip() == b"300000"
    assert run("--profile", "queue", "down", "--timeout", "10").returncode == 0
