"""Writes the packages, their imports and the modules' first sentences into docs/architecture.md.

`make map` runs it. With `--check` it changes nothing, and fails if the page differs from the tree.
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
SIZE = re.compile(r"(?<=` \| )[\d,]+(?= \|)")  # line counts: `--check` ignores them
LAYERS = ("workflow", "protocols", "peer", "master", "valence", "sim", "chaos", "bench", "fuzz")


def package(path: Path) -> str:
    """The folder that a module is in."""
    return "/".join(path.relative_to(ROOT).parts[:-1])


def imported(path: Path) -> set[str]:
    """The packages of this tree that a module imports, except its own."""
    packages: set[str] = set()
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
                name = name[1:]  # in a checkout that folder lies beside `valence`
            if name and name[0] in LAYERS:
                target = ROOT.joinpath(*name)
                if target.with_suffix(".py").exists():
                    packages.add("/".join(name[:-1]))
    return packages - {"/".join(parts)}


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n\n")[0].partition(". ")[0].replace("\n", " ").rstrip(".:")


def tree() -> str:
    """Both tables, as Markdown."""
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
    rows += ["", "What each module of `protocols/` does (the strategies' own modules aside):", ""]
    rows += ["| module | |", "| --- | --- |"]
    for name in order:
        if name.startswith("protocols/") and "strategies/" not in name:
            for path in sorted(modules[name]):
                if path.name != "__init__.py":
                    shown = path.relative_to(ROOT / "protocols").with_suffix("")
                    rows.append(f"| `{shown}` | {first_sentence(path)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}{tree()}{END}{after}"
    if "--check" in sys.argv:
        if SIZE.sub("", made) != SIZE.sub("", text):
            sys.exit("docs/architecture.md does not show the tree as it is; run `make map`")
    elif made != text:
        PAGE.write_text(made)


if __name__ == "__main__":
    main()
