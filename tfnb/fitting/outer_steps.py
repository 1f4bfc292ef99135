"""The outer step of `tfnb.train.LocalSGD`: recorded into the graph of the training, whose state its slots are.

So `Session.save`, checkpoints and a cluster hold the slots as they hold those of the optimizer of each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tfnb.cluster.engine.members import Mode, OuterStep
from tfnb.errors import FailedPrecondition, InvalidArgument, Unimplemented
from tfnb.graph import Variable
from tfnb.passes import step_graph
from tfnb.recording import Operation, Tensor, placeholder, reopen
from tfnb.session import Session
from tfnb.session.structures import Fetches
from tfnb.train.modes import LocalSGD
from tfnb.train.optimizer import Optimizer


class _RecordedOuterStep(NamedTuple):
    """The update of ``variables`` by the ``differences`` that are fed."""

    variables: tuple[Variable, ...]
    differences: tuple[Tensor, ...]
    update: Operation


def with_outer(mode: Mode, asked: object, session: Session, fetch: Fetches) -> Mode:
    """The mode with the outer step that was asked for, of the trainable Variables that a fetch writes."""
    if not isinstance(asked, LocalSGD) or asked.outer is None:
        return mode
    if session.cluster is None:
        raise FailedPrecondition(
            "LocalSGD(outer=...) takes its outer step where tasks meet, and no cluster is connected: tfnb.connect(2), "
            "or leave out outer"
        )
    variables = tuple(variable for variable in session.written(fetch) if variable.trainable)
    if not variables:
        raise InvalidArgument("LocalSGD(outer=...) steps along trainable Variables, and the fetch writes none")
    found = _recorded(session, asked.outer, variables)
    feeds = [difference.value for difference in found.differences]
    return mode._replace(outer=OuterStep(step_graph(session.graph, [found.update.value], feeds), variables))


def ensure_no_outer(asked: object) -> None:
    """Raise Unimplemented for a mode with an outer step, to which a training is to change."""
    if isinstance(asked, LocalSGD) and asked.outer is not None:
        raise Unimplemented(
            "a training does not change to LocalSGD(outer=...): stop it, and begin another one by fit(...)"
        )


def _recorded(session: Session, optimizer: Optimizer, variables: tuple[Variable, ...]) -> _RecordedOuterStep:
    """The outer step of an optimizer, recorded when first asked for."""
    known: dict[Any, _RecordedOuterStep] = session.graph.attached.setdefault("outer steps", {})
    found = known.get(optimizer)
    if found is None or found.variables != variables or found.update.value.node not in session.graph.contents.by_id:
        with reopen(session.graph):
            differences = tuple(
                placeholder(shape=tuple(v.shape), dtype=v.dtype, name=f"{v.name}/difference") for v in variables
            )
            update = optimizer.apply_gradients(list(zip(differences, variables, strict=True)))
        found = known[optimizer] = _RecordedOuterStep(variables, differences, update)
    return found
