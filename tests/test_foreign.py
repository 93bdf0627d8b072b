"""A strategy of another distribution: a folder, and an entry point of one line. Nothing else knows
of it; it passes the conformance suite, is simulated, and runs live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cluster

ROOT = Path(__file__).parent.parent
FOREIGN = Path(__file__).parent / "foreign"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FOREIGN), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip


def test_it_passes_the_conformance_suite() -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", "dice")
    done = run("pytest", *options, "tests/test_strategies.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") >= 13, "each of its tests has run"


def test_it_is_simulated() -> None:
    done = run("sim", "--seeds", "6", "--jobs", "1", "--strategy", "dice")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "6 runs, 0 violations" in done.stdout


def test_it_runs_live_and_shows_its_metrics_and_its_reasons(
    own_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOREIGN), str(ROOT)]))
    cluster = own_cluster(3)
    client = cluster.client()
    tasks = {"t": {"foreach": 20, "command": "echo {item} > o.{item}", "outputs": ["o.{item}"]}}
    workflow = client.submit({"name": "rolled", "strategy": "dice", "tasks": tasks})
    assert workflow.wait() == "succeeded", workflow.view()
    why = cluster.cli("why", workflow.id, "t[3]")
    assert "the dice said so" in why.stdout
    strange = client.submit(
        {"name": "x", "strategy": "dice", "tasks": {"g": {"command": "true", "needs": {"gpus": 9}}}}
    )
    said = json.loads(cluster.cli("why", strange.id, "g", "--json").stdout)
    assert "needs 9 GPUs, but none of the 3 peers has that" in said["waiting_for"]
    strange.cancel()
    counted = [cluster.client(n).metrics() for n in range(3)]
    assert any('valence_dice_total{kind="placed"}' in text for text in counted)


def test_nobody_knows_of_it_who_does_not_have_it(cluster: Cluster) -> None:
    document = {"name": "x", "strategy": "dice", "tasks": {"t": {"command": "true"}}}
    with pytest.raises(Exception, match="unknown strategy 'dice'; choose from: auto, probe"):
        cluster.client().submit(document)
