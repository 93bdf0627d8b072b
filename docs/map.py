"""`make map`: the tree as it is, written into docs/architecture.md: who imports whom.

`--check` changes nothing and fails if the page is not what the tree says.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map: made by `make map` -->\n", "<!-- end of the map -->\n"
SIZE = re.compile(r"(?<=` \| )[\d,]+(?= \|)")  # may be a little old
LAYERS = ("workflow", "protocols", "peer", "master", "valence", "sim", "chaos", "bench", "fuzz")


def package(path: Path) -> str:
    """Of a module: the folder it is in."""
    return "/".join(path.relative_to(ROOT).parts[:-1])


def imported(path: Path) -> set[str]:
    """Packages of ours that a module imports, its own aside."""
    found: set[str] = set()
    parts = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            names = [module, *((*module, alias.name) for alias in node.names)]
        for name in names:
            if name[:1] == ("valence",) and name[1:2] and name[1] in LAYERS:
                name = name[1:]  # in a checkout it lies beside that folder
            if name and name[0] in LAYERS:
                target = ROOT.joinpath(*name)
                if target.with_suffix(".py").exists():
                    found.add("/".join(name[:-1]))
    return found - {"/".join(parts)}


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n\n")[0].partition(". ")[0].replace("\n", " ").rstrip(".:")


def tree() -> str:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = [ROOT / name for name in listed if name.split("/")[0] in LAYERS]
    modules: dict[str, list[Path]] = defaultdict(list)
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        if path.exists():
            modules[package(path)].append(path)
            arrows[package(path)] |= imported(path)
    rows = ["| package | lines | imports |", "| --- | --- | --- |"]
    order = sorted(modules, key=lambda name: (LAYERS.index(name.split("/")[0]), name))
    for name in order:
        lines = sum(len(path.read_text().splitlines()) for path in modules[name])
        targets = ", ".join(f"`{target}`" for target in sorted(arrows[name]))
        rows.append(f"| `{name}` | {lines:,} | {targets or '–'} |")
    rows += ["", "What each module of the engine and of the common parts is:", ""]
    rows += ["| module | |", "| --- | --- |"]
    for name in order:
        if name.startswith("protocols/") and "strategies/" not in name:
            for path in sorted(modules[name]):
                if path.name != "__init__.py":
                    shown = path.relative_to(ROOT / "protocols").with_suffix("")
                    rows.append(f"| `{shown}` | {first_line(path)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}{tree()}{END}{after}"
    if "--check" in sys.argv:
        if SIZE.sub("", made) != SIZE.sub("", text):
            sys.exit("docs/architecture.md does not show the tree as it is: make map")
    elif made != text:
        PAGE.write_text(made)


if __name__ == "__main__":
    main()
