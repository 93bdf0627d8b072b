"""All strategies, by name: those that come along, and those of other distributions.

One that comes along is a folder here, and its name in `workflow.strategies`. One of another
distribution is an entry point of the group `valence.strategies`: its name, and where its `make` is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from valence.workflow.strategies import BUILT_IN, others

from .service import Context, Service

Make = Callable[[Context], Service]


def _own(name: str) -> Make:
    make: Make = importlib.import_module(f"{__package__}.{name}.service").make
    return make


#: their messages are known as soon as this is imported
MADE_BY: dict[str, Make] = {name: _own(name) for name in BUILT_IN}
MADE_BY |= {name: point.load() for name, point in others().items()}


def services(context: Context) -> dict[str, Service]:
    """Of one peer: each strategy's."""
    return {name: make(context) for name, make in MADE_BY.items()}
