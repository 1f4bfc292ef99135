"""Dataflow of Python's random draws into the graph, from the block's source: pure functions over syntax trees.

A recording puts each draw on its tape (`tfnb.recording.values.python_draws`). Whether a run repeats a number that
matters depends on where the number went: into nodes that are computed of feeds and Variables, or only into the sample
of a placeholder, the initial value of a parameter, or a text. So names are followed from the draw's statement on,
through the function that drew and through the block. Where there is no source, a draw counts as one that matters.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tfnb.errors import file_label
from tfnb.graph import SourceLine, Value
from tfnb.recording.cells.statements import Note
from tfnb.recording.marks.source_trees import FUNCTIONS, around, definition, tree
from tfnb.recording.values.python_draws import Draw, DrawFrame, NamedGenerator, drawing, have_drawn, is_clock
from tfnb.recording.values.tape import Tape

_ABSORBING = frozenset({
    "placeholder", "constant", "Parameter", "Variable", "Buffer", "register_buffer", "register_parameter",
    "seed", "manual_seed", "default_rng", "RandomState", "Generator", "Random", "DataLoader",
})  # fmt: skip
"""Calls whose arguments are no part of what a run computes: samples, initial values, seeds."""
_CLASSES = (torch.nn.Module, torch.optim.Optimizer, Dataset, DataLoader)  # the same, where they are made
_GIVEN = frozenset({"tfnb.placeholder", "tfnb.read", "tfnb.constant"})
_SCOPES = (*FUNCTIONS, ast.ClassDef)
_LEAVES = (ast.Return, ast.Break, ast.Continue)

_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("random", "uniform", "rand", "random_sample", "sample_uniform", "ranf"), "torch.rand(())"),
    **dict.fromkeys(("randint", "randrange", "integers", "random_integers", "getrandbits", "randbelow"),
                    "torch.randint(low, high, ())"),
    **dict.fromkeys(("choice", "choices"), "torch.randint(len(items), ()), or torch.multinomial for weights"),
    **dict.fromkeys(("shuffle", "permutation", "permuted", "sample"), "torch.randperm(n)"),
    **dict.fromkeys(("gauss", "normalvariate", "normal", "randn", "standard_normal"), "torch.randn(())"),
    **dict.fromkeys(("beta", "betavariate"), "torch.distributions.Beta(a, b).sample()"),
    **dict.fromkeys(("binomial", "binomialvariate"), "torch.bernoulli(p)"),
    **dict.fromkeys(("dirichlet",), "torch.distributions.Dirichlet(a).sample()"),
    **dict.fromkeys(("gamma", "gammavariate", "standard_gamma"), "torch.distributions.Gamma(a, b).sample()"),
    **dict.fromkeys(("poisson",), "torch.poisson(rates)"),
    **dict.fromkeys(("exponential", "expovariate", "standard_exponential"), "torch.empty(()).exponential_()"),
}  # fmt: skip


def notes_of_draws(tape: Tape, names: Mapping[str, Any], results: Mapping[str, Value]) -> list[Note]:
    """A note for each function and line whose draws the runs repeat.

    names: those of the block. results: the values of those among them that are recorded tensors.
    """
    found: dict[tuple[str, str, int], Note] = {}
    for draw in tape.draws:
        place = draw.places[0]
        key = draw.called, place.file, place.line
        if key not in found and _matters(draw, tape, names, results):
            found[key] = _note(draw)
    return list(found.values())


def unheard_draws(
    held: Iterable[NamedGenerator], heard: Collection[int], block: FrameType, body: Sequence[ast.stmt],
) -> list[Draw]:  # fmt: skip
    """Draws of generators whose state changed without a recorded call, at the lines of the block that name the
    generator.

    block: the frame that records the block. body: its statements, empty where the source is not known.
    """
    found: list[Draw] = []
    nodes = [node for statement in body for node in ast.walk(statement)]
    methods = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for each in have_drawn(held, heard):
        uses = {(n.lineno, methods.get(id(n), "")) for n in nodes if isinstance(n, ast.Name) and n.id == each.name}
        for line, method in sorted(uses or {(block.f_lineno, "")}):
            called = f"{type(each.owner).__name__}.{method}" if method else each.called
            place = DrawFrame(block.f_code.co_filename, line, block.f_code.co_name, block.f_globals)
            found.append(Draw(called, False, (place,), 0))
    return found


def unheard_clocks(
    functions: Iterable[FunctionType], block: FrameType, names: Mapping[str, Any], body: Sequence[ast.stmt]
) -> Iterator[Draw]:
    """Reads of clocks in C by the block and by functions of the program, which no replacement hears.

    functions: those that the block may call. A function counts as called at the lines of the block that name it, or at
    the last one where another function calls it.
    """
    code = block.f_code
    if _may_read_clocks((*code.co_names, *code.co_varnames, *code.co_freevars), names):
        yield from _clocks(body, names, code.co_filename, code.co_name, ())
    for function in functions:
        may_read = _may_read_clocks(function.__code__.co_names, function.__globals__)
        inner = definition(function) if may_read else None
        if inner is None:
            continue
        nodes = (node for statement in body for node in ast.walk(statement))
        named = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute))
        lines = {n.lineno for n in named if getattr(n, "id", getattr(n, "attr", None)) == function.__name__}
        for line in lines or {statement.lineno for statement in body[-1:]}:
            place = DrawFrame(block.f_code.co_filename, line, block.f_code.co_name, names)
            yield from _clocks(inner.body, function.__globals__, function.__code__.co_filename, inner.name, (place,))


def _may_read_clocks(used: Iterable[str], names: Mapping[str, Any]) -> bool:
    """Whether one of the names that code uses is bound to a class or function of ``time`` or ``datetime``."""
    named = (names.get(name) for name in used)
    return any(getattr(each, "__module__", getattr(each, "__name__", "")) in ("time", "datetime") for each in named)


def _clocks(
    body: Sequence[ast.stmt], names: Mapping[str, Any], file: str, function: str, outer: tuple[DrawFrame, ...]
) -> Iterator[Draw]:
    """The calls of clocks in statements, by a name that is bound to one or by a method of a class."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if not isinstance(node, ast.Call) or (path := _dotted(node.func)) is None:
            continue
        first, *rest = path.split(".")
        owner, value = None, names.get(first)
        for part in rest:
            owner, value = value, getattr(value, part, None) if isinstance(value, ModuleType | type) else None
        called = None if isinstance(owner, ModuleType) else drawing(value)  # those of modules are replaced
        if called is not None and is_clock(called):
            yield Draw(called, True, (DrawFrame(file, node.lineno, function, names), *outer), 0)


def _note(draw: Draw) -> Note:
    place = draw.places[0]
    text = linecache.getline(place.file, place.line).strip()
    source = SourceLine(file_label(place.file), place.line, text)
    if draw.is_clock:
        return Note(source, f"`{draw.called}()` read a clock while recording, so the time is the same in each run: "
                            "make it a placeholder, and feed it")  # fmt: skip
    name = draw.called.rpartition(".")[2]
    name = "ranf" if draw.called == "np.random.sample" else name
    instead = _INSTEAD.get(name, "one of torch, such as torch.rand(())")
    return Note(source, f"`{draw.called}()` drew in Python while recording, and each run repeats this draw: draw a "
                        f"random number of the graph, {instead}, which each run draws anew")  # fmt: skip


# -- one draw -------------------------------------------------------------------------------------------------------


def _matters(draw: Draw, tape: Tape, names: Mapping[str, Any], results: Mapping[str, Value]) -> bool:
    """Whether nodes that runs compute were made with the number."""
    made = [node for node in tape.new if node.id > draw.node and node.op not in _GIVEN]
    levels = _levels(draw.places)
    called = draw.called.rpartition(".")[2]
    for place, lines, body, function in levels[:-1]:
        flow = _Flow(body, function, place.names)
        flow.follow(lines, called, is_first=called == draw.called.rpartition(".")[2])
        if not flow.is_returned and (draw.is_clock or not flow.is_kept):
            return False
        called = place.function
    if not levels:
        return bool(made) and not draw.is_clock
    place, lines, body, function = levels[-1]
    flow = _Flow(body, function, {**place.names, **names})
    flow.follow(lines, called, is_first=len(levels) == 1)
    touched = [Value(node.id) for node in made if node.source is not None and flow.touches(node.source.line)]
    named = [value for name in flow.reached if (value := results.get(name)) is not None]
    if any(map(tape.is_computed, (*touched, *named))):
        return True
    return bool(touched) and not flow.absorbs and not draw.is_clock


Level = tuple[DrawFrame, list[int], list[ast.stmt], "ast.FunctionDef | None"]


def _levels(places: Sequence[DrawFrame]) -> list[Level]:
    """The functions from the draw outwards with their lines; frames of one function, as of its loops, are one level.

    A function without source is left out.
    """
    found: list[Level] = []
    for place in places:
        whole = tree(place.file)
        if whole is None:
            continue
        function = around(whole, place.line)
        body = whole.body if function is None else function.body
        if found and found[-1][2] is body:
            found[-1][1].append(place.line)
        else:
            found.append((place, [place.line], body, function))
    return found


# -- names, from a statement on -------------------------------------------------------------------------------------


class _Flow:
    """The names and statements of one function or block that a draw reaches."""

    def __init__(self, body: Sequence[ast.stmt], function: object, names: Mapping[str, Any]) -> None:
        self.body, self.names = body, names
        self.local = {
            n.id for each in body for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } if function is not None else None  # fmt: skip
        self.seeds: list[ast.stmt] = []
        self.called = ""
        self.is_first = False
        self.reached: set[str] = set()  # dotted names
        self.lines: set[tuple[int, int]] = set()
        self.is_returned = self.is_kept = self.absorbs = False

    def follow(self, lines: Sequence[int], called: str, *, is_first: bool) -> None:
        """Follow the value drawn at these lines; ``called``: name of the function called there."""
        self.called, self.is_first = called, is_first
        for line in lines:
            path = _path(self.body, line)
            if path and not (self.seeds and path[-1] in self.above):
                self.seeds.append(path[-1])
                self.above = path[:-1]
        self._block(self.body, False)

    above: Sequence[ast.stmt] = ()  # the compound statements around the innermost line

    def touches(self, line: int) -> bool:
        """Whether a statement that the draw reaches stands in this line."""
        return any(first <= line <= last for first, last in self.lines)

    def _block(self, body: Sequence[ast.stmt], forced: bool) -> bool:
        """Follow statements in order. forced: whether control flow depends on the draw; returned for later
        statements.
        """
        for statement in body:
            forced = self._statement(statement, forced)
        return forced

    def _statement(self, statement: ast.stmt, forced: bool) -> bool:
        if isinstance(statement, _SCOPES):
            if self._uses(statement.body):
                self.reached.add(statement.name)
            return forced
        own = list(_own(statement))
        is_seed = any(statement is seed for seed in self.seeds) and not self._is_absorbed(own)
        is_hit = self._uses(own) or is_seed or forced
        if is_hit:
            self.lines.add(_lines(statement, own))
        inner = list(_bodies(statement))
        if not inner:
            self._simple(statement, own, is_hit, is_seed, forced)
            return forced
        if isinstance(statement, (ast.For, ast.AsyncFor)) and is_hit:
            self._give(statement.target)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                if is_hit and item.optional_vars is not None:
                    self._give(item.optional_vars)
            return self._block(statement.body, forced)
        decides = forced or (is_hit and not isinstance(statement, ast.Try))
        is_loop = isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
        after = forced
        for _ in range(2 if is_loop else 1):
            for body in inner:
                left = self._block(body, decides)
                after = after or (left and not is_loop)
                decides = decides or (left and is_loop)
        leaves = _LEAVES if not is_loop else ast.Return
        return after or (
            decides and any(isinstance(n, leaves) for body in inner for each in body for n in ast.walk(each))
        )

    def _simple(self, statement: ast.stmt, own: Sequence[ast.AST], is_hit: bool, is_seed: bool, forced: bool) -> None:
        if isinstance(statement, ast.Return):
            self.is_returned |= is_hit
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if is_hit:
                    self._give(target)
                elif isinstance(target, ast.Name) and not isinstance(statement, ast.AugAssign):
                    self.reached = {n for n in self.reached if n != target.id and not n.startswith(f"{target.id}.")}
        if not is_hit:
            return
        for node in (n for each in own for n in ast.walk(each)):
            if isinstance(node, ast.NamedExpr):
                self._give(node.target)
            elif isinstance(node, (ast.Yield, ast.YieldFrom)):
                self.is_returned = True
            elif isinstance(node, ast.Call):
                self._change(node, is_seed, forced)

    def _change(self, call: ast.Call, is_seed: bool, forced: bool) -> None:
        """Taint the owner of a call with tainted arguments, and the arguments of in-place draws (``shuffle``)."""
        if is_seed and _last(call.func) == self.called:
            for arg in call.args if not self.is_first or self.called in ("shuffle", "readinto") else ():
                self._give(arg)
            if self.is_first:
                return
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(call.func, ast.Attribute) and (forced or self._uses(given) or self._draws(given)):
            owner = _dotted(call.func.value)
            if owner is not None and not isinstance(self._value(owner), ModuleType):
                self._give(call.func.value)

    def _draws(self, nodes: Iterable[ast.AST]) -> bool:
        return any(isinstance(n, ast.Call) and _last(n.func) == self.called for e in nodes for n in ast.walk(e))

    def _give(self, target: ast.AST) -> None:
        """Taint a target of an assignment, or an object changed by a call."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._give(each)
            return
        if isinstance(target, ast.Starred):
            return self._give(target.value)
        while isinstance(target, (ast.Subscript, ast.Call)):
            target = target.value if isinstance(target, ast.Subscript) else target.func
        name = _dotted(target)
        if name is None:
            return
        self.reached.add(name)
        if self.local is not None and name.partition(".")[0] not in self.local:
            self.is_kept = True

    def _is_absorbed(self, own: Sequence[ast.AST]) -> bool:
        """Whether the call that drew stands among the arguments of an absorbing one."""
        calls = [n for each in own for n in ast.walk(each) if isinstance(n, ast.Call)]
        inside = {id(n) for call in calls if self._absorbing(call) for arg in _arguments(call) for n in ast.walk(arg)}
        mine = [call for call in calls if _last(call.func) == self.called]
        if not mine:  # called by another name: absorbed where the whole value is
            value = own[-1] if own else None
            is_absorbed = isinstance(value, ast.Call) and self._absorbing(value)
        else:
            is_absorbed = all(id(call) in inside or self._absorbing(call) for call in mine)
        self.absorbs |= is_absorbed
        return is_absorbed

    def _absorbing(self, call: ast.Call) -> bool:
        if _last(call.func) in _ABSORBING:
            return True
        name = _dotted(call.func)
        kind = None if name is None else self._value(name)
        return isinstance(kind, type) and issubclass(kind, _CLASSES)

    def _value(self, name: str) -> Any:
        first, *rest = name.split(".")
        found = self.names.get(first)
        for part in rest:
            found = found.__dict__.get(part) if isinstance(found, (ModuleType, type)) else None
        return found

    def _uses(self, nodes: Iterable[ast.AST]) -> bool:
        """Whether expressions load a name that the draw reached, other than for an absorbing call."""
        return any(list(map(self._used, nodes))) if self.reached else False

    def _used(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and self._absorbing(node):
            before, self.absorbs = self.absorbs, False
            self.absorbs = any(list(map(self._used, _arguments(node)))) or self.absorbs or before
            return False
        name = _dotted(node)
        if name is not None:
            is_load = isinstance(getattr(node, "ctx", None), ast.Load)
            return is_load and any(f"{name}.".startswith(f"{n}.") or n.startswith(f"{name}.") for n in self.reached)
        return any(list(map(self._used, ast.iter_child_nodes(node))))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as text; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def _last(function: ast.AST) -> str:
    """The last name in a called expression."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without nested statements."""
    for name, value in ast.iter_fields(statement):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (ast.expr, ast.withitem)) and not (name == "target" and isinstance(each, ast.Name)):
                yield each


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks inside of a compound statement."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        block: Any = getattr(statement, name, None)
        if name in ("handlers", "cases"):
            yield from (each.body for each in block or ())
        elif isinstance(block, list) and block:
            yield block


def _lines(statement: ast.stmt, own: Collection[ast.AST]) -> tuple[int, int]:
    """First and last line of a statement, or of the head of a compound statement."""
    if not list(_bodies(statement)):
        return statement.lineno, statement.end_lineno or statement.lineno
    return statement.lineno, max((getattr(each, "end_lineno", 0) or 0 for each in own), default=statement.lineno)


def _path(body: Sequence[ast.stmt], line: int) -> list[ast.stmt]:
    """The statements around a line, the innermost last."""
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or 0) and not isinstance(statement, _SCOPES):
            for inner in _bodies(statement):
                if found := _path(inner, line):
                    return [statement, *found]
            return [statement]
    return []
