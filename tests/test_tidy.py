"""House rules: the layers and their arrows, purity, and a first line that says what a module is."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for

ROOT = Path(__file__).parent.parent
#: what each layer may import of ours; `workflow ← protocols ← {peer, master} ← {valence, sim, bench}`
ARROWS = {
    "workflow": set(),
    "protocols": {"workflow"},
    "peer": {"workflow", "protocols"},
    "master": {"workflow", "protocols", "peer"},  # a queue is a home, with sites for peers
    "valence": {"workflow", "protocols", "peer", "master"},
    "sim": {"workflow", "protocols", "peer", "master"},
    "bench": {"workflow", "protocols", "peer", "master", "valence", "sim", "chaos"},
    "chaos": {"workflow", "protocols", "peer", "master", "valence"},
    "fuzz": {"workflow", "protocols", "peer", "master", "valence"},
}
PURE = ("workflow", "protocols")
IMPURE = {
    "aiohttp", "concurrent", "ctypes", "fcntl", "http", "io", "multiprocessing", "os", "pathlib",
    "secrets", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys",
    "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
#: the program that replays one recorded task *is* a process; it is run, not imported, by others
PROGRAMS = {"workflow/replay.py"}
BAD_NAMES = ("utils", "helpers", "manager", "handler", "misc", "common", "info")


def modules() -> list[Path]:
    return [p for layer in ARROWS for p in sorted((ROOT / layer).rglob("*.py"))]


#: which are parts of the package `valence` for who imports them, and beside its folder in a checkout
INSIDE = {"workflow", "protocols", "peer", "master"}


def imports(path: Path) -> set[str]:
    """Layers of ours, and what others make."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):  # (`valence` alone says where all of it is)
            names |= {alias.name for alias in node.names if alias.name != "valence"}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        first, *more = name.split(".")
        inside = first == "valence" and more[:1] and more[0] in INSIDE
        found.add(more[0] if inside else first)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_keeps_to_its_layer(path: Path) -> None:
    text = path.read_text()
    bare = [name for name in INSIDE if f"\nfrom {name}." in text or f"\nimport {name}." in text]
    assert not bare, "these are valence.… for everybody: a user may have a module of that name"
    layer = path.relative_to(ROOT).parts[0]
    ours = imports(path) & set(ARROWS) - {layer}
    assert ours <= ARROWS[layer], f"{layer} may not import {ours - ARROWS[layer]}"
    if layer in PURE and str(path.relative_to(ROOT)) not in PROGRAMS:
        assert not imports(path) & IMPURE


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_use_no_global_randomness_and_no_files(layer: str) -> None:
    for path in sorted((ROOT / layer).rglob("*.py")):
        if str(path.relative_to(ROOT)) in PROGRAMS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name != "open", path
                assert not name.startswith("random.") or name == "random.Random", path


@pytest.mark.parametrize("layer", PURE)
def test_pure_layers_name_a_logger_and_leave_to_others_where_it_writes(layer: str) -> None:
    for path in sorted((ROOT / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "logging":
                assert node.attr == "getLogger", path


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is(path: Path) -> None:
    assert not any(word in path.stem for word in BAD_NAMES)
    if path.name != "__main__.py":
        assert ast.get_docstring(ast.parse(path.read_text())), "no first line"


def test_the_tree_is_formatted_and_has_no_stray_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    assert not [f for f in listed if f.endswith((".pyc", ".log", ".db", ".pem"))]
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"):
        assert name in listed


def test_the_map_shows_the_tree_as_it_is() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [sys.executable, str(ROOT / "docs" / "map.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_is_all_that_users_run_and_nothing_else() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"valence"}
    for layer in INSIDE:
        for path in (ROOT / layer).rglob("*.py"):
            found.add(".".join(("valence", *path.relative_to(ROOT).parts[:-1])))
    assert set(listed) == found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_found_is_no_name(path: Path) -> None:
    """It says that something was looked for, and not what it is."""
    for node in ast.walk(ast.parse(path.read_text())):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""  # type: ignore[attr-defined]
        assert name != "found", f"line {node.lineno}"


def test_a_class_name_means_one_thing() -> None:
    at: dict[str, list[str]] = {}
    for layer in ("workflow", "protocols", "peer", "master", "valence"):
        for path in sorted((ROOT / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    at.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: places for name, places in at.items() if len(places) > 1}


def test_links_in_the_docs_lead_somewhere() -> None:
    import re

    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("killed", [True, False])
def test_a_test_run_that_is_killed_leaves_no_process_behind(tmp_path: Path, killed: bool) -> None:
    """(The first process is the run: it starts the second, and is killed.)"""
    run = """
import os, signal, subprocess, sys
from pathlib import Path
from tests.conftest import reaped
with reaped(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "300"], cwd=sys.argv[1], start_new_session=True)
    print(child.pid, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    child.terminate(); child.wait()
"""
    how = "killed" if killed else "ended"
    done = subprocess.run(
        [sys.executable, "-c", run, str(tmp_path), how], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    wait_for(lambda: not Path(f"/proc/{int(done.stdout)}/cwd").exists())
