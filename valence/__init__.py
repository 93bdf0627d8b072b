"""THE USER'S SIDE: the command line, the local cluster and the Python client.

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
    """Imports the client when it is first used: other programs don't pay for it."""
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(name)
