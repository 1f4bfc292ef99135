"""L-BFGS over all rows of the data as a coordinator program: the mode `tfnb.train.Sandblaster` of `fit`.

One training adds up gradients, an epoch for each evaluation of the loss, in portions that tasks take as fast as they
can. Between two epochs everything stands still, and the coordinator, a callback, sends commands to the vectors beside
the Parameters (`tfnb.fitting.shard_vectors`). It gets numbers, chooses steps by them, and holds no vector.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from tfnb.cluster.engine.members import Mode
from tfnb.cluster.notebook.divided_rows import look_at_microbatches
from tfnb.cluster.notebook.steps_there import batches as batches_of
from tfnb.errors import FailedPrecondition, Internal, InvalidArgument, NonFinite, ParameterServerLost, TfnbError
from tfnb.fitting.shard_vectors import ShardVectors, shard_vectors, weight_of
from tfnb.graph import Node
from tfnb.graph.subgraph import nested
from tfnb.passes import step_graph
from tfnb.passes.flow.row_weights import Reason
from tfnb.placement.row_means import mixes_rows
from tfnb.recording import Tensor
from tfnb.session import Session, default_session
from tfnb.state.chunks import is_collection
from tfnb.state.input_sources import Source
from tfnb.state.queues import TensorQueue
from tfnb.train.batches import is_single_pass, name_of
from tfnb.train.callbacks import Callbacks, Progress
from tfnb.train.curvature_pairs import CurvaturePairs
from tfnb.train.line_search import MOST, LinePoint, strong_wolfe
from tfnb.train.sandblaster import Sandblaster

ITERATIONS = 20  # unless `fit` is given steps
ROWS = 256  # of a portion, unless it is given a batch size
AGAIN = 3  # evaluations that lack rows before it is an error
EVALUATIONS = 1 + MOST + 1  # of an iteration: its first step, the steps of a search, and the best one once more
LOOKED_AT = 64  # rows
_ONLY = "mode=Sandblaster(...) minimizes a loss over all rows"


class Evaluation(NamedTuple):
    """The loss over all rows at a point, its slope along the direction, and the sum and largest size of its gradient.

    ``scale``: what the sum of gradients is multiplied by.
    """

    loss: float
    slope: float
    size: float
    largest: float
    scale: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return all(map(math.isfinite, (self.loss, self.slope, self.size, self.largest)))


Program = Generator[None, Evaluation, str]


def minimized(
    fit: Callable[..., Any], loss: object, data: Any, mode: Sandblaster, refused: Mapping[str, tuple[Any, Any]], *,
    steps: int | None, batch_size: int | None, watch: Any, callbacks: Any, **options: Any,
) -> Any:  # fmt: skip
    """Minimize a loss: a `RunResult` whose steps, and entries of the history, are iterations.

    fit: `tfnb.fit`. refused: options of it that this mode does not take, each with its value and the default.
    """
    __tracebackhide__ = True
    graph_loss = _checked(loss, data, refused)
    session = default_session(graph_loss.graph)
    vectors = _recorded(graph_loss, mode)
    if isinstance(data, Mapping):
        batch_size = ROWS if batch_size is None else batch_size
        _look_at_rows(session, vectors, data)
    program = Minimization(session, vectors, mode, ITERATIONS if steps is None else steps, Callbacks(callbacks))
    program.begin()
    try:
        result = fit(
            vectors.evaluation, data, epochs=program.most, batch_size=batch_size, shuffle=False,
            watch={} if watch is None else watch, callbacks=program, exact=False, restarts=0,
            mode=Mode("async", is_coordinated=True), **options,
        )  # fmt: skip
    except KeyboardInterrupt as error:
        program.restore(error)
        raise KeyboardInterrupt(f"stopped; {program.where}") from None
    except BaseException as error:
        program.restore(error)
        raise
    finally:
        session.state.went_on()
    stopped = "" if program.number == program.iterations else result.stopped
    return replace(result, steps=program.number, history=program.history, curve=program.history, stopped=stopped)


def _recorded(loss: Tensor, mode: Sandblaster) -> ShardVectors:
    """The vectors and commands of a loss, recorded once."""
    known: dict[Any, ShardVectors] = loss.graph.attached.setdefault("minimizations", {})
    key = loss.value, mode.history
    if key not in known:
        known[key] = shard_vectors(loss, mode.history)
    return known[key]


@dataclass
class Minimization:
    """The coordinator of one minimization. ``number``: iterations that are done; ``history``: an entry for each."""

    session: Session
    vectors: ShardVectors
    mode: Sandblaster
    iterations: int
    callbacks: Callbacks

    def __post_init__(self) -> None:
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int) or self.iterations < 1:
            raise InvalidArgument(f"steps is a number of iterations, an int of at least 1, not {self.iterations!r}")
        self.number = self.evaluations = 0
        self.history: list[dict[str, Any]] = []
        self.most = 1 + AGAIN + self.iterations * EVALUATIONS
        self._rows: float | None = None  # of an evaluation
        self._stamp, self._step, self._missed = 0, 0.0, 0
        self._lost: ParameterServerLost | None = None
        self._is_taken = False  # the last move, as the step of an iteration
        self._values: Mapping[str, Any] = {}
        self._samples = 0
        self._program, self._why_over = self._iterated(), cast(str | None, None)

    # -- what `fit` calls ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin with the Parameters as they are."""
        self._run("begin")
        self._move(0.0)
        next(self._program)

    def on_epoch(self, progress: Progress) -> None:
        """All portions of an evaluation are added up: go on, to the next evaluation or to the end."""
        if self._lost is not None:
            raise self._lost
        self._values, self._samples = progress.values, progress.samples
        try:
            found = self._evaluation()
            if found is None:
                self._move(self._step)
            else:
                self._program.send(found)
        except StopIteration as end:
            progress.stop(end.value)
        except ParameterServerLost as error:  # the training, which goes on, hears of it and takes the newest copy
            self._lost = error

    def restore(self, error: BaseException) -> None:
        """After an error or an interrupt: the Parameters are those of the last iteration again."""
        is_lost, text = isinstance(error, ParameterServerLost), self.where
        if is_lost or not self._is_taken:
            with suppress(TfnbError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the cluster is lost is what the error says
                self._run("restore")
        if is_lost:
            text += ", as far as a copy was made; the same call begins there, with an empty history"
        error.add_note(text)

    @property
    def where(self) -> str:
        """Where the Parameters are, in words."""
        return f"the Parameters are those of iteration {self.number} of Sandblaster"

    # -- the program --------------------------------------------------------------------------------------------

    def _iterated(self) -> Program:
        """The iterations; returns why they ended."""
        mode, pairs = self.mode, CurvaturePairs(self.mode.history)
        now = yield
        if not now.is_finite:
            raise self._not_finite(now)
        step = 0.0
        while True:
            if now.largest <= mode.tolerance_grad:
                return f"the largest gradient is {now.largest:.3g}, within tolerance_grad"
            gate = torch.tensor(pairs.is_kept)
            self._run("advance", gate=gate, step=step, scale=now.scale)
            pairs.add(self._numbers(self.vectors.products))
            self._run("aim", coefficients=pairs.direction())
            slopes = self._numbers(self.vectors.slopes)
            slope, width = float(slopes[:, 0].sum()), float(slopes[:, 1].max())
            if not slope <= 0:
                raise self._no_descent(slope)
            if slope > -mode.tolerance_change:
                return f"the slope along the direction is {slope:.3g}, within tolerance_change"
            first = min(1.0, 1.0 / now.size) * mode.lr if not self.number else mode.lr
            before = now
            now, step = yield from self._searched(LinePoint(0.0, now.loss, slope), now, first, width)
            if not step:
                return "the line search found no lower loss"
            self._told(now)
            if self._why_over is not None:
                return self._why_over
            if self.number == self.iterations:
                return f"{self.number} iterations"
            if step * width <= mode.tolerance_change:
                return f"the last step moved no Parameter by more than {step * width:.3g}, within tolerance_change"
            if abs(now.loss - before.loss) < mode.tolerance_change:
                return f"the loss changed by {abs(now.loss - before.loss):.3g}, within tolerance_change"

    def _searched(
        self, start: LinePoint, before: Evaluation, first: float, width: float
    ) -> Generator[None, Evaluation, tuple[Evaluation, float]]:
        """The evaluation at the step that is taken, and the step."""
        if self.mode.line_search is None:
            found = yield from self._at(first)
            if not found.is_finite:
                raise self._not_finite(found)
            return found, first
        search = strong_wolfe(start, first, width, self.mode.tolerance_change)
        step = next(search)
        while True:
            found = yield from self._at(step)
            try:
                step = search.send((found.loss, found.slope if found.is_finite else math.nan))
            except StopIteration as end:
                taken: LinePoint = end.value
                break
        if taken.step == 0.0:
            self._move(0.0)
            return before, 0.0
        if taken.step != step:  # the gradient of the best point has to be there
            found = yield from self._at(taken.step)
        return found, taken.step

    def _at(self, step: float) -> Generator[None, Evaluation, Evaluation]:
        """The evaluation at a step along the direction."""
        self._move(step)
        return (yield)

    def _told(self, now: Evaluation) -> None:
        """One iteration more."""
        self._is_taken = True
        self.number += 1
        values = {**self._values, name_of(self.vectors.loss): now.loss}
        about = {"epoch": self.number, "step": self.number}
        self.history.append({**about, **values, "evaluations": self.evaluations})
        told = [
            tell(Progress(self.number, self.number, values, self._samples))
            for tell in (self.callbacks.on_step, self.callbacks.on_epoch)
        ]
        if any(each.changed is not None for each in told):
            raise InvalidArgument(f"{_ONLY}, and a callback changed the mode: call fit again")
        self._why_over = next((each.stopped for each in told if each.stopped is not None), None)

    # -- commands -----------------------------------------------------------------------------------------------

    def _run(self, command: str, **numbers: object) -> None:
        """Let all servers carry out a command."""
        feeds = {self.vectors.numbers[name]: number for name, number in numbers.items()}
        self.session.run(getattr(self.vectors, command), feeds)

    def _numbers(self, fetched: torch.Tensor) -> torch.Tensor:
        return self.session.run(fetched)

    def _move(self, step: float) -> None:
        """Go there, and begin an evaluation."""
        self._stamp += 1
        self._step, self._is_taken = step, False
        self._run("move", step=step, stamp=float(self._stamp))

    def _evaluation(self) -> Evaluation | None:
        """The evaluation from the sums; None where some rows are missing in these, or were added at another point."""
        self._run("measure")
        measures, sums = self.session.run((self.vectors.measures, self.vectors.totals))
        loss, number, rows, stamps = sums.tolist()
        self._rows = rows if self._rows is None else self._rows
        if rows != self._rows or stamps != rows * self._stamp:
            self._missed += 1
            if self._missed > AGAIN:
                raise Internal(
                    f"an evaluation of Sandblaster added up {rows:.0f} of {self._rows:.0f} rows, as {AGAIN} others "
                    "did: other steps write its Variables, or the data changes from pass to pass"
                )
            return None
        self.evaluations += 1
        whole = self.vectors.weight.of(number)
        scale = 1.0 / whole if whole else math.inf
        slope, size, largest = float(measures[:, 0].sum()), float(measures[:, 1].sum()), float(measures[:, 2].max())
        return Evaluation(loss * scale, slope * scale, size * scale, largest * scale, scale)

    # -- errors -------------------------------------------------------------------------------------------------

    def _not_finite(self, found: Evaluation) -> NonFinite:
        node = self.vectors.loss.node
        what = "loss" if not math.isfinite(found.loss) else "gradient"
        return NonFinite(
            f"{_at(node)}: the {what} over all rows is not finite: {found.loss:.6g}, largest gradient "
            f"{found.largest:.6g}. tfnb.run({node.name}, feeds, check='nan') names the op where that begins; smaller "
            "initial values, or lr=, keep it finite"
        )

    def _no_descent(self, slope: float) -> FailedPrecondition:
        node = self.vectors.loss.node
        return FailedPrecondition(
            f"{_at(node)}: the direction of iteration {self.number + 1} is no descent: its slope is {slope:.6g}. The "
            "gradient is not that of the loss (a custom gradient, detach()), or is lost in rounding: take float64 "
            "Parameters, or a smaller history="
        )


# -- bad input --------------------------------------------------------------------------------------------------------


def _at(node: Node) -> str:
    return str(node.source) if node.source else node.name


def _checked(loss: object, data: Any, refused: Mapping[str, tuple[Any, Any]]) -> Tensor:
    """The loss, checked. Raises InvalidArgument for a loss that is no sum over rows, and for an option not taken."""
    if not isinstance(loss, Tensor):
        raise InvalidArgument(
            f"{_ONLY}, and fetched is {type(loss).__name__}: give fit the recorded loss itself, fit(loss, data, "
            "mode=Sandblaster(...)); it needs no optimizer"
        )
    for name, (value, default) in refused.items():
        if value is not default and value != default:
            raise InvalidArgument(f"{_ONLY}, and takes no {name}={value!r}: leave it out")
    if isinstance(data, Source | TensorQueue) or is_single_pass(data):
        raise InvalidArgument(
            f"{_ONLY} many times, and {type(data).__name__} gives its items once: pass {{placeholder: array}}, a list "
            "or a DataLoader without shuffle"
        )
    outer = step_graph(loss.graph, (loss.value,), ()).graph.nodes
    for node in (each for one in outer for each in (one, *nested(one))):
        if node.stream is not None:
            raise InvalidArgument(
                f"{_at(node)}: {node.name} draws other numbers in each evaluation, and {_ONLY}, the same function "
                "each time: record the loss with model.eval(), or draw once above the cell"
            )
        if mixes_rows(node):
            raise InvalidArgument(
                f"{_at(node)}: {node.name} takes the statistics of the rows of a portion, so that the loss is no mean "
                f"over rows, and {_ONLY}: record it with model.eval(), or use LayerNorm or GroupNorm"
            )
    _, reason, _ = weight_of(loss)
    if reason is not None:
        raise InvalidArgument(_no_mean(loss, reason))
    return loss


def _no_mean(loss: Tensor, reason: Reason) -> str:
    cure = f": {reason.cure}" if reason.cure else ", as a mean or a sum over rows"
    return (
        f"{_at(reason.node)}: {loss.name} is no mean or sum over rows, so that portions of them do not add up to it: "
        f"{reason.text.replace('a task', 'a portion')}. Write it another way{cure}"
    )


def _look_at_rows(session: Session, vectors: ShardVectors, data: Mapping[Any, Any]) -> None:
    """Raise InvalidArgument where gradients of parts of the first rows do not add up to that of all of them."""
    if any(is_collection(array) for array in data.values()):  # its rows lie elsewhere
        return
    first = {key: array[:LOOKED_AT] if getattr(array, "ndim", 0) else array for key, array in data.items()}
    step, tensors = session.step_of(vectors.evaluation, first)
    batch = next(iter(batches_of(step, [(tensors, 0)])), None)
    if batch is None or (batch.rows or 0) < 2:
        return
    seen = look_at_microbatches(step, 2, batch)
    if not seen.is_mean:
        raise InvalidArgument(f"{seen.notes[-1]}. {_ONLY}, in portions")
