"""All strategies by name: the built-in ones, and those of other distributions.

A built-in strategy is a folder here, and a name in `workflow.strategies`. A strategy of another
distribution is an entry point in the group `valence.strategies`, which names its `make`.
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


#: importing this module registers the messages of all strategies
MADE_BY: dict[str, Make] = {name: _own(name) for name in BUILT_IN}
MADE_BY |= {name: point.load() for name, point in others().items()}


def services(context: Context) -> dict[str, Service]:
    """One service of each strategy, for one peer."""
    return {name: make(context) for name, make in MADE_BY.items()}
