"""Starts the task queue in this process."""

from __future__ import annotations

import argparse
import os
import secrets
import sys

from valence.peer.main import run
from valence.peer.settings import Settings, SettingsError, add_flags, load

from .service import QueueDaemon

ABOUT = (
    "Run the task queue: an HTTP service with the same workflow API as a peer, for several sites "
    "whose peers (started with --queue URL) pull its tasks. The task queue is optional."
)
#: the settings of a peer that apply to a task queue
TAKEN = (
    "data", "http_host", "http_port", "http_advertise", "token", "revoked", "disk", "blob_max",
    "requests_max", "retention", "files", "s3_endpoint", "s3_region", "s3_access_key",
    "s3_secret_key", "quiet",
)  # fmt: skip


def main(argv: list[str] | None = None, prog: str = "python -m master") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=ABOUT)
    add_flags(parser, TAKEN)
    flags = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
    environment = {k: v for k, v in os.environ.items() if k != "VALENCE_CLUSTER_KEY_FILE"}
    # the queue is a cluster of one member: nobody else ever needs its key
    environment["VALENCE_CLUSTER_KEY"] = secrets.token_hex(32)
    environment.setdefault("VALENCE_DATA", "valence-queue")
    for name in ("JOIN", "HOST", "PORT", "ADVERTISE", "QUEUE", "SITE", "CPUS", "MEMORY"):
        environment.pop(f"VALENCE_{name}", None)
    environment["VALENCE_KEEPERS"] = "1"
    try:
        settings: Settings = load(flags, environment)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return run(settings, QueueDaemon)
