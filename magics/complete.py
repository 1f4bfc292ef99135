"""Completion in the line of a magic: its options and names. Looks at graphs only if there are any: no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

import tfnb
from tfnb.magics.options import options_of

VERBS = ("show", "ls", "rm", "clear", "export", "refresh", "on", "off")
_LINE = re.compile(r"\s*(?:[\w, ]+=\s*)?%{1,2}(\w+)\s+(?:.*\s)?")


def line_matcher(magics: object, names: Container[str]) -> Callable[[CompletionContext], Any]:
    """A matcher of IPython's completer for these magics, whose offers suppress all others, such as jedi's names."""

    @context_matcher(priority=100, identifier="tfnb.magics")  # before each of IPython's
    def matcher(context: CompletionContext) -> Any:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        begun = _LINE.fullmatch(line.removesuffix(context.token))
        found: list[str] = []
        if begun is not None and begun[1] in names:
            every = dict.fromkeys([*options_of(getattr(magics, begun[1])), *_names(begun[1])])
            found = [text for text in every if text.startswith(context.token)]
        return {"completions": [SimpleCompletion(text) for text in found], "suppress": bool(found), "ordered": True}

    return matcher


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
