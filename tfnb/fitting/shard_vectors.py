"""The vectors of a minimization beside their Parameters, and the commands on them: small recorded graphs.

Each Parameter has Variables for its part of every vector of L-BFGS. A command writes them by nodes tagged ``update``,
so a parameter server computes it from the Variables that it holds, as it computes the update of an optimizer; numbers
are fed. Inner products are sums over Parameters of numbers that the servers leave in small Variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument
from tfnb.gradients import IndexedSlices
from tfnb.graph import Dim, Graph, Value, Variable
from tfnb.graph.lazy_memory import beside
from tfnb.graph.ops import STEP
from tfnb.passes import step_graph
from tfnb.passes.flow.merges import ROWS, SUM, Weight
from tfnb.passes.flow.row_weights import Reason, weighed
from tfnb.recording import Operation, Recorder, Tensor, placeholder, reopen
from tfnb.train.optimizer import Optimizer

_UPDATE, _STEP = frozenset({"update"}), frozenset({"step"})


class ParameterVectors:
    """The parts of the vectors that belong to one Parameter. ``point``: where a line search begins.

    ``gradient``: the sum over portions; ``last``: the gradient at ``point``. ``step``, ``change``: the last pair;
    ``steps``, ``changes``: the pairs before it, newest last. ``measures``, ``slopes``, ``products``: numbers of them.
    """

    def __init__(self, parameter: Variable, history: int) -> None:
        with _disable_current_modes(), torch.no_grad():
            value = parameter.storage.detach()

            def made(name: str, *rows: int) -> Variable:
                start = beside(value, value.new_zeros((*rows, *value.shape)))
                return Variable(start, name=f"{parameter.name}/Sandblaster/{name}", trainable=False)

            def numbers(name: str, *sizes: int) -> Variable:
                start = value.new_zeros(sizes, dtype=torch.float64)
                return Variable(start, name=f"{parameter.name}/Sandblaster/{name}", trainable=False)

            self.parameter = parameter
            self.point, self.direction, self.gradient = made("point"), made("direction"), made("gradient")
            self.last, self.step, self.change = made("last"), made("step"), made("change")
            self.steps, self.changes = made("steps", history), made("changes", history)
            self.measures, self.slopes = numbers("measures", 3), numbers("slopes", 2)
            self.products = numbers("products", 3, 2 * history + 3)

    @property
    def vectors(self) -> tuple[Variable, ...]:
        """All vectors but the Parameter."""
        return (
            self.point, self.direction, self.gradient, self.last, self.step, self.change, self.steps, self.changes,
        )  # fmt: skip


Write = Callable[[Recorder, ParameterVectors], Mapping[Variable, torch.Tensor]]


@dataclass
class ShardVectors:
    """The vectors of all Parameters of a loss, its evaluation, and the commands, recorded into its graph.

    ``weight``: what portions of the loss are weighted by. ``evaluation`` adds a portion's gradient, and ``sums``: loss
    by weight, the number of the weight, rows, and rows by ``stamp``, the number of the evaluation. Numbers of all
    Parameters together are ``measures``, ``slopes`` and ``products``; ``totals`` are the sums.
    """

    loss: Tensor
    parameters: tuple[ParameterVectors, ...]
    weight: Weight
    sums: Variable
    stamp: Variable
    evaluation: Operation
    totals: torch.Tensor
    measures: torch.Tensor
    slopes: torch.Tensor
    products: torch.Tensor
    begin: Operation
    measure: Operation
    advance: Operation
    aim: Operation
    move: Operation
    restore: Operation
    numbers: Mapping[str, Tensor]  # that commands are fed with, by name


def weight_of(loss: Tensor) -> tuple[Weight, Reason | None, Graph]:
    """The weight of portions of a loss, the reason why there is none, and a graph with its total."""
    graph = loss.graph
    reached = step_graph(graph, (loss.value,), ()).graph
    fed = tuple(Value(node.id) for node in reached.placeholders)
    found = weighed(step_graph(graph, (loss.value,), fed))
    return found.values.get(loss.value) or ROWS, found.reasons.get(loss.value), found.step.whole


def shard_vectors(loss: Tensor, history: int) -> ShardVectors:
    """Record the evaluation of a loss and the commands.

    Raises as `Optimizer.compute_gradients`, and InvalidArgument for Parameters of too few bits, or complex ones.
    """
    pairs = [(g, v) for g, v in Optimizer(1.0).compute_gradients(loss) if g is not None and v.shape.numel()]
    if (odd := next((v for _, v in pairs if v.dtype not in (torch.float32, torch.float64)), None)) is not None:
        raise InvalidArgument(
            f"Sandblaster takes Parameters in float32 and float64, and {odd.name} is {odd.dtype}: its inner products "
            "need more bits, or the real and the imaginary part as Parameters of their own"
        )
    weight, _, weighted = weight_of(loss)
    parameters = tuple(ParameterVectors(variable, history) for _, variable in pairs)
    with _disable_current_modes():
        stem = f"{loss.name}/Sandblaster"
        sums = Variable(torch.zeros(4, dtype=torch.float64), name=f"{stem}/sums", trainable=False)
        stamp = Variable(torch.zeros((), dtype=torch.float64), name=f"{stem}/stamp", trainable=False)
    with reopen(loss.graph) as recorder, recorder.scope("Sandblaster"):
        numbers = _numbers(history)
        record = _Recording(recorder, parameters, numbers)
        evaluation = _evaluation(recorder, loss, [g for g, _ in pairs], parameters, weight, weighted, sums, stamp)
        return ShardVectors(
            loss, parameters, weight, sums, stamp, evaluation, recorder.read(sums),
            torch.stack([recorder.read(each.measures) for each in parameters]),
            torch.stack([recorder.read(each.slopes) for each in parameters]),
            torch.stack([recorder.read(each.products) for each in parameters]).sum(0),
            record.command("begin", _begin), record.command("measure", _measure),
            record.command("advance", record.advance),
            record.command("aim", record.aim),
            record.command("move", record.move, {sums: torch.zeros_like(recorder.read(sums)), stamp: numbers["stamp"]}),
            record.command("restore", lambda recorder, each: {each.parameter: recorder.read(each.point) * 1.0}),
            numbers,
        )  # fmt: skip


def _numbers(history: int) -> dict[str, Tensor]:
    """The numbers that commands are fed with; ``gate``: whether the pair before is kept."""
    size = 2 * history + 3
    found = {name: placeholder(torch.zeros((), dtype=torch.float64)) for name in ("step", "scale", "stamp")}
    coefficients = placeholder(torch.zeros(size, dtype=torch.float64), shape=(size,))
    return {**found, "gate": placeholder(torch.tensor(False)), "coefficients": coefficients}


def _evaluation(
    recorder: Recorder, loss: Tensor, gradients: Sequence[Any], parameters: Sequence[ParameterVectors], weight: Weight,
    weighted: Graph, sums: Variable, stamp: Variable,
) -> Operation:  # fmt: skip
    """Add the gradient of a portion, and its loss, by its weight."""
    rows = _rows(recorder, loss)
    number, share = _share(recorder, weight, weighted, rows)
    value = loss.detach().reshape(()).to("cpu", torch.float64)
    added = torch.stack([_counted(value, share), number, rows, recorder.read(stamp) * rows])
    writes = {sums: recorder.read(sums) + added}
    for gradient, each in zip(gradients, parameters, strict=True):
        dense = gradient.to_dense("Sandblaster sums gradients") if isinstance(gradient, IndexedSlices) else gradient
        writes[each.gradient] = recorder.read(each.gradient) + _counted(dense, share)
    return _assigned(recorder, "evaluation", writes)


def _counted(value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """What a portion adds; nothing, where nothing of it counts: its loss is NaN then, divided by 0."""
    return torch.where(share != 0, value * share, torch.zeros_like(value))


def _rows(recorder: Recorder, loss: Tensor) -> torch.Tensor:
    """The number of rows of a portion, a number of the task; 1 where no axis varies."""
    one = torch.ones((), dtype=torch.float64)
    for node in step_graph(loss.graph, (loss.value,), ()).graph.placeholders:
        shape = node.outputs[0].shape
        if shape and isinstance(shape[0], Dim):
            return one * recorder.tensor(Value(node.id)).shape[0]
    return recorder.handle(one)


def _share(
    recorder: Recorder, weight: Weight, weighted: Graph, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The number of a portion for its weight, and the weight."""
    if weight == ROWS:
        return rows, rows
    if weight == SUM or not isinstance(weight.total, Value):
        return torch.zeros_like(rows), torch.ones_like(rows)
    for node in weighted.nodes:
        if node.id not in recorder.tape.by_id:
            recorder.tape.put(node)
    number = recorder.tensor(weight.total)
    share = number + weight.shift if weight.shift else number
    return number, share.clamp(min=weight.least) if weight.least > float("-inf") else share


@dataclass
class _Recording:
    """Records commands: of each Parameter the new values of its Variables."""

    recorder: Recorder
    parameters: Sequence[ParameterVectors]
    numbers: Mapping[str, Tensor]
    coefficients: Mapping[torch.dtype, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        dtypes = {each.parameter.dtype for each in self.parameters}
        self.coefficients = {dtype: self.numbers["coefficients"].to(dtype) for dtype in dtypes}

    def command(self, name: str, write: Write, more: Mapping[Variable, torch.Tensor] | None = None) -> Operation:
        """An operation with the writes that ``write`` makes for each Parameter."""
        writes = dict(more or {})
        with self.recorder.tagged(_UPDATE):  # nodes of several Parameters would put these on one server: there are none
            for each in self.parameters:
                writes |= write(self.recorder, each)
        return _assigned(self.recorder, name, writes)

    def advance(self, recorder: Recorder, each: ParameterVectors) -> dict[Variable, torch.Tensor]:
        """Take the Parameter as the new point: keep the pair before, and make the pair of this step."""

        def kept(rows: Variable, newest: Variable) -> torch.Tensor:
            old, row = recorder.read(rows), recorder.read(newest)
            return torch.where(self.numbers["gate"], torch.cat([old[1:], row.unsqueeze(0)]), old)

        steps, changes = kept(each.steps, each.step), kept(each.changes, each.change)
        gradient = recorder.read(each.gradient) * self.numbers["scale"]
        step = recorder.read(each.direction) * self.numbers["step"]
        change = gradient - recorder.read(each.last)
        new = _as_rows(torch.stack([step, change, gradient]))
        basis = torch.cat([_as_rows(steps), _as_rows(changes), new])
        return {
            each.steps: steps, each.changes: changes, each.step: step, each.change: change, each.last: gradient,
            each.point: recorder.read(each.parameter) * 1.0, each.products: (new @ basis.mT).double(),
        }  # fmt: skip

    def aim(self, recorder: Recorder, each: ParameterVectors) -> dict[Variable, torch.Tensor]:
        """Make the direction of its coefficients."""
        new = [recorder.read(v).unsqueeze(0) for v in (each.step, each.change, each.last)]
        basis = _as_rows(torch.cat([recorder.read(each.steps), recorder.read(each.changes), *new]))
        direction = (self.coefficients[basis.dtype] @ basis).reshape(each.parameter.shape)
        slope = (direction * recorder.read(each.last)).sum()
        return {each.direction: direction, each.slopes: torch.stack([slope, direction.abs().max()]).double()}

    def move(self, recorder: Recorder, each: ParameterVectors) -> dict[Variable, torch.Tensor]:
        """Go a step along the direction, and begin an evaluation there."""
        point, direction = recorder.read(each.point), recorder.read(each.direction)
        return {
            each.parameter: point + direction * self.numbers["step"],
            each.gradient: torch.zeros_like(recorder.read(each.gradient)),
        }


def _as_rows(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors in the shape of their Parameter, which may be a number, as rows of a matrix."""
    return vectors.reshape(vectors.shape[0], -1)


def _begin(recorder: Recorder, each: ParameterVectors) -> dict[Variable, torch.Tensor]:
    """Begin at the Parameter, with zeros. All of it is made of one node, so that it lies on one server."""
    here = recorder.read(each.parameter) * 1.0
    zero = torch.nan_to_num(here * 0.0, 0.0, 0.0, 0.0)
    number = zero.sum().double()
    writes = {variable: zero.expand(tuple(variable.shape)) * 1.0 for variable in each.vectors}
    writes |= {v: number.expand(tuple(v.shape)) * 1.0 for v in (each.measures, each.slopes, each.products)}
    return writes | {each.parameter: here, each.point: here * 1.0}


def _measure(recorder: Recorder, each: ParameterVectors) -> dict[Variable, torch.Tensor]:
    """Measure the sum of gradients: its product with the direction, the sum and the largest of its sizes."""
    gradient = recorder.read(each.gradient)
    slope, size = (gradient * recorder.read(each.direction)).sum(), gradient.abs()
    return {each.measures: torch.stack([slope, size.sum(), size.max()]).double()}


def _assigned(recorder: Recorder, name: str, writes: Mapping[Variable, torch.Tensor]) -> Operation:
    done = [recorder.assign(variable, value, tags=_STEP) for variable, value in writes.items()]
    step = recorder.group(tuple(each.value for each in done), tags=frozenset({STEP}))
    recorder.rename(step.value.node, f"Sandblaster/{name}")
    return step
