"""Starts a cluster, counts the words of a text on it, shows the result, and stops it (`make demo`).

Everything happens in a temporary directory, which is removed afterwards. A cluster that already
runs on this machine is not touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
VALENCE = [sys.executable, "-m", "valence"]


def show_command(text: str) -> None:
    print(f"\n$ {text}", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="valence-demo-") as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment["VALENCE_HOME"] = home

        def valence(*arguments: str) -> int:
            shown = [os.path.relpath(a) if a.startswith(str(HERE)) else a for a in arguments]
            show_command("valence " + " ".join(shown))
            return subprocess.run([*VALENCE, *arguments], env=environment, check=False).returncode

        try:
            if valence("up", "--peers", "4", "--detach"):
                return 1
            if valence("submit", str(HERE / "word-count.yaml"), "--watch"):
                return 1
            listed = subprocess.run(
                [*VALENCE, "ls", "--json"], env=environment, capture_output=True, check=True
            )
            workflow_id = json.loads(listed.stdout)[0]["id"]
            out = Path(home) / "results"
            if valence("get", workflow_id, str(out)):
                return 1
            total = (out / "total").read_text().strip()
            expected = str(len((HERE / "words.txt").read_text().split()))
            print(f"\nwords.txt has {total} words.")
            return 0 if total == expected else 1
        except KeyboardInterrupt:
            return 130
        finally:
            valence("down")


if __name__ == "__main__":
    sys.exit(main())
