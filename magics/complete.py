"""Tab after a magic: its options, and the names it takes. Looks at graphs only if there are any: loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import tfnb

VERBS = ("show", "ls", "rm", "clear", "export", "refresh", "on", "off")


def completer(magics: Any, name: str) -> Callable[[Any, Any], list[str]]:
    """The ``complete_command`` hook of one magic."""

    def complete(shell: Any, event: Any) -> list[str]:
        options = [option for action in getattr(magics, name).parser._actions for option in action.option_strings]
        return [*options, *dict.fromkeys(_names(name))]

    return complete


def _names(name: str) -> Iterator[str]:
    if name == "tfgraph":
        yield from VERBS
    if name == "tfgraph" or name == "tfgrad" or name == "tfrun":
        yield from ("cpu", "cuda")
    if "tfnb.recording" not in sys.modules or not tfnb.graphs():
        return
    contents = [graph.contents for graph in reversed(tfnb.graphs().values())]  # a line finds the graph of a name
    if name in ("tfgraph", "tfdiff"):
        yield from tfnb.graphs()
    if name in ("tfrun", "tfprof", "tfgrad", "tfdiff", "tfwatch", "tfbreak", "tfcompare"):
        yield from chain.from_iterable(each.names for each in contents)
    if name in ("tfgrad", "tfvars", "tfwatch"):
        yield from chain.from_iterable(each.variables for each in contents)
