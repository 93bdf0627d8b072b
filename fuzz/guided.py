"""Fuzzes one target under atheris, guided by coverage.

`python -m fuzz.guided TARGET SECONDS DIR` exits with code 0 when its time is over. If an input
fails before that, it leaves the input in DIR.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["protocols", "peer", "workflow"]):
    from fuzz.targets import TARGETS, seeds


def main() -> None:
    target, seconds, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    corpus = directory / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=20",
        "-rss_limit_mb=1024",
        f"-artifact_prefix={directory}/{target}-",
    ]
    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
