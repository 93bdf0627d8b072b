"""WHAT USERS TOUCH: the command line, and the Python client.

from valence import Client
run = Client().submit("examples/word-count.yaml")
run.wait()
print(run.read("total"))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, Problem, Unreachable, WorkflowHandle

_HERE = Path(__file__).parent
if not (_HERE / "peer").exists():  # in a checkout the other packages lie beside this folder
    __path__.append(str(_HERE.parent))

__all__ = ["Client", "Problem", "Unreachable", "WorkflowHandle"]


def __getattr__(name: str) -> Any:
    """Only who uses the client pays for its import."""
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(name)
