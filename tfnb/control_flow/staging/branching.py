"""Branches of converted code: both are run on the recorder, as `tfnb.cond` does.

What the names hold before and after is what the branch takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tfnb.control_flow.frontend.cannot_stage import CannotStage, Instead
from tfnb.control_flow.staging.alias_analysis import Bases, bases_of
from tfnb.control_flow.staging.phi import After, Phi
from tfnb.control_flow.staging.statement import (
    EXPRESSION,
    Statement,
    as_test,
    is_users,
    note_python,
    reason,
    result_of,
)
from tfnb.control_flow.staging.unset import Undefined
from tfnb.control_flow.structure import SIZES, sample_truth, truth
from tfnb.errors import TfnbError
from tfnb.graph import Dim, Variable
from tfnb.interrupts import from_signal_handler
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import axes, record_region
from tfnb.recording.subgraphs.loop_node import DISAGREE
from tfnb.recording.subgraphs.recursive_calls import Unfinished
from tfnb.recording.writes.aliases import REFUSED, copy_of

_PACKAGE = str(Path(__file__).parents[2])


def branched(
    st: Statement, test: object, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Staged, or else by Python, with a guard."""
    test = as_test(test)
    try:
        return stage_if(st, test, body, orelse, wanted)
    except CannotStage as error:
        why = error
    except Exception:  # which a `try` of the program may catch: what follows is of runs that raise it, too
        if isinstance(test, Tensor) and sample_truth(st.recorder, test) is not None:
            taken_by_python(st.recorder, test, None, is_check=True)
        raise
    if why.instead is Instead.ONE_BRANCH:
        return body() if why.branch else orelse()
    is_check = why.instead is Instead.CHECK
    if not is_check:
        fails = why.instead is Instead.OTHER_FAILS
        note_python(st, f"the branch that the sample does not take fails: {why}" if fails else why)
    raises = f"{str(why).rstrip(': ')} ({st.place})" if is_check else None
    before, earlier = st.get(), set(st.recorder.tape.by_id)
    because = f"the `{st.what}` is Python's: {why}"
    outcome = taken_by_python(st.recorder, test, why.branch, is_check=is_check, raises=raises, because=because)
    body() if outcome else orelse()
    if not is_check and isinstance(test, Tensor):
        st.set(tuple(below_guard(st.recorder, v, old, earlier) for v, old in zip(st.get(), before, strict=True)))


def taken_by_python(
    recorder: Recorder, test: Any, outcome: bool | None, *, is_check: bool = False, raises: str | None = None,
    because: str | None = None,
) -> bool:  # fmt: skip
    """The outcome of a test, guarded from here on; by default the truth of the sample."""
    if isinstance(test, torch.SymBool):
        return recorder.symbols.decided(test)
    outcome = bool(test.sample) if outcome is None else outcome
    recorder.branch(test, outcome, is_check=is_check, raises=raises, because=because)
    return outcome


def below_guard(recorder: Recorder, value: Any, old: Any, earlier: Container[int]) -> Any:
    """A name's value after a branch or loop taken by Python: values from before the guard are copied below it."""
    if value is old or not isinstance(value, Tensor) or value.shown.value.node not in earlier:
        return value
    why = "a branch or loop that Python took gave one name what another one holds"
    return copy_of(recorder, value, why)


def chosen(
    what: str, recorder: Recorder, test: Tensor, body: Callable[[], Any], orelse: Callable[[], Any]
) -> Any:  # fmt: skip
    slot: list[Any] = [Undefined(EXPRESSION)]

    def hold(values: tuple[Any, ...]) -> None:
        slot[0] = values[0]

    def put(way: Callable[[], Any]) -> Callable[[], None]:
        return lambda: hold((way(),))

    st = Statement(what, recorder, (EXPRESSION,), lambda: (slot[0],), hold)
    branched(st, test, put(body), put(orelse), 1)
    return slot[0]


def _is_raised(error: Exception) -> bool:
    """Whether the user's own line raised the error, not a package."""
    if isinstance(error, (CannotStage, TfnbError)):
        return False
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return not (frames and (frames[-1].startswith(_PACKAGE) or "site-packages" in frames[-1]))


def stage_if(
    st: Statement, test: object, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Both branches into the graph; the first ``wanted`` names are needed afterwards. Raises CannotStage."""
    recorder = st.recorder
    test = truth(recorder, test, st.what)
    before, taken = st.get(), sample_truth(recorder, test)
    with st.staging(), recorder.scope(st.what.split()[0]) as scope:
        after = _both(st, taken, {True: body, False: orelse}, before, scope, wanted)
        values = Phi(st, test, taken, before, after[True], after[False]).values(wanted)
    st.set(values)


def _both(
    st: Statement, taken: bool | None, ways: dict[bool, Callable[[], None]], before: tuple[Any, ...],
    scope: str, wanted: int,
) -> dict[bool, After]:  # fmt: skip
    """Both branches, the one that the samples take first."""
    after: dict[bool, After] = {}
    for side in (True, False) if taken is not False else (False, True):
        try:
            is_other = side is not (taken is not False)
            after[side] = _branch(
                st, ways[side], before, scope, wanted, quiet=is_other, entered=taken in (None, side)
            )  # fmt: skip
        except Unfinished:
            why = "a function that it calls is being recorded"
            raise CannotStage(why, Instead.ONE_BRANCH, branch=not side) from None
        except Exception as error:
            is_here = side is taken and (st.recorder.entered or not _is_raised(error))
            if _disagrees(error) or from_signal_handler(error) or (is_here and is_users(error)):
                raise
            if is_here or isinstance(error, CannotStage):
                raise CannotStage(reason(error)) from error
            instead = Instead.CHECK if _is_raised(error) else Instead.OTHER_FAILS
            raise CannotStage(reason(error), instead, branch=not side) from error
    return after


def _disagrees(error: Exception) -> bool:
    """Whether branches do not fit each other: an error, where Python could not take the one that is meant."""
    return getattr(error, "details", None) in (REFUSED, DISAGREE)


def _branch(
    st: Statement, way: Callable[[], None], before: tuple[Any, ...], scope: str, wanted: int, *, quiet: bool,
    entered: bool,
) -> After:  # fmt: skip
    recorder = st.recorder
    found: list[Any] = []
    calls = 0

    def call() -> list[Tensor]:
        nonlocal calls
        start = len(recorder.new)
        st.set(before)
        with st.body(quiet or calls > 0):
            calls += 1
            way()
            values = st.get()
        outputs: dict[tuple[int, int], int] = {}
        bases: dict[tuple[int, int], Bases] = {}
        tensors: list[Tensor] = []
        own = axes(spec for node in recorder.new[start:] for spec in node.outputs)
        for place, value in enumerate(values[:wanted]):
            changed = value is not before[place]
            for leaf_place, leaf in enumerate(tree_flatten(value)[0]):
                is_given = isinstance(leaf, Tensor) or (changed and isinstance(leaf, (torch.Tensor, Variable)))
                if is_given or _is_of(own, recorder, leaf):
                    outputs[place, leaf_place] = len(tensors)
                    bases[place, leaf_place] = bases_of(recorder, leaf)
                    tensors.append(result_of(recorder, leaf))
        found[:] = [values, outputs, bases]
        st.set(before)
        st.refuse_attributes()
        return tensors

    region = record_region(recorder, call, [], scope=scope, iterations=False, entered=entered, fills=True)
    st.set(before)
    values, outputs, bases = found
    return After(region, values, {at: region.outputs[place] for at, place in outputs.items()}, bases)


def _is_of(own: set[str], recorder: Recorder, leaf: object) -> bool:
    """Whether a leaf is a size bound inside of a branch, unknown outside."""
    dim = recorder.symbols.leaf(leaf) if isinstance(leaf, SIZES) else None
    return isinstance(dim, Dim) and not own.isdisjoint(dim.symbols)
