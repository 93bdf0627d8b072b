"""The entry point of the command: quiet under Ctrl-C even while Python is still importing."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while a command was still being imported
        return 130
