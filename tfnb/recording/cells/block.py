"""Opening and closing a recording: `record`, `record_cell`, `reopen`, and the graphs by name.

All or nothing: contents are swapped in only when the block ended without an exception.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, ensure_type, file_label
from tfnb.graph import Contents, Dim, Graph, Node, Owner, SourceLine, Value, current, ops
from tfnb.graph.collector import uncollected
from tfnb.graph.graph import new_id
from tfnb.graph.setting import setting
from tfnb.recording.cells.draw_flow import notes_of_draws, unheard_clocks, unheard_draws
from tfnb.recording.cells.feed_keys import keep_keys, keys_of
from tfnb.recording.cells.new_contents import Replacement, drop_unreachable_data, replaced
from tfnb.recording.cells.size_letters import substitute, unified_guards
from tfnb.recording.cells.statements import LEFT, Note, attached
from tfnb.recording.cells.stored_names import stored_by_functions, stored_from
from tfnb.recording.cells.type_questions import notes_of_types
from tfnb.recording.dispatch.function_mode import Functions
from tfnb.recording.dispatch.module_hooks import follow_modules
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.marks.block_names import (
    Namespace,
    asks_in,
    attributes_read,
    block_of,
    keys_read,
    names_read,
    paths_set,
)
from tfnb.recording.marks.held_interrupts import at_user_lines, raise_held
from tfnb.recording.marks.notes import user_level
from tfnb.recording.marks.python_guards import GUARDS
from tfnb.recording.marks.python_state import PythonReads
from tfnb.recording.marks.scopes import clean, modules_of
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.overrides.rng_state import own_streams
from tfnb.recording.torch_patches import surroundings
from tfnb.recording.values.python_draws import held_generators
from tfnb.recording.values.tensor import Operation, Tensor

_UNUSED = "it holds data that nothing recorded uses, which is not kept: use .sample, or make it a tfnb.constant"
_UNKNOWN_LINE = "a line that is not known"
_graphs: dict[str, Graph] = {}
_lock = threading.Lock()

Where = Callable[[], SourceLine | None]
Failed = Callable[[Graph, Node | None], None]


def graph(name: str | None = None) -> Graph:
    """The graph of this name; without a name, the open recording's or the last one named.

    Raises NotFound for an unknown name.

    >>> with record("shown"):
    ...     graph().name
    'shown'
    """
    if name is None:
        recording = current.recording()
        if recording is not None:
            return recording.graph
        if not _graphs:
            raise NotFound("no graph yet: record one with %%tfgraph NAME or `with tfnb.record(NAME):`")
        return list(_graphs.values())[-1]
    if name not in _graphs:
        raise NotFound(f"no graph named {name!r}; there are: {', '.join(_graphs) or 'none'}")
    return _graphs[name]


def graphs() -> dict[str, Graph]:
    """All named graphs, by name.

    >>> with record("listed") as g:
    ...     pass
    >>> graphs()["listed"] is g
    True
    """
    return dict(_graphs)


def graph_name(text: str) -> str:
    """Check the name of a graph: one word, so that the line of a magic can name the graph; raises InvalidArgument.

    >>> graph_name("my_graph")
    'my_graph'
    """
    ensure_type(text, str, "the name of a graph")
    if not text or text.split() != [text]:
        near = "_".join(text.split()) or "graph"
        raise InvalidArgument(f"{text!r} is no graph name: one word without blanks is, such as {near}")
    return text


def forget(name: str) -> None:
    """Take a name off the list of graphs; the object stays valid."""
    graph(name)
    del _graphs[name]


@contextmanager
def record(
    graph: Graph | str | None = None, *, device: torch.device | str | None = None, lazy: bool = False
) -> Iterator[Graph]:
    """Record the block into a graph: ordinary torch code, run at once on samples.

    graph: None for a new unnamed graph, a name for a new graph of that name, a Graph to append to. device: where
    factories and placeholders go. lazy: shapes only, no values. Raises whatever the block raises, with the graph
    unchanged; InvalidArgument for a name of several words and for a device that is not here; FailedPrecondition for a
    finalized graph.

    >>> from tfnb.recording import placeholder
    >>> with record() as g:
    ...     x = placeholder(torch.ones(4, 3), name="x")
    ...     y = (x * 2).sum(1)
    >>> print(y.spec, [n.op for n in g.nodes])
    float32[B] ['tfnb.placeholder', 'aten.mul.Tensor', 'aten.sum.dim_IntList']
    """
    __tracebackhide__ = True
    frame = sys._getframe(2)
    named = isinstance(graph, str)
    target = graph if isinstance(graph, Graph) else Graph(graph_name(graph or "graph"))
    target.ensure_open()
    label = file_label(frame.f_code.co_filename)
    owner = _owner(target, f"block:{label}:{frame.f_lineno}:{len(target.owners)}")

    def names() -> Mapping[str, Any]:
        return {**frame.f_globals, **frame.f_locals}

    with _opened(
        target, owner, _lines(frame, label), names, frame, device, lazy, append=True, listed=named,
        body=block_of(frame), namespace=Namespace.of(frame),
    ):  # fmt: skip
        yield target


@contextmanager
def record_cell(
    graph: Graph | str | None, *, owner: str, label: str, filename: str, namespace: Mapping[str, Any],
    device: torch.device | str | None = None, lazy: bool = False, append: bool = False, failed: Failed | None = None,
    body: Sequence[ast.stmt] = (),
) -> Iterator[Graph]:  # fmt: skip
    """Record a notebook cell: the nodes that ``owner`` recorded before are replaced when the cell succeeds.

    graph: a Graph, or the name of a known or new one. filename: what the cell was compiled as; its frames are the
    user's. namespace: where its names land. failed: called with what was recorded until an error came, and the node
    that raised it, which is None where no op did. body: the statements of the cell.
    """
    __tracebackhide__ = True
    target = graph if isinstance(graph, Graph) else _graphs.get(graph or "graph") or Graph(graph or "graph")
    target.ensure_open()
    stop = sys._getframe(2)

    def where() -> SourceLine | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != filename:
            frame = frame.f_back
        if frame is None:
            return SourceLine(label, 1)
        return SourceLine(label, frame.f_lineno, linecache.getline(filename, frame.f_lineno).strip())

    key = f"{owner}+{new_id()}" if append else owner
    is_listed = not isinstance(graph, Graph) or _graphs.get(graph.name) is graph
    with _opened(
        target, _owner(target, key), where, lambda: namespace, stop, device, lazy, append=append, listed=is_listed,
        failed=failed, is_cell=True, body=body, namespace=Namespace(namespace),
    ):  # fmt: skip
        yield target


@contextmanager
def reopen(graph: Graph) -> Iterator[Recorder]:
    """The open recording of ``graph``, or a new recording that appends to the graph."""
    recording = current.recording()
    if isinstance(recording, Recorder) and recording.graph is graph:
        yield recording
        return
    frame = _caller()
    label = file_label(frame.f_code.co_filename)
    owner = _owner(graph, f"block:{label}:{frame.f_lineno}:{len(graph.owners)}")

    with _opened(graph, owner, _lines(frame, label), dict, frame, None, False, append=True) as recorder:
        yield recorder


def _lines(frame: FrameType, label: str) -> Where:
    """A function that gives the current line of a frame; the same object for the same line."""

    @cache
    def at(line: int) -> SourceLine:
        return SourceLine(label, line, linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip())

    return lambda: at(frame.f_lineno)


def _caller() -> FrameType:
    """The nearest frame outside tfnb and the standard library's context managers."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("tfnb", "contextlib"):
        frame = frame.f_back
    return frame


def _owner(graph: Graph, key: str) -> Owner:
    if key not in graph.owners:
        graph.owners.append(key)
    return Owner(key, graph.owners.index(key))


@contextmanager
def _opened(
    graph: Graph,
    owner: Owner,
    where: Where,
    names: Callable[[], Mapping[str, Any]],
    stop: FrameType,
    device: torch.device | str | None,
    lazy: bool,
    *,
    append: bool,
    listed: bool = False,
    failed: Failed | None = None,
    is_cell: bool = False,
    body: Sequence[ast.stmt] = (),
    namespace: Namespace | None = None,
) -> Iterator[Recorder]:
    """An open recording, and its commit. listed: the graph takes its name. failed, body: see `record_cell`.

    is_cell: the notebook shows the notes. Elsewhere those of how runs differ from plain PyTorch are warnings; of
    what no run does, in a block without a step, once a run leaves it out.
    """
    __tracebackhide__ = True
    _check_device(device)
    with at_user_lines():
        before = graph.contents
        kept = tuple(n for n in before.nodes if append or n.owner is None or n.owner.key != owner.key)
        recorder = Recorder(graph, owner, where=where, kept=kept, names=names, stop=stop, lazy=lazy)
        recorder.default_device, recorder.is_cell = device, is_cell
        about = names_read(body), namespace, attributes_read(body), keys_read(body), paths_set(body), asks_in(body)
        recorder.python = PythonReads(recorder, *about)
        outer = names()
        recorder.buffers.meet(modules_of(outer), is_earlier=True)
        recorder.held = [] if is_cell else held_generators(outer)
        bound, keys = _named_values(graph, outer), keys_of(graph, outer)
        try:
            with ExitStack() as stack:
                _enter(stack, recorder, device)
                yield recorder
                recorder.settle()
            with uncollected():
                keep_keys(graph, recorder.tape, names(), keys, body)
                lost = _commit(recorder, before, names(), bound, raise_held, append=append, body=body)
                _keep_guards(recorder, is_cell=is_cell)
        except BaseException as error:
            _take_back(recorder, error)
            if failed is not None and isinstance(error, Exception):
                failed(*_attempted(recorder, error))
            raise
        if listed:
            with _lock:
                _graphs.pop(graph.name, None)
                _graphs[graph.name] = graph
        for said in () if is_cell else recorder.tape.differing:
            warnings.warn(said, stacklevel=user_level(None))
        for note in () if is_cell else lost:
            if not note.nodes and not note.is_quiet:
                warnings.warn(str(note), stacklevel=user_level(None))
            elif note.nodes and not note.is_quiet:
                graph.attached.setdefault(LEFT, []).append(note)


def _take_back(recorder: Recorder, error: BaseException) -> None:
    """End a recording that failed: its nodes become stale, and the error is put in the user's words."""
    recorder.leave()
    _in_letters(recorder, error)
    _explain_python(recorder, error)
    recorder.space.forget({node.id for node in recorder.new})
    recorder.graph.stale.update((node.id, _failed(node)) for node in recorder.new)


def _in_letters(recorder: Recorder, error: BaseException) -> None:
    """Replace torch's size symbols by the user's letters in an error from Python code of torch."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None and last.tb_frame.f_globals.get("__name__", "").startswith("torch."):
        error.args = tuple(recorder.symbols.readable(arg) if isinstance(arg, str) else arg for arg in error.args)


def _explain_python(recorder: Recorder, error: BaseException) -> None:
    """Add a note with the line, and a remedy, to an error of Python's about a size, a number or an empty ``.grad``."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_of_torch(frame)]
    if not frames or not isinstance(error, TypeError | KeyError | AttributeError | ValueError):
        return
    frame, line = next((f for f in reversed(frames) if not is_foreign(f[0].f_code.co_filename)), frames[-1])
    name = file_label(frame.f_code.co_filename)
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
    remedy = _remedy(str(error), text, ", ".join(sorted(recorder.tape.letters)))
    if remedy:
        error.add_note(f"{name} line {line}: {text}\n  {remedy}")


def _remedy(error: str, text: str, letters: str) -> str:
    """The cause of an error of Python's in the terms of recordings, and what to do; empty for another error."""
    fix = "Fix the sizes, tfnb.placeholder(sample, shape=(2, 3, ...)) with numbers for all axes"
    if "unhashable type" in error and "SymInt" in error:
        return (
            f"keeps something by a size that varies ({letters}), as functools.lru_cache and dicts keyed by x.shape do. "
            f"{fix}, or call the function behind the cache (function.__wrapped__)"
        )
    if "SymInt" in error or "numpy.object_" in error or "Rational" in error:
        return (
            f"gives a size that varies ({letters}) to code that needs a number, as NumPy and json do. Compute with "
            f"torch (torch.arange(n) for np.arange(n), n // 2 and n % 2 for divmod), or take int(n). {fix}"
        )
    if "of type Tensor" in error or "from Tensor" in error:
        return (
            "gives a number that staged code took from a tensor, and that each run has anew, to code that needs the "
            "number itself: compute with torch, or take the sample's by .numpy(), as in float(x.sum().numpy())"
        )
    if "NoneType" in error and ".grad" in text:
        return (
            "reads a .grad that is empty: a recording, and each run of it, begins with every .grad None, whatever "
            "stands in it outside. Call opt.zero_grad() instead of zeroing it, and read it below backward()"
        )
    return ""


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _check_device(device: torch.device | str | None) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise InvalidArgument(f"device {device!r} is not available here: {str(error).splitlines()[0]}") from None


def _enter(stack: ExitStack, recorder: Recorder, device: torch.device | str | None) -> None:
    """Enter all modes and hooks of a block; the stack leaves them in reverse order whatever happens."""
    stack.enter_context(_disable_current_modes())  # a nested recording belongs to the inner owner only
    stack.enter_context(surroundings())
    stack.enter_context(own_streams(recorder))
    stack.enter_context(_pushed(recorder))
    stack.enter_context(setting(recorder.symbols, listener=recorder))
    stack.enter_context(follow_modules())
    stack.enter_context(enable_python_dispatcher())
    stack.enter_context(torch._C._AutoDispatchBelowAutograd())
    stack.enter_context(recorder)
    if device is not None:
        stack.enter_context(torch.device(device))
    stack.enter_context(Functions(recorder))
    import tfnb.eager  # noqa: F401 - listed exception: it registers what every recording opens with

    for extension in current.extensions:
        stack.enter_context(extension(recorder))


@contextmanager
def _pushed(recorder: Recorder) -> Iterator[None]:
    current.stack.open.append(recorder)
    try:
        yield
    finally:
        top = current.stack.open.pop()
        if top is not recorder:
            raise FailedPrecondition(
                f"recordings were left out of order: {top.graph.name} is still open inside {recorder.graph.name}"
            )


def _commit(
    recorder: Recorder, before: Contents, names: Mapping[str, Any], bound: Mapping[str, tuple[Value, ...]],
    ready: Callable[[], None], *, append: bool, body: Sequence[ast.stmt],
) -> list[Note]:  # fmt: skip
    """Turn the recorded nodes into the graph's new contents; returns notes of statements and steps that no run
    executes.

    bound: the values that names had when the recording began. ready: the last that may raise.
    """
    bindings, assigned = _assigned_names(recorder, names, bound)
    held = (*recorder.live, *recorder.space.live)
    named = {value.node for values in bindings.values() for value in values}
    live = {t.shown.value.node for t in held} | named
    nodes = drop_unreachable_data(recorder.new, live - _captured(recorder))
    nodes = [recorder.outside.own(node) for node in nodes]
    sizes = _unified(recorder)
    if sizes:
        fixed = {letter: _fixed_by(recorder, letter) for letter, size in sizes.items() if isinstance(size, int)}
        _warn_fixed(sizes, fixed)
        nodes = [substitute(_explained(node, fixed), sizes) for node in nodes]
    nodes, lost = attached(
        recorder.tape.kept, nodes, _user_held(recorder, named, names), recorder.tape.everything, recorder.tape.calls,
        _choices(recorder, body),
    )  # fmt: skip
    lost += [Note(*each) for each in (*recorder.python.kept(), *recorder.carried.notes())]
    if not recorder.is_cell and recorder.stop is not None:
        recorder.tape.draws += unheard_draws(recorder.held, recorder.tape.heard, recorder.stop, body)
        recorder.tape.draws += unheard_clocks(recorder.python.functions, recorder.stop, names, body)
        if recorder.tape.letters:
            lost += notes_of_types(recorder.python.functions, recorder.stop, body)
    lost += notes_of_draws(recorder.tape, names, _results(recorder, names))
    recorder.tape.notes += map(str, lost)
    guards = unified_guards(recorder.tape.guards, sizes)
    space = recorder.space
    change = replaced(
        before, nodes, guards, bindings, recorder.owner, append=append, derivatives=space.derivatives,
        opaque=space.rules, live=live, chosen=recorder.tape.chosen, assigned=space.assigned | assigned,
    )  # fmt: skip
    if recorder.graph.contents is not before:
        raise FailedPrecondition(f"graph {recorder.graph.name} was changed by another thread during this recording")
    ready()
    unused = {n.id for n in recorder.new} - {n.id for n in nodes}
    recorder.graph.commit(change.contents, removed=[*change.gone.items(), *((at, _UNUSED) for at in unused)])
    recorder.graph.notes = recorder.tape.said
    space.assigned |= assigned
    _renew_space(recorder, change, sizes, unused, live)
    return lost


def _renew_space(
    recorder: Recorder, change: Replacement, sizes: dict[str, int | str], unused: set[int], live: set[int]
) -> None:  # fmt: skip
    """Bring the workspace of the graph to its new contents: letters of sizes, samples, handles."""
    space = recorder.space
    space.symbols.relabel(recorder.tape.letters, sizes, change.letters.block, change.letters.below)
    space.derivatives = (*change.derivatives, *recorder.tape.derivatives)
    space.forget(set(change.gone) | unused)
    space.live.update(recorder.live)
    recorder.outside.remember()
    space.renew(change.relinked)
    space.samples.settle(live)


def _keep_guards(recorder: Recorder, *, is_cell: bool) -> None:
    """Attach the guards of a block to its graph, and drop the guards of deleted blocks."""
    graph, source = recorder.graph, recorder.where()
    label = "the block" if source is None else source.label if is_cell else f"{source.label} line {source.line}"
    owners = {node.owner.key for node in graph.nodes if node.owner is not None}
    kept = {key: guards for key, guards in graph.attached.get(GUARDS, {}).items() if key in owners}
    nodes = [graph.contents.by_id.get(node.id, node) for node in recorder.new]  # large constants are copies there
    guards = recorder.python.guards(label, nodes, is_cell=is_cell)
    graph.attached[GUARDS] = kept | {recorder.owner.key: guards}
    recorder.carried.remember()


def _attempted(recorder: Recorder, error: Exception) -> tuple[Graph, Node | None]:
    """The graph as recorded until the error, and the failing op."""
    culprit = next((node for raised, node in filter(None, [recorder.failed]) if raised is error), None)
    nodes = (*recorder.nodes, *filter(None, [culprit]))
    return recorder.graph.derive(Contents(nodes)), culprit


def _failed(node: Node) -> str:
    label = node.source.label if node.source else "its recording"
    return f"{label} failed, and what it had recorded was taken back: run it again without the error"


def _user_held(recorder: Recorder, bound: set[int], names: Mapping[str, Any]) -> set[int]:
    """Ids of the nodes to which the user holds a handle.

    Of the handles that stand for plain tensors, or that modules hold in place of their buffers while the block lasts,
    it is those that have a name. bound: nodes that were assigned to names.
    """
    plain = (*recorder.tape.handles.values(), *recorder.tape.memory.values())
    named = {id(value) for value in names.values()}
    hidden = {id(handle) for tensor, handle in plain if id(tensor) not in named}
    hidden |= {id(binding.given) for binding in recorder.tape.bindings.values()} - named
    tensors = {tensor.shown.value.node for tensor in recorder.live if id(tensor) not in hidden}
    return tensors | bound | {op.value.node for op in recorder.operations}


def _choices(recorder: Recorder, body: Sequence[ast.stmt]) -> dict[int, frozenset[int]]:
    """By guard: the nodes among which its branch cannot have chosen.

    Each had all of its names before, and no statement from the asking one on, and no function of the user's, would have
    given one of these away.
    """
    now, by_id = recorder.named_nodes(), {node.id: node for node in recorder.new}
    space = recorder.python.namespace if recorder.tape.named_above else None
    by_functions = set() if space is None else stored_by_functions(space)
    found: dict[int, frozenset[int]] = {}
    for guard, above in recorder.tape.named_above.items():
        source = by_id[guard].source if guard in by_id else None
        given = by_functions | stored_from(body, None if source is None else source.line)
        loose = {node for _, node in now - above} | {node for name, node in now if name in given}
        found[guard] = frozenset(node for _, node in now & above if node not in loose)
    return found


def _results(recorder: Recorder, names: Mapping[str, Any]) -> dict[str, Value]:
    """The values of the recorded tensors of this block that have a name."""
    tensors = {name: value.shown.value for name, value in names.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.node in recorder.tape.by_id}


def _captured(recorder: Recorder) -> set[int]:
    """Constants that stand for plain tensors: a name that holds one keeps no node."""
    return {node.id for node in recorder.new if node.op == "tfnb.constant"} - recorder.tape.wanted


def _named_values(graph: Graph, names: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    """The values that names of handles of the graph stand for: of a placeholder that was written in place both."""
    found: dict[str, tuple[Value, ...]] = {}
    for name, handle in list(names.items()):
        if not isinstance(handle, (Tensor, Operation)) or handle.graph is not graph or name.startswith("_"):
            continue
        now = handle.shown.value if isinstance(handle, Tensor) else handle.value
        fed = handle._feed if isinstance(handle, Tensor) else None
        found[name] = (now,) if fed in (None, now) else (fed, now)
    return found


def _assigned_names(
    recorder: Recorder, names: Mapping[str, Any], before: Mapping[str, tuple[Value, ...]]
) -> tuple[dict[str, tuple[Value, ...]], dict[int, dict[str, int]]]:  # fmt: skip
    """Name nodes after the Python names of their tensors.

    Returns the values that this recording bound to names, and of the nodes that it named all names of their outputs.
    before: the values that names had when it began. A node that was named in the call that made it keeps that name.
    """
    mine = {node.id for node in recorder.new}
    bindings = {
        name: values
        for name, values in _named_values(recorder.graph, names).items()
        if values[-1].node in mine or (values != before.get(name) and values[-1].node in recorder.tape.by_id)
    }
    done: dict[int, dict[str, int]] = {}
    for name, values in bindings.items():  # of a feed key with another value the key, which is the first of both
        free = (value.node for value in values if value.node in mine and not value.index)
        at = next((node for node in free if ops.NAMED not in recorder.tape.by_id[node].tags), None)
        if at is not None and at not in done:
            done[at] = {}
            recorder.rename(at, clean(name))  # nodes have names of ASCII
    recorder.tape.name_groups(done)
    for name, value in ((name, value) for name, values in bindings.items() for value in values):
        if value.node in done:
            done[value.node][name] = value.index
    return bindings, done


def _unified(recorder: Recorder) -> dict[str, int | str]:
    """Symbols made in this recording that became a number or another symbol: that of another cell, else the first."""
    placeholders = (node for node in recorder.nodes if node.op == "tfnb.placeholder")
    letters = dict.fromkeys(s for node in placeholders for s in node.outputs[0].symbols)
    own = [letter for letter in letters if letter in recorder.tape.letters]
    now = {letter: recorder.symbols.size(recorder.symbols.get(letter)) for letter in letters}
    first: dict[Any, str] = {}  # size -> the letter that stays
    for letter in sorted(letters, key=lambda each: (each in own, each not in recorder.tape.chosen)):
        first.setdefault(now[letter], letter)
    sizes: dict[str, int | str] = {}
    for letter in own:
        size = now[letter]
        if isinstance(size, int):
            sizes[letter] = size
        elif size.is_symbol:
            sizes[letter] = first[size] if size.expr in own else size.expr
    return {letter: size for letter, size in sizes.items() if size != letter}


def _fixed_by(recorder: Recorder, letter: str) -> str:
    """The line whose question made a size a constant; a general text where none is known."""
    found = next((s for text, _, s in recorder.tape.equalities if letter in text.replace("(", " ").split()), None)
    return next((s for text, _, s in recorder.tape.equalities if letter in text), found) or _UNKNOWN_LINE


def _warn_fixed(sizes: Mapping[str, int | str], fixed: Mapping[str, str]) -> None:
    for letter, line in fixed.items():
        at = f" at {line}" if line != _UNKNOWN_LINE else ""
        warnings.warn(
            f"size {letter} became the constant {sizes[letter]}{at}: the graph takes only feeds of that size",
            stacklevel=2,
        )


def _explained(node: Node, fixed: Mapping[str, str]) -> Node:
    """A placeholder with the lines that made constants of its sizes, for the error of a feed of other sizes."""
    if node.op != "tfnb.placeholder":
        return node
    lines = tuple(fixed.get(size.expr, "") if isinstance(size, Dim) else "" for size in node.outputs[0].shape)
    return replace(node, fixed=lines) if any(lines) else node


__all__ = ["InvalidArgument", "forget", "graph", "graphs", "record", "record_cell", "reopen"]
