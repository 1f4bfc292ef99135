"""What converted code calls in place of Python's statements, expressions and calls. `source` writes the calls.

Each looks at what it is given: a recorded tensor that another run may have another way is staged, anything else is
Python's, with what Python would do.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import operator
import os
import sys
import sysconfig
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tfnb.control_flow.parsing import tree_of
from tfnb.control_flow.source import HIDDEN, NotConvertible, bound, function_code, worth
from tfnb.control_flow.staging import (
    MISSING,
    Absent,
    CannotStage,
    Check,
    OtherSide,
    Stage,
    Statement,
    Undefined,
    UndefinedReturnValue,
    as_number,
    guarded,
    is_number,
    is_users,
    note_python,
    recorder_for,
    sample_truth,
    stage_if,
    status,
)  # fmt: skip
from tfnb.control_flow.structure import recorder_if_open
from tfnb.recording import Recorder, Tensor
from tfnb.recording.regions import _Before

__all__ = ["Absent", "Undefined", "UndefinedReturnValue"]

State = Callable[[], tuple[Any, ...]]


# -- names --------------------------------------------------------------------------------------------------------


def ld(value: Any) -> Any:
    """A name's value where it is read."""
    return value.read() if isinstance(value, Undefined) else value


def ldu(load: Callable[[], Any], name: str) -> Any:
    """A name's or attribute's value, or `Undefined`."""
    try:
        return load()
    except (NameError, AttributeError, KeyError):
        return Undefined(name)


class scope:
    """Around the body of a converted function."""

    def __enter__(self) -> scope:
        status.active += 1
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        status.active -= 1

    def ret(self, value: Any, returned: Any) -> Any:
        """What the function gives: where only a run knows whether it returned, the run must agree with the samples."""
        if isinstance(value, UndefinedReturnValue):
            return None
        recorder = recorder_for(returned)
        if recorder is None:
            return value
        outcome = sample_truth(returned)
        if outcome is False:
            recorder.branch(returned, False)
            return None
        return guarded(recorder, value, returned, True)()


# -- statements ---------------------------------------------------------------------------------------------------


def if_stmt(
    test: Any, body: Callable[[], None], orelse: Callable[[], None], get: State, set: Callable[[Any], None],
    names: tuple[str, ...], wanted: int,
) -> None:  # fmt: skip
    """``if test: body() else: orelse()``; the first ``wanted`` names are needed afterwards."""
    recorder = recorder_for(test)
    if recorder is None:
        body() if test else orelse()
        return
    _branched(Statement("if", recorder, names, get, set), test, body, orelse, wanted)


def _branched(
    st: Statement, test: Tensor, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Staged, or else by Python, with a guard."""
    try:
        return stage_if(st, test, body, orelse, wanted)
    except OtherSide as side:
        return body() if side.other else orelse()
    except Check as check:
        if not check.is_raise:
            note_python(st, f"the branch that the sample does not take fails: {check}")
        is_check = check.is_raise
    except CannotStage as why:
        note_python(st, why)
        is_check = False
    outcome, before, earlier = bool(test.sample), st.get(), set(st.recorder.tape.by_id)
    st.recorder.branch(test, outcome, is_check=is_check)
    body() if outcome else orelse()
    if not is_check:
        st.set(tuple(_guarded(st.recorder, v, old, earlier) for v, old in zip(st.get(), before, strict=True)))


def _guarded(recorder: Recorder, value: Any, old: Any, earlier: Container[int]) -> Any:
    """A name's value after a branch that Python took: a value from before the guard is one of after it."""
    if value is old or not isinstance(value, Tensor) or value.shown.value.node not in earlier:
        return value
    return value.clone()


def while_stmt(
    test: Callable[[], Any], body: Callable[[], None], get: State, set: Callable[[Any], None], names: tuple[str, ...],
    options: Any,
) -> None:  # fmt: skip
    """``while test(): body()``; staged from the turn on that a recorded tensor decides about."""
    tried = False
    while True:
        recorder = None if tried else _staging()
        before = None if recorder is None else _Before(recorder)
        found = test()
        staged = recorder_for(found)
        if staged is None or before is None:
            if not found:
                return
            body()
            continue
        before.undo()  # it is recorded again as the condition
        st = Statement("while", staged, names, get, set)
        if _staged(st, lambda st=st: Stage(st).record(test, body), body):  # type: ignore[misc]
            return
        tried = True


def for_stmt(
    items: Any, more: Callable[[], Any] | None, body: Callable[[Any], None], get: State, set: Callable[[Any], None],
    names: tuple[str, ...], options: Any,
) -> None:  # fmt: skip
    """``for each in items: body(each)`` as long as ``more()``."""
    recorder = _staging()
    turns = None if recorder is None else _turns(items)
    if recorder is not None and turns is not None:
        st = Statement("for", recorder, names, get, set)
        if _staged(st, lambda: turns.stage(st, more, body), lambda: body(next(iter(items)))):
            return
    for each in items:
        test: Any = True if more is None else more()
        staged = recorder_for(test)
        if staged is not None:  # a turn before left the loop in some runs
            st = Statement("for", staged, names, get, set)
            _branched(st, test, functools.partial(body, each), _nothing, len(names))
        elif test:
            body(each)
        else:
            return


def _staged(st: Statement, stage: Callable[[], None], turn: Callable[[], None]) -> bool:
    """Whether a loop could be staged; a user's error in its first turn is raised."""
    try:
        stage()
        return True
    except CannotStage as error:
        why = error
    if is_users(why.__cause__ or why):
        st.tried(turn)
    note_python(st, why)
    return False


def _nothing() -> None:
    pass


def _given(item: Any) -> Any:
    return item


def _staging() -> Recorder | None:
    return None if status.off else recorder_if_open()


# -- what a loop may go over --------------------------------------------------------------------------------------


class Range:
    """``range`` of recorded numbers and varying sizes."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.start, self.stop, self.step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]

    def __iter__(self) -> Iterator[int]:
        return iter(range(*(int(arg) for arg in self.args)))

    def __len__(self) -> int:
        return len(range(*(int(arg) for arg in self.args)))

    def stage(self, st: Statement, more: Any, body: Callable[[Any], None]) -> None:
        by_size = not any(isinstance(arg, torch.Tensor) for arg in self.args)
        start, stop, step = (
            torch.ops.aten.scalar_tensor(arg, dtype=torch.int64) if isinstance(arg, torch.SymInt) else arg
            for arg in (self.start, self.stop, self.step)
        )
        with st.staging():
            span = torch.as_tensor(stop - start)
            turns = span if isinstance(step, int) and step == 1 else torch.div(span + step - _sign(step), step,
                                                                                rounding_mode="floor")  # fmt: skip
        Stage(st, by_size=by_size).record(more, body, limit=turns.clamp(min=0), first=start, step=step)


def _sign(step: Any) -> Any:
    return torch.sign(step) if isinstance(step, torch.Tensor) else (1 if step > 0 else -1)


class Rows:
    """The rows of tensors of a varying length: of one, of several together, or with their number."""

    def __init__(self, tensors: tuple[Any, ...], shape: Callable[..., Any], plain: Callable[[], Any]) -> None:
        self.tensors, self.shape, self.plain = tensors, shape, plain

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plain())

    def stage(self, st: Statement, more: Any, body: Callable[[Any], None]) -> None:
        Stage(st, by_size=True).record(
            more, lambda index, *rows: body(self.shape(index, *rows)), xs=self.tensors, first=0
        )


def _turns(items: Any) -> Range | Rows | None:
    """How to stage a loop over these items; None where Python goes over them."""
    if isinstance(items, (Range, Rows)):
        return items
    if _varies(items):
        return Rows((items,), lambda index, row: row, lambda: items)
    return None


def _varies(item: Any) -> bool:
    """Whether only a run knows how many rows there are."""
    return isinstance(item, Tensor) and item.dim() > 0 and isinstance(item.shape[0], torch.SymInt)


def _range(*args: Any) -> Any:
    known = all(not isinstance(arg, (torch.SymInt, Tensor)) for arg in args)
    whole = all(
        isinstance(arg, (int, torch.SymInt)) or (isinstance(arg, Tensor) and not arg.dim() and _is_whole(arg))
        for arg in args
    )
    return range(*args) if known or not whole or not 0 < len(args) < 4 else Range(*args)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool


def _enumerate(items: Any, start: Any = 0) -> Any:
    if not _varies(items):
        return enumerate(items, start)
    return Rows((items,), lambda index, row: (index + start, row), lambda: enumerate(items, start))


def _zip(*items: Any, strict: bool = False) -> Any:
    same = items and all(map(_varies, items)) and all(
        i.shape[0].node.expr == items[0].shape[0].node.expr for i in items
    )  # fmt: skip
    if not same:
        return zip(*items, strict=strict)
    return Rows(items, lambda index, *rows: rows, lambda: zip(*items, strict=strict))


def _len(item: Any) -> Any:
    return item.shape[0] if _varies(item) else len(item)


def _print(*args: Any, **options: Any) -> None:
    if not status.quiet:
        print(*args, **options)  # noqa: T201  the user's


def _best(name: str, is_better: Callable[[Any, Any], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``max`` or ``min``: where a recorded number is among the items, each run chooses."""

    def best(*items: Any, **options: Any) -> Any:
        found = list(items[0]) if len(items) == 1 and isinstance(items[0], (list, tuple)) else list(items)
        if options or len(found) < 2 or not any(isinstance(item, Tensor) and not item.dim() for item in found):
            return plain(*items, **options)
        chosen = found[0]
        for item in found[1:]:
            test = is_better(item, chosen)
            recorder = recorder_for(test)
            if recorder is None:
                chosen = item if test else chosen
            else:
                better, now = functools.partial(_given, item), functools.partial(_given, chosen)
                chosen = _chosen(name, recorder, test, better, now)
        return chosen

    return best


_BUILTINS: dict[Any, Callable[..., Any]] = {
    range: _range, enumerate: _enumerate, zip: _zip, len: _len, print: _print,
    max: _best("max", operator.gt, max), min: _best("min", operator.lt, min),
}  # fmt: skip


# -- expressions ----------------------------------------------------------------------------------------------------


def if_exp(test: Any, body: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
    """``body() if test else orelse()``."""
    recorder = recorder_for(test)
    if recorder is None:
        return body() if test else orelse()
    return _chosen("if else", recorder, test, body, orelse)


def and_(first: Any, rest: Callable[[], Any]) -> Any:
    """``first and rest()``."""
    recorder = recorder_for(first)
    if recorder is None:
        return first and rest()
    return _chosen("and", recorder, first, rest, lambda: _like(first))


def or_(first: Any, rest: Callable[[], Any]) -> Any:
    """``first or rest()``."""
    recorder = recorder_for(first)
    if recorder is None:
        return first or rest()
    return _chosen("or", recorder, first, lambda: _like(first), rest)


def not_(item: Any) -> Any:
    """``not item``."""
    return not item if recorder_for(item) is None else torch.logical_not(item)


_AUGMENTED = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "MatMult": operator.imatmul,
    "BitAnd": operator.iand, "BitOr": operator.ior, "BitXor": operator.ixor, "LShift": operator.ilshift,
    "RShift": operator.irshift,
}  # fmt: skip
_NEW = {name: getattr(operator, function.__name__[1:], None) for name, function in _AUGMENTED.items()} | {
    "BitAnd": operator.and_, "BitOr": operator.or_,
}  # fmt: skip


def augmented(kind: str, item: Any, value: Any) -> Any:
    """``item += value``; what was a number is another one then, and not the same tensor with another value."""
    item = ld(item)
    if not is_number(item):
        return _AUGMENTED[kind](item, value)
    return as_number(_NEW[kind](item, value))


def _like(first: Tensor) -> Any:
    return first.clone()


def _chosen(
    what: str, recorder: Recorder, test: Tensor, body: Callable[[], Any], orelse: Callable[[], Any]
) -> Any:  # fmt: skip
    slot: list[Any] = [Undefined("the expression")]

    def hold(values: tuple[Any, ...]) -> None:
        slot[0] = values[0]

    def put(way: Callable[[], Any]) -> Callable[[], None]:
        return lambda: hold((way(),))

    st = Statement(what, recorder, ("the expression",), lambda: (slot[0],), hold)
    _branched(st, test, put(body), put(orelse), 1)
    return slot[0]


# -- what bodies do to Python's objects -------------------------------------------------------------------------------

_CONTAINERS = (list, dict, set, bytearray, collections.deque)
_CHANGES = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem", "add",
    "discard", "appendleft", "extendleft", "popleft", "rotate", "difference_update", "intersection_update",
    "symmetric_difference_update", "__setitem__", "__delitem__",
})  # fmt: skip


def made(container: Any) -> Any:
    """A list, dict or set that was just written down."""
    if status.depth:
        status.made.append(container)
    return container


def changed(owner: Any, name: str | None = None) -> Any:
    """An object of which an item, or the attribute ``name``, is about to be set or deleted."""
    if not status.depth or isinstance(owner, torch.Tensor):
        return owner
    if name is not None:
        status.attributes.append((owner, name, getattr(owner, name, MISSING)))
    elif isinstance(owner, _CONTAINERS):
        _refuse_change(owner, "an item is set")
    return owner


def _refuse_change(owner: Any, how: str) -> None:
    if all(owner is not other for other in status.made):
        raise CannotStage(f"{how} in a {type(owner).__name__} that was made outside of it")


# -- calls ------------------------------------------------------------------------------------------------------------

_MARK = "__tfnb_converted__"
_factories: WeakKeyDictionary[CodeType, CodeType | None] = WeakKeyDictionary()
_FOREIGN = tuple({
    *(f"{Path(__file__).parent.parent.parent / room}{os.sep}" for room in ("tfnb", "kernels", "magics", "widgets")),
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(torch.__file__).parent}{os.sep}", "<frozen", "<string>",
})  # fmt: skip


def fn(function: Any) -> Any:
    """What to call in place of ``function``: the converted one if it is the user's, and its source is there."""
    if status.off or recorder_if_open() is None:
        return function
    kind = type(function)
    if kind is FunctionType:
        return _function(function)
    if kind is MethodType:
        inner = fn(function.__func__)
        return function if inner is function.__func__ else MethodType(inner, function.__self__)
    if kind is BuiltinMethodType:
        return _builtin(function)
    if kind is functools.partial:
        return functools.partial(fn(function.func), *function.args, **function.keywords)
    if isinstance(function, type):
        found = _BUILTINS.get(function, function)
        return _noted(found) if status.depth and issubclass(function, _CONTAINERS) else found
    own = inspect.getattr_static(kind, "__call__", None)
    if isinstance(own, FunctionType) and not isinstance(function, torch.nn.Module):
        inner = _function(own)
        return function if inner is own else MethodType(inner, function)
    return function


def is_foreign(filename: str) -> bool:
    """Whether a file is of Python, of tfnb, or of an installed package."""
    return filename.startswith(_FOREIGN) or f"{os.sep}site-packages{os.sep}" in filename


def _builtin(function: Any) -> Any:
    owner = function.__self__
    if status.depth and isinstance(owner, _CONTAINERS) and function.__name__ in _CHANGES:
        _refuse_change(owner, f"{function.__name__}()")
    return _BUILTINS.get(function, function) if isinstance(owner, ModuleType) else function


def _noted(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: made(kind(*args, **kwargs))


def _function(function: FunctionType) -> FunctionType:
    code = function.__code__
    if _MARK in function.__dict__ or HIDDEN in code.co_freevars:  # a lambda of converted code has no mark
        return function
    if code not in _factories:
        _factories[code] = None if is_foreign(code.co_filename) else _factory(code)
    factory = _factories[code]
    if factory is None:
        return _rewrapped(function)
    return marked(bound(factory, function, sys.modules[__name__]))


def _factory(code: CodeType) -> CodeType | None:
    """None where there is nothing to convert; in the margin, where that fails."""
    try:
        tree = tree_of(code)
        return function_code(code, tree) if worth(tree) else None
    except NotConvertible as why:
        recorder = recorder_if_open()
        if recorder is not None:
            recorder.notes.append(f"{code.co_qualname}, line {code.co_firstlineno}, stays Python: {why}")
        return None


def _rewrapped(function: FunctionType) -> FunctionType:
    """A decorator's function around one of the user's: the same, around the converted one."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, FunctionType) or not function.__closure__:
        return function
    new = fn(inner)
    cells = [CellType(new) if _content(cell) is inner else cell for cell in function.__closure__]
    if new is inner or all(a is b for a, b in zip(cells, function.__closure__, strict=True)):
        return function
    wrapper = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )  # fmt: skip
    wrapper.__kwdefaults__ = function.__kwdefaults__
    wrapper.__dict__.update(function.__dict__)
    return wrapper


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def converted(function: Any) -> Any:
    """``function`` as converted code calls it; as it is, where none runs."""
    return fn(function) if status.active else function


def marked(function: Any) -> Any:
    """A function that is converted already."""
    with contextlib.suppress(AttributeError):
        function.__dict__[_MARK] = True
    return function
