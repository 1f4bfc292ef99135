"""Operators that converted code calls in place of Python's statements and expressions. `source` writes the calls.

Each looks at what it is given: a recorded tensor that another run may have another way is staged, anything else is
Python's, with what Python would do.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.branching import below_guard, branched, chosen, taken_by_python
from tfnb.control_flow.staging.containers import CONTAINERS, attribute, changed, made, own_method, refuse_change
from tfnb.control_flow.staging.conversion import OPERATORS, fn, marked
from tfnb.control_flow.staging.generators import Consumer, Generator
from tfnb.control_flow.staging.iterables import iterations_of
from tfnb.control_flow.staging.lists import grown, length, plain
from tfnb.control_flow.staging.lists import item as item_of
from tfnb.control_flow.staging.looping import Iterations, LoopStaging, staged_loop
from tfnb.control_flow.staging.python_numbers import given, needed
from tfnb.control_flow.staging.statement import (
    Setter,
    State,
    Statement,
    as_number,
    as_test,
    is_number,
    note_peeled,
    note_python,
    recorder_for,
    recorder_of_sizes,
    status,
)
from tfnb.control_flow.staging.unset import Undefined, UndefinedReturnValue
from tfnb.control_flow.staging.user_frames import user_frame, user_line
from tfnb.control_flow.structure import recorder_if_open, sample_truth
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import Savepoint

# -- names --------------------------------------------------------------------------------------------------------


def ld(value: object) -> Any:
    """The value of a name at a read."""
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

    def ret(self, value: object, returned: Any) -> Any:
        """The result of a function. If only a run knows whether it returned, the run must agree with the samples."""
        if isinstance(value, UndefinedReturnValue):
            return None
        recorder = recorder_for(returned)
        if recorder is None:
            return value
        name = user_frame().f_code.co_name
        because = f"{name} returns nothing in some runs: let it return a value on every way"
        note = f"{because}; a run must return where it returned for the samples"
        if note not in recorder.tape.notes:
            recorder.tape.notes.append(note)
        has_returned, earlier = sample_truth(recorder, returned) is not False, recorder.tape.by_id.copy()
        recorder.branch(returned, has_returned, is_check=True, because=because)
        if not has_returned:
            return None
        return tree_map(lambda leaf: below_guard(recorder, leaf, None, earlier), value)


def _asked(test: Any) -> Any:
    """The actual test: the length of a grown list, the comparison of a size with zero."""
    return as_test(length(test) if grown(test) else test)


def of_frame(function: Callable[..., Any], names: dict[str, Any] | None, *args: Any) -> Any:
    """``locals()``, ``vars()``, ``dir()``, ``eval(text)`` or ``exec(text)``, of the scope that the call was written in.

    names: those of a function; None for a cell, which has those of the notebook.
    """
    outside = sys._getframe(1).f_globals
    names = outside if names is None else {n: v for n, v in names.items() if not isinstance(v, Undefined)}
    if function is builtins.exec:
        if status.depth:
            raise CannotStage(f"{user_line()} runs a text, which may set any name")
        return exec(args[0], outside, names)
    if function is builtins.eval:
        return eval(args[0], outside, names)
    if function in (builtins.locals, builtins.vars):
        return names
    return sorted(names) if function is builtins.dir else fn(function)(*args)


# -- statements ---------------------------------------------------------------------------------------------------


def if_stmt(
    test: object, body: Callable[[], None], orelse: Callable[[], None], get: State, set: Setter,
    names: tuple[str, ...], wanted: int,
) -> None:  # fmt: skip
    """``if test: body() else: orelse()``; the first ``wanted`` names are needed afterwards."""
    test = _asked(test)
    recorder = recorder_for(test)
    if recorder is None:
        body() if test else orelse()
        return
    branched(Statement("if", recorder, names, get, set), test, body, orelse, wanted)


def while_stmt(
    test: Callable[[], Any], body: Callable[[], None], get: State, set_: Setter, names: tuple[str, ...],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """``while test(): body()``; staged from the iteration on that a recorded tensor decides about."""
    because, first, count, start = None, get(), 0, None
    while True:
        recorder = None if because else _staging()
        before = None if recorder is None else Savepoint(recorder)
        found = _asked(test())
        staged = recorder_for(found) or recorder_of_sizes(found)
        if staged is None or before is None:
            if not (found if staged is None else taken_by_python(staged, found, None, because=because)):
                if staged is not None:  # in other runs the loop goes on
                    earlier = staged.tape.by_id.copy()
                    set_(tuple(below_guard(staged, v, old, earlier) for v, old in zip(get(), first, strict=True)))
                if start is not None and recorder is not None:
                    _note_unrolled(Statement("while", recorder, names, get, set_), count, start)
                return
            if start is None and isinstance(found, Tensor) and recorder is not None:
                start = len(recorder.new)
            body()
            count += 1
            continue
        before.undo()  # it is recorded again as the condition
        st = Statement("while", staged, names, get, set_)
        entered = sample_truth(staged, found) is not False
        stage = functools.partial(LoopStaging, st, by_size=not isinstance(found, Tensor), entered=entered)
        try:
            iterations = functools.partial(_iterations, stage, test, body)
            because = staged_loop(st, iterations, body if entered else _nothing, peels=entered)
            if because is None:
                return
        except CannotStage as why:
            note_peeled(st, why)
            unrolled = f"the first iteration of the `while` always runs: {why}; give it a value before the loop"
            taken_by_python(staged, _asked(test()), True, is_check=True, because=unrolled)
            body()


def _iterations(stage: Callable[[], LoopStaging], test: Callable[[], Any], body: Callable[[], None]) -> None:
    stage().record(Iterations(test, body))


def for_stmt(
    items: Any, more: Callable[[], Any] | None, body: Callable[[Any], None], get: State, set: Setter,
    names: tuple[str, ...], options: Mapping[str, Any],
) -> None:  # fmt: skip
    """``for each in items: body(each)`` as long as ``more()``."""
    recorder = _staging()
    if recorder is not None and isinstance(items, Generator):
        return items.loop(Consumer(body, more, get, set, names))
    iterations = None if recorder is None else iterations_of(items)
    while recorder is not None and iterations is not None:
        st = Statement("for", recorder, names, get, set)
        try:
            stage, first = functools.partial(iterations.stage, st, more, body), functools.partial(_first, items, body)
            if staged_loop(st, stage, first, peels=True) is None:
                return
            break
        except CannotStage as why:
            parted = iterations.parted(recorder)
            if parted is None:
                note_python(st, why)
                break
            note_peeled(st, why)
            each, iterations = parted
            items = iterations
            body(each)
    for each in _unrolled(recorder, items, names):
        test: Any = True if more is None else more()
        staged = recorder_for(test)
        if staged is not None:  # an iteration before left the loop in some runs
            st = Statement("for", staged, names, get, set)
            branched(st, test, functools.partial(body, each), _nothing, len(names))
        elif test:
            body(each)
        else:
            return


def _unrolled(recorder: Recorder | None, items: Sequence[Any], names: tuple[str, ...]) -> Iterator[Any]:
    """The items, one by one. A DataLoader, or a tensor that no feed changes, is noted where several become nodes."""
    is_loader = recorder is not None and _is_loader(plain(items))
    if recorder is None or not (is_loader or _is_unfed(recorder, items)):
        yield from items
        return
    st, start, count = Statement("for", recorder, names, tuple, lambda _: None), len(recorder.new), 0
    fixed = len(recorder.tape.fixed)
    try:
        for each in items:
            count += 1
            yield each
    finally:
        if not is_loader:
            _note_unrolled(st, count, start)
        elif (made := len(recorder.new) - start) and count > 1:
            del recorder.tape.fixed[fixed:]  # what follows says more
            recorder.tape.notes.append(
                f"{st.place}: this `for` over a DataLoader was unrolled: {count} batches are {made} nodes of the "
                "graph, with these data in every run. Record one step, with a placeholder for each part of a batch, "
                "and go over the data outside of the cell: `tfnb.fit(step, loader, feeds=(x, y))`, or `for a, b in "
                "loader: tfnb.run(step, {x: a, y: b})`"
            )


def _is_unfed(recorder: Recorder, items: object) -> bool:
    """Whether items are rows of a tensor that does not depend on placeholders."""
    if not isinstance(items, Tensor):
        return isinstance(items, torch.Tensor)
    return items.graph is not recorder.graph or not recorder.tape.is_fed(recorder._entry(items).value)


def _note_unrolled(st: Statement, count: int, start: int) -> None:
    """In the margin: a loop of Python whose iterations no feed changes, with the nodes from ``start``."""
    made = len(st.recorder.new) - start
    if made > 0 and count > 1:
        st.recorder.tape.notes.append(
            f"{st.place}: this `{st.what}` derives from no placeholder and was unrolled: {count} iterations are {made} "
            f"nodes of the graph; tfnb.{'scan' if st.what == 'for' else 'while_loop'} records one"
        )


def _is_loader(items: object) -> bool:
    """Whether items are batches of a DataLoader, possibly inside ``enumerate`` or a progress bar."""
    if isinstance(items, (enumerate, zip)):
        return any(map(_is_loader, items.__reduce__()[1]))
    if type(items) is tuple:  # the parts of a zip
        return any(map(_is_loader, items))
    batches = getattr(items, "iterable", items)
    return isinstance(batches, DataLoader) or type(batches).__module__ == DataLoader.__module__  # its iterators


def _nothing() -> None:
    pass


def _first(items: Sequence[Any], body: Callable[[Any], Any]) -> None:
    """The first iteration, if there is one."""
    for each in items:
        body(each)
        return


def _staging() -> Recorder | None:
    return None if status.off else recorder_if_open()


# -- expressions ----------------------------------------------------------------------------------------------------


def if_exp(test: Any, body: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
    """``body() if test else orelse()``."""
    test = _asked(test)
    recorder = recorder_for(test)
    if recorder is None:
        return body() if test else orelse()
    return chosen("if else", recorder, test, body, orelse)


def and_(first: object, rest: Callable[[], Any]) -> Any:
    """``first and rest()``."""
    test = _asked(first)
    recorder = recorder_for(test)
    if recorder is None:
        return rest() if test else first
    return chosen("and", recorder, test, rest, lambda: _like(first))


def or_(first: object, rest: Callable[[], Any]) -> Any:
    """``first or rest()``."""
    test = _asked(first)
    recorder = recorder_for(test)
    if recorder is None:
        return first if test else rest()
    return chosen("or", recorder, test, lambda: _like(first), rest)


def not_(item: object) -> Any:
    """``not item``."""
    item = _asked(item)
    if recorder_for(item) is None:
        return not item
    return torch.logical_not(item) if isinstance(item, torch.Tensor) else torch.sym_not(item)


_AUGMENTED = {
    "Add": operator.iadd, "Sub": operator.isub, "Mult": operator.imul, "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv, "Mod": operator.imod, "Pow": operator.ipow, "MatMult": operator.imatmul,
    "BitAnd": operator.iand, "BitOr": operator.ior, "BitXor": operator.ixor, "LShift": operator.ilshift,
    "RShift": operator.irshift,
}  # fmt: skip
_NEW = {name: getattr(operator, function.__name__[1:], None) for name, function in _AUGMENTED.items()} | {
    "BitAnd": operator.and_, "BitOr": operator.or_,
}  # fmt: skip


def augmented(kind: str, item: object, value: object) -> Any:
    """``item += value``; a number becomes a new number, never the same tensor with another value."""
    item = ld(item)
    recorder = recorder_if_open()
    if not is_number(item) and not (isinstance(item, Tensor) and recorder is not None and recorder.is_taken(item)):
        return _changed_in_place(kind, item, value)
    return as_number(_NEW[kind](item, value))


def _changed_in_place(kind: str, item: object, value: object) -> Any:
    function = _AUGMENTED[kind]
    if isinstance(item, CONTAINERS) and status.depth:
        refuse_change(item, f"{function.__name__}()")
    elif own_method(item, f"__{function.__name__}__") is not None:
        found = fn(getattr(item, f"__{function.__name__}__"))(value)
        if found is not NotImplemented:
            return found
    return function(item, value)


def _like(first: object) -> Any:
    return first.clone() if isinstance(first, torch.Tensor) else first


def rebinds(*names: str) -> None:
    """A function of the user's is called that binds names of outside."""
    if status.depth:
        raise CannotStage(f"a function called in it sets {', '.join(names)} of outside")


def caught() -> BaseException | None:
    """The exception of an ``except X as e``."""
    return sys.exc_info()[1]


def items(owner: object) -> Any:
    """The items that a comprehension or a ``*`` goes over."""
    recorder = _staging()
    if recorder is not None and iterations_of(plain(owner)) is not None:
        st = Statement("for", recorder, (), tuple, lambda _: None)
        note_python(st, "it is a comprehension, which goes over as many as the samples have: write a loop")
    return owner


def item(owner: Any, index: Any) -> Any:
    """``owner[index]``."""
    if grown(owner):
        return item_of(owner, index)
    if isinstance(index, torch.SymBool) and isinstance(owner, (tuple, *CONTAINERS)):
        index = bool(index)  # a run must answer the test of sizes as the sample does
    if isinstance(owner, dict):  # a tensor may be a key
        return owner[given(index)]
    return owner[needed(index) if type(owner) in (list, tuple, str, range) else index]


def part(owner: Any, start: Any, stop: Any, step: Any) -> Any:
    """``owner[start:stop:step]``."""
    if type(plain(owner)) in (list, tuple, str):
        start, stop, step = map(needed, (start, stop, step))
    return owner[start:stop:step]


vars(OPERATORS).update({
    each.__name__: each for each in (
        Undefined, UndefinedReturnValue, ld, ldu, of_frame, scope, if_stmt, while_stmt, for_stmt, if_exp, and_, or_,
        not_, augmented, caught, item, part, plain, items, made, changed, attribute, rebinds, fn, marked,
    )
})  # fmt: skip
