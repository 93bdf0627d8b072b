"""As it is installed: a wheel with what users run, and no name of ours in a user's way."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cluster

ROOT = Path(__file__).parent.parent
OURS = ("workflow", "protocols", "peer", "master", "sim", "bench", "chaos", "fuzz")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy: a build leaves things behind."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    made = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made)]
    done = subprocess.run([*pip, "."], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(made.glob("*.whl"))


def test_the_wheel_has_one_package_and_nothing_that_users_do_not_run(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"valence"}
    shipped = {name for name in names if name.endswith(".py")}
    for layer in ("workflow", "protocols", "peer", "master"):
        for path in (ROOT / layer).rglob("*.py"):
            assert f"valence/{path.relative_to(ROOT)}" in shipped, path


def test_installed_it_runs_beside_a_users_modules_of_any_name(wheel: Path, tmp_path: Path) -> None:
    """A user's `workflow.py` in the current directory ended the peer before it had begun."""
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    for name in OURS:
        (tmp_path / f"{name}.py").write_text('raise RuntimeError("this is a user\'s own")\n')
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for module in ("valence", "valence.peer", "valence.master"):
        done = subprocess.run(
            [sys.executable, "-S", "-m", module, "--help"], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "usage:" in done.stdout


@pytest.mark.parametrize("module", ["peer", "master"])
def test_in_a_checkout_the_folders_run_as_they_are(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_call_meets_the_users_module_whatever_its_name(
    own_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("sim", "workflow", "peer"):
        (code / f"{name}.py").write_text(f"def run(x):\n    return [{name!r}, x]\n")
    cluster = own_cluster(2, PYTHONPATH=str(code))
    tasks = {
        name: {"call": f"{name}:run", "args": [index]}
        for index, name in enumerate(("sim", "workflow", "peer"))
    }
    workflow = cluster.client().submit({"name": "names", "tasks": tasks})
    assert workflow.wait() == "succeeded", workflow.view()
    assert workflow.values() == {
        "sim": ["sim", 0],
        "workflow": ["workflow", 1],
        "peer": ["peer", 2],
    }
