"""The base of optimizers: slots beside each variable, and a rule that updates both.

`minimize` records gradients, one update a variable, and assignments tagged ``step``: nothing is taken while recording,
and reads never pull a step. A new optimizer is a subclass with `initial` and `update` in ordinary torch code; it runs
wherever the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.gradients import IndexedSlices, gradients
from tfnb.graph import Graph, Value, Variable, current
from tfnb.graph.lazy_memory import beside
from tfnb.graph.ops import STEP
from tfnb.recording import Operation, Recorder, Tensor, reopen, variable
from tfnb.recording.cells.statements import outermost
from tfnb.recording.marks.settings import OPTIMIZERS

Rate = float | torch.Tensor
LearningRate = Rate | Variable | Callable[[Any], torch.Tensor]  # the last: a schedule, of the number of steps
Pair = tuple[Any, Any]  # (gradient or None, Variable or Parameter)


class Optimizer:
    """Base of all optimizers.

    lr: a number, a Variable, a recorded scalar, or a schedule: a function of the number of steps that were taken, such
    as those of `tfnb.train.schedules`. A rule of one variable is `update`. A rule that needs several variables at once
    sets ``joint`` and is `update_all`.

    >>> class SignDescent(Optimizer):
    ...     def update(self, w, grad, slots, lr):
    ...         return w - lr * grad.sign(), slots
    >>> SignDescent(0.1)
    SignDescent(lr=0.1)
    """

    joint = False

    def __init__(self, lr: LearningRate) -> None:
        self.lr = _rate(type(self).__name__, lr)
        self._slots: WeakKeyDictionary[Variable, dict[str, Variable]] = WeakKeyDictionary()
        self._steps = _count(f"{type(self).__name__}/steps") if _is_schedule(self.lr) else None

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        """Initial value of each slot of a variable with the value ``w``."""
        return {}

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """New value of the variable and of its slots; ``lr`` is a float or a recorded 0-d tensor."""
        raise NotImplementedError(f"{type(self).__name__} must define update(w, grad, slots, lr)")

    def update_rows(
        self, w: torch.Tensor, grad: IndexedSlices, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """`update` for a row-sparse gradient; by default on a dense copy."""
        return self.update(w, grad.to_dense(f"{type(self).__name__} renews every row"), slots, lr)

    def update_all(
        self, ws: Sequence[torch.Tensor], grads: Sequence[Any], slots: Sequence[Mapping[str, torch.Tensor]], lr: Rate
    ) -> list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
        """`update` of each variable of a step: of one after the other.

        A rule with ``joint`` set has all of them here in one call, with dense gradients.
        """
        found = []
        for w, grad, kept in zip(ws, grads, slots, strict=True):
            rule = self._row_rule() if isinstance(grad, IndexedSlices) else self.update
            found.append(rule(w, grad, kept, _fitting(lr, w)))
        return found

    # -- what a user calls ------------------------------------------------------------------------------------

    def compute_gradients(
        self, loss: torch.Tensor, variables: Sequence[Any] | None = None
    ) -> list[tuple[torch.Tensor | IndexedSlices | None, Variable]]:
        """Record d loss / d variable for each of ``variables`` (Variables or Parameters).

        Default: the trainable ones with a path to the loss. A variable that was asked for and has none gets None.
        Raises ShapeError for a loss that is no scalar, InvalidArgument for one that is not recorded or no float, or if
        no variable has a path to it.
        """
        recorded = _scalar(loss)
        with reopen(recorded.graph) as recorder:
            wanted = self._trained(recorder) if variables is None else [variable(v) for v in variables]
            found = gradients(loss, wanted) if wanted else []
            pairs = [(g, v) for g, v in zip(found, wanted, strict=True) if variables is not None or g is not None]
            if all(g is None for g, _ in pairs):
                raise InvalidArgument(_nothing_to_train(recorded, wanted))
            return pairs

    def apply_gradients(self, pairs: Iterable[Pair]) -> Operation:
        """Record one step: an update of every variable whose gradient is not None. Takes no step.

        Raises ShapeError or InvalidArgument for a gradient that does not fit its variable; InvalidArgument for none at
        all, two of one variable, or several graphs.
        """
        return self._applied(pairs, ())

    def _applied(self, pairs: Iterable[Pair], buffers: Iterable[int]) -> Operation:
        named = [(grad, variable(target)) for grad, target in pairs]
        todo = [(grad, target) for grad, target in named if grad is not None]
        _check_pairs(todo, len(named))
        with reopen(_graph_of(todo)) as recorder, recorder.scope(self._label):
            recorder.buffers.compare()  # what a module was given above the step is written above it
            groups = [todo] if self.joint else [[pair] for pair in todo]
            rate = self._recorded_rate(recorder)
            new = [value for group in groups for value in self._record(recorder, group, rate)]
            new += self._counted(recorder)
            step = recorder.group(tuple(t.value for t in new), tags=frozenset({STEP}), effects=tuple(buffers))
            recorder.rename(step.value.node, self._label)  # until a Python name is assigned
            return step

    def minimize(self, loss: torch.Tensor, variables: Sequence[Any] | None = None) -> Operation:
        """Record one step that lowers ``loss``: `compute_gradients`, then `apply_gradients`. Takes no step.

        The step also runs the writes of buffers by the modules that the loss went through (running statistics).
        variables: Variables or Parameters; by default the trainable ones with a path to the loss.
        """
        recorded = _scalar(loss)
        with reopen(recorded.graph) as recorder:
            buffers = buffer_writes(recorder, [recorded.value])
            return self._applied(self.compute_gradients(loss, variables), buffers)

    def slots(self, target: object) -> dict[str, Variable]:
        """The Variables kept beside ``target`` (a Variable or Parameter), by slot name; made when first asked for."""
        owner = variable(target)
        if owner not in self._slots:
            stem = f"{owner.name}/{type(self).__name__}"
            with _disable_current_modes(), torch.no_grad():  # an open recording must not record initial values
                value = _value(owner)
                made = {
                    name: Variable(beside(value, start), name=f"{stem}/{name}", trainable=False)
                    for name, start in self.initial(value).items()
                }
            self._slots[owner] = made
        return dict(self._slots[owner])

    # -- recording --------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        """The name prefix of its nodes."""
        return type(self).__name__

    def _trained(self, recorder: Recorder) -> list[Variable]:
        """The variables to train by default: trainable ones that the graph reads, in order of first use.

        Not a module's buffers, which `parameters()` does not give either, though one may ask for a gradient.
        """
        read = (node.attrs["variable"] for node in recorder.nodes if node.op == "tfnb.read")
        found = [v for v in dict.fromkeys((*read, *recorder.tape.stands)) if v.trainable]
        return [v for v in found if v.held is None or not v.held.is_buffer()]

    def _record(self, recorder: Recorder, pairs: Sequence[Pair], rate: Rate) -> list[Tensor]:
        """Nodes that update variables, and their slots, by one call of the rule; the values after the step."""
        slots = [self.slots(target) for _, target in pairs]
        before = [{name: recorder.read(slot) for name, slot in mine.items()} for mine in slots]
        grads = [g.called(v.name).canonical() if isinstance(g, IndexedSlices) else g for g, v in pairs]
        with recorder.tagged(frozenset({"update"})):
            if self.joint:
                why = f"{type(self).__name__} takes dense gradients"
                grads = [g.to_dense(why) if isinstance(g, IndexedSlices) else g for g in grads]
            ws = [recorder.read(target) for _, target in pairs]
            done = self.update_all(ws, grads, before, rate)
        values: list[tuple[Variable, torch.Tensor]] = []
        for (_, target), mine, (new, after) in zip(pairs, slots, done, strict=True):
            if after.keys() != mine.keys():
                raise InvalidArgument(
                    f"{type(self).__name__}.update gave the slots {sorted(after)}, but initial made {sorted(mine)}"
                )
            values += [(target, new), *((mine[name], after[name]) for name in mine)]
        return [recorder.assign(v, value, tags=frozenset({"step"})) for v, value in values]

    def _row_rule(self) -> Any:
        """`update_rows`, unless a subclass overrides `update` alone."""
        nearest = next(c for c in type(self).__mro__ if "update" in vars(c) or "update_rows" in vars(c))
        return self.update_rows if "update_rows" in vars(nearest) else partial(Optimizer.update_rows, self)

    def _recorded_rate(self, recorder: Recorder) -> Rate:
        if self._steps is not None:
            return _rate(type(self).__name__, self.lr(recorder.read(self._steps).double()))
        return recorder.read(self.lr) if isinstance(self.lr, Variable) else self.lr

    def _counted(self, recorder: Recorder) -> list[Tensor]:
        """One step more on the count that a schedule goes by."""
        if self._steps is None:
            return []
        with recorder.tagged(frozenset({"update"})):
            more = recorder.read(self._steps) + 1
        return [recorder.assign(self._steps, more, tags=frozenset({"step"}))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lr={self.lr!r})"


OPTIMIZERS.append(Optimizer)


def _is_schedule(lr: object) -> bool:
    return callable(lr) and not isinstance(lr, (torch.Tensor, Variable))


def _count(name: str) -> Variable:
    with _disable_current_modes():
        return Variable(torch.tensor(0), name=name, trainable=False)


def _fitting(lr: Rate, w: torch.Tensor) -> Rate:
    """The rate beside a variable that is a number as well: torch would promote the variable to the rate's dtype.

    A vector is of a rule of torch, whose op keeps the dtype by itself.
    """
    return lr.to(w.dtype) if isinstance(lr, torch.Tensor) and lr.dim() == w.dim() == 0 else lr


def _rate(owner: str, lr: object) -> Any:
    """A float, Variable, recorded scalar or schedule; raises InvalidArgument for anything else."""
    if _is_schedule(lr):
        return lr
    if isinstance(lr, Real) and float(lr) >= 0:
        return float(lr)
    if isinstance(lr, (Variable, Tensor)):
        if any(size != 1 for size in lr.spec.shape):
            raise ShapeError(f"{owner}: lr must be a scalar, it is {lr.spec}")
        return lr
    if isinstance(lr, torch.Tensor) and lr.numel() == 1:
        return _rate(owner, lr.item())
    raise InvalidArgument(
        f"{owner}: lr must be a number of at least 0, a Variable, a recorded scalar or a schedule "
        f"(a function of the number of steps), not {lr!r}"
    )


def _value(owner: Variable) -> torch.Tensor:
    """Something like the variable's value, to make slots from."""
    if owner.initialized:
        return owner.storage
    return torch.zeros(owner.shape, dtype=owner.dtype, device=owner.spec.device)


def buffer_writes(recorder: Recorder, roots: Iterable[Value]) -> list[int]:
    """Ids of the writes of buffers by the modules whose outermost call stands on the way to ``roots``.

    Whatever a forward writes belongs to its call: a counter before it calls another module, statistics of what goes
    into no loss.
    """
    writes = [node for node in recorder.nodes if node.op == "tfnb.assign" and "buffer" in node.tags]
    if not writes:
        return []
    calls: set[Any] = set()
    stack = [root.node for root in roots]
    seen = set(stack)
    while stack:
        node = recorder.node(stack.pop())
        calls.add((node.owner, outermost(node)))
        stack.extend({v.node for v in node.inputs} - seen)
        seen.update(v.node for v in node.inputs)
    return [node.id for node in writes if outermost(node) and (node.owner, outermost(node)) in calls]


def _graph_of(pairs: Sequence[Pair]) -> Graph:
    parts = (grad.values if isinstance(grad, IndexedSlices) else grad for grad, _ in pairs)
    graphs = {part.graph for part in parts if isinstance(part, Tensor)}
    if len(graphs) > 1:
        raise InvalidArgument(f"gradients of one graph are needed, got: {', '.join(sorted(g.name for g in graphs))}")
    recording = current.recording()
    if graphs:
        return graphs.pop()
    if not isinstance(recording, Recorder):
        raise InvalidArgument("none of the gradients is a recorded tensor, and no recording is open")
    return recording.graph


# -- bad input ------------------------------------------------------------------------------------------------


def _scalar(loss: object) -> Tensor:
    """The loss, checked to be a scalar."""
    if not isinstance(loss, Tensor):
        raise InvalidArgument(
            f"a loss is a recorded tensor, not {type(loss).__name__}: "
            "compute it in a %%tfgraph cell or inside `with tfnb.record(NAME):`"
        )
    spec = loss.spec
    if any(size != 1 for size in spec.shape):
        raise ShapeError(f"a loss has shape []: {loss.name} is {spec}; take its mean() or sum()")
    if not spec.dtype.is_floating_point:
        raise InvalidArgument(f"a loss is a floating-point number: {loss.name} is {spec}")
    return loss


def _nothing_to_train(loss: Tensor, asked: Sequence[Variable]) -> str:
    if not asked:
        return f"no trainable variable in graph {loss.graph.name}: {loss.name} depends on no Parameter or Variable"
    names = ", ".join(v.name for v in asked[:8]) + (", ..." if len(asked) > 8 else "")
    return (
        f"no trainable variable has a path to {loss.name}; looked at: {names}. "
        "detach(), .data, integer casts and torch.no_grad() cut paths"
    )


def _check_pairs(pairs: Sequence[Pair], given: int) -> None:
    if not pairs:
        raise InvalidArgument(f"no gradient to apply: {f'all {given} are None' if given else 'the list is empty'}")
    seen: set[Variable] = set()
    for grad, target in pairs:
        if target in seen:
            raise InvalidArgument(f"{target.name} has two gradients in one step: add them up first")
        seen.add(target)
        _check_fit(grad, target)


def _check_fit(grad: object, target: Variable) -> None:
    if not isinstance(grad, (torch.Tensor, IndexedSlices)):
        raise InvalidArgument(f"the gradient of {target.name} is {type(grad).__name__}, not a tensor")
    shape = grad.spec.shape if isinstance(grad, Tensor) else tuple(grad.shape)
    if shape != tuple(target.spec.shape):
        raise ShapeError(f"the gradient of {target.name} is {list(shape)}, the variable {list(target.spec.shape)}")
    if grad.dtype != target.dtype:
        raise InvalidArgument(f"the gradient of {target.name} is {grad.dtype}, the variable {target.dtype}")
