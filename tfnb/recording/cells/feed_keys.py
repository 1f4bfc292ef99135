"""Feed keys of names that a block binds anew: ``x = tfnb.placeholder(...)`` and below it ``x = x / 255``.

The name then holds the quotient, and ``{x: images}`` still feeds the placeholder, as it does after a write in place. If
it fed the quotient, runs would leave the division out, and nothing would tell. The same holds for the state of a loop,
``out, h = rnn(x, h)``: a run is fed the former ``h`` and gives the new one. Imports: recorded tensors.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tfnb.graph import Graph, Node, Value
from tfnb.graph.ops import NAMED
from tfnb.recording.values.tape import Tape
from tfnb.recording.values.tensor import Tensor

Keys = dict[str, tuple[Value, ...]]
_PLACEHOLDER = "tfnb.placeholder"
_SAMPLES = "placeholder"  # the function, in whatever way it is imported
_ITEMS = 16  # of a tuple or list: more are no state of a loop
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def keys_of(graph: Graph, names: Mapping[str, Any]) -> Keys:
    """The placeholders that names are feed keys of: of a tensor one, of a tuple or list one of each item.

    >>> from tfnb import placeholder, record
    >>> with record() as g:
    ...     h = placeholder(0.0), placeholder(1.0)
    >>> [g.contents.by_id[value.node].op for value in keys_of(g, {"h": h, "n": 3})["h"]]
    ['tfnb.placeholder', 'tfnb.placeholder']
    """
    keys: Keys = {}
    for name, held in list(names.items()):
        feeds = tuple(handle._feed for handle in _handles(held, graph))
        if feeds and None not in feeds and not name.startswith("_"):
            keys[name] = feeds  # type: ignore[assignment]
    return keys


def keep_keys(graph: Graph, tape: Tape, names: Mapping[str, Any], before: Keys, body: Sequence[ast.stmt]) -> None:
    """Make tensors of this block feed keys of the placeholders whose names they took over.

    before: the keys that names were when the block began. A tensor that has another name, too, or that does not depend
    on the placeholder, is a key of its own. So a state that shifts, ``a, b = b, a + b``, needs names for what it gives.
    """
    made = [node for node in tape.new if node.op == _PLACEHOLDER]
    if not (made or before):
        return
    named = {name: found for name, held in names.items() if name[0] != "_" and (found := _handles(held, graph))}
    count = Counter(id(held) for name, held in names.items() if name in named)
    taken = {handle._feed for found in named.values() for handle in found}  # by names that still hold placeholders
    given = {node.name: (Value(node.id),) for node in made if NAMED in node.tags}
    keys = before | given | _bound_first(body, tape.new)
    new = {node.id for node in tape.new}
    for name in named.keys() & keys.keys():
        for handle, key in zip(named[name], keys[name], strict=False):
            at = handle.shown.value
            is_free = handle._feed is None and count[id(handle)] < 2 and at.node in new and key not in taken
            if is_free and len(named[name]) == len(keys[name]) and _depends(tape.by_id, at, key):
                handle._feed = key


def _handles(held: object, graph: Graph) -> list[Tensor]:
    """The recorded tensors of a graph that a name holds, itself or as the items of a tuple or list; else none."""
    items = held if isinstance(held, (tuple, list)) and len(held) <= _ITEMS else [held]
    found = [item for item in items if isinstance(item, Tensor) and item.graph is graph]
    return found if len(found) == len(items) else []


def _bound_first(body: Sequence[ast.stmt], new: Sequence[Node]) -> Keys:
    """The placeholders that each name was bound to last, by lines of the source. new: nodes of the block."""
    keys: Keys = {}
    for _, group in groupby(sorted(_assignments(body), key=_line), _line):  # of a line: semicolons
        statements = list(group)
        lines = range(statements[0].lineno, (statements[-1].end_lineno or statements[-1].lineno) + 1)
        there = [node for node in new if node.source is not None and node.source.line in lines]
        made = [Value(node.id) for node in there if node.op == _PLACEHOLDER]
        is_all = len(made) == len(there)  # a function of the user may make them
        plain = [each for each in statements if each.value is not None and _gives_placeholders(each.value)]
        names = [name for each in plain or (statements if is_all else ()) for name in _targets(each)]
        for place, name in enumerate(dict.fromkeys(names)):
            own = made if len(names) == 1 else made[place : place + 1] if len(names) == len(made) else ()
            if own:  # of two placeholders the later one
                keys[name] = tuple(own)
    return keys


_Assignment = ast.Assign | ast.AnnAssign | ast.NamedExpr


def _assignments(body: Iterable[ast.AST]) -> Iterator[_Assignment]:
    """The assignments of a block, without those of functions and classes that it defines."""
    for node in body:
        if isinstance(node, _Assignment):
            yield node
            inner = [] if node.value is None else ast.walk(node.value)
            yield from (each for each in inner if isinstance(each, ast.NamedExpr))
        elif not isinstance(node, _DEFINITIONS):
            yield from _assignments(ast.iter_child_nodes(node))


def _line(statement: _Assignment) -> int:
    return statement.lineno


def _gives_placeholders(value: ast.expr) -> bool:
    """Whether an expression gives placeholders, and not what is computed from them.

    >>> texts = "placeholder(a)", "tuple(tf.placeholder(b) for b in ab)", "map(placeholder, ab)", "placeholder(a) / 2"
    >>> [_gives_placeholders(ast.parse(text, mode="eval").body) for text in texts]
    [True, True, True, False]
    """
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(_gives_placeholders, parts))
        case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part):
            return _gives_placeholders(part)
        case ast.Call(func=ast.Name(id="map"), args=[function, *_]):
            return _name(function) == _SAMPLES
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[part]):
            return _gives_placeholders(part)
        case ast.Call(func=function):
            return _name(function) == _SAMPLES
    return False


def _name(function: ast.expr) -> str:
    """The last part of the name of a function."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _targets(statement: _Assignment) -> list[str]:
    """Names that an assignment binds: of ``x, y = ...`` both, of ``a = b = ...`` those of the first target."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _depends(by_id: Mapping[int, Node], value: Value, on: Value) -> bool:
    """Whether a value is computed from another one."""
    stack, seen = [value.node], set[int]()
    while stack:
        at = stack.pop()
        if at == on.node:
            return True
        if at not in seen and at in by_id:
            seen.add(at)
            stack.extend(each.node for each in by_id[at].inputs)
    return False
