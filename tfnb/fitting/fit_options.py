"""Options of `fit`, checked: the watched values, the mode, and the steps taken before."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from tfnb.cluster.engine.members import MODES, Mode
from tfnb.cluster.notebook.divided_rows import look_at_microbatches
from tfnb.cluster.notebook.steps_there import batches as batches_of
from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, ShapeError, Unimplemented
from tfnb.graph import Spec, Variable
from tfnb.graph.mapped_files import region_of
from tfnb.graph.spec import flows
from tfnb.passes.flow.microbatch_schedules import SCHEDULES
from tfnb.recording import Operation, Tensor
from tfnb.recording.marks.notes import user_level
from tfnb.session import Session
from tfnb.session.divided_feeds import AUTO, WHOLE, Division, division
from tfnb.session.structures import Fetches, structure, value_of
from tfnb.state import checkpoint
from tfnb.state.checkpoint_folder import newest
from tfnb.train.batches import batch_count, name_of
from tfnb.train.modes import Downpour, LocalSGD, SyncReplicas, TaskMode

SAYS: Mapping[type, str] = {
    SyncReplicas: "how many tasks are spare", LocalSGD: "when tasks wait for each other",
    Downpour: "when tasks fetch and push",
}  # fmt: skip


def watched_by(watch: Fetches | None, fetch: Fetches, session: Session) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and fetches of the watched values: by default the scalars of ``fetch``.

    Raises ShapeError for what is no scalar, InvalidArgument for what has no value.
    """
    if watch is None:
        named = list(_scalars(fetch, session))
    elif isinstance(watch, Mapping):
        named = [(str(name), item) for name, item in watch.items()]
    else:
        if not isinstance(watch, str | Tensor | Variable | Iterable):
            raise InvalidArgument(
                f"watch is a scalar of the graph, its name, a list of them, or a dict of names to them: got {watch!r}"
            )
        items = [watch] if isinstance(watch, str | Tensor | Variable) else list(watch)
        named = [(name_of(item), item) for item in items]
    found: dict[str, Any] = {}
    for name, item in named:
        unique = name if name not in found else f"{name}_{len(found)}"
        _check_scalar(unique, item, session)
        found[unique] = item
    return tuple(found), tuple(found.values())


def _scalars(fetch: Fetches, session: Session, name: str = "") -> Iterator[tuple[str, Any]]:
    """The real scalars in a structure of fetches, by their keys or names; without writes of Variables."""
    if isinstance(fetch, Mapping):
        for key, item in fetch.items():
            yield from _scalars(item, session, str(key))
    elif isinstance(fetch, list | tuple):
        for item in fetch:
            yield from _scalars(item, session)
    elif isinstance(fetch, str | Tensor | Operation | Variable):
        spec, op = _spec(fetch, session)
        if spec is not None and op != "tfnb.assign" and not spec.dtype.is_complex and _is_scalar(spec):
            yield name or name_of(fetch), fetch


def _spec(item: object, session: Session) -> tuple[Spec | None, str]:
    """The spec of a fetch, None for an operation without a value, and its op."""
    if isinstance(item, Variable):
        return item.spec, "tfnb.read"
    value = value_of(session.graph, item)
    node = session.graph.contents.by_id[value.node]
    return node.outputs[value.index] if node.outputs else None, node.op


def _is_scalar(spec: Spec) -> bool:
    return all(size == 1 for size in spec.shape)


def whole_numbers(names: Iterable[str], watched: Iterable[Any], session: Session) -> list[str]:
    """The names of the watched values that are whole numbers or truth values."""
    specs = [(name, _spec(item, session)[0]) for name, item in zip(names, watched, strict=True)]
    return [name for name, spec in specs if spec is not None and not flows(spec.dtype)]


def _check_scalar(name: str, item: object, session: Session) -> None:
    spec, _ = _spec(item, session)
    if spec is None:
        raise InvalidArgument(f"cannot watch {name}: it has no value")
    if not _is_scalar(spec):
        raise ShapeError(f"a watched value has shape []: {name} is {spec}; take its mean() in the graph")


def known_keys(session: Session, keys: Iterable[Any], *, named: bool) -> None:
    """Raise NotFound for a key of a batch that names nothing in the graph; named: mention ``feeds`` as a remedy."""
    for key in keys if named else ():
        if isinstance(key, str) and not _is_value(session, key):
            names = [session.graph.contents.shown(node) for node in session.graph.placeholders]
            raise NotFound(
                f"the items of data are dicts with {key!r}, which graph {session.graph.name} does not have; say what "
                f"their parts are fed to, feeds={{{key!r}: {names[0] if names else 'x'}}}; its placeholders are "
                f"{', '.join(names) or 'none'}"
            )


def _is_value(session: Session, name: str) -> bool:
    try:
        session.graph.value(name)
    except NotFound:
        return False
    return True


def begin(session: Session, resume: object) -> int:
    """The number of steps taken before; with a path the file is restored.

    Raises InvalidArgument and FailedPrecondition.
    """
    if resume is False or resume is None:
        return 0
    if resume is True and session.state.inputs.training is not None:  # an interrupt came before it was put away
        session.state.settle(session.state.inputs.training)
    if resume is True and (ahead := session.state.ahead) is not None:
        resume = ahead
    if resume is not True:
        if not isinstance(resume, str | PathLike):
            raise InvalidArgument(f"resume is True or the path of a file of Session.save, or a folder, not {resume!r}")
        resume = newest(resume)
        training = checkpoint.load(resume)[1].get("training", {})
        steps = 0 if training.get("gaps") else training.get("steps", 0)
    else:
        steps = session.state.resumed
    if not steps:
        where = "in this session" if resume is True else f"in {resume}"
        raise FailedPrecondition(
            f"there is no training of graph {session.graph.name} to go on with {where}: none began, it was at its end, "
            "or asynchronous tasks had applied some of its steps before others; leave out resume"
        )
    if resume is not True:
        session.restore(resume)
    return steps


def warn_of_order(data: object, begin: int) -> None:
    """Warn of a DataLoader that shuffles, in mid-pass: its batches before are dropped, and are those of another order.

    Not where its generator stands at its seed, as before the first of these calls.
    """
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None) or getattr(data, "sampler", None)
    own = getattr(sampler, "generator", False)  # None: torch's
    if not begin or not (own is None or isinstance(own, torch.Generator)):
        return
    own, dropped = own or torch.default_generator, begin % (batch_count(data) or begin + 1)
    fresh = torch.Generator(own.device).manual_seed(own.initial_seed())
    if not dropped or torch.equal(own.get_state(), fresh.get_state()):
        return
    warnings.warn(
        f"the {type(data).__name__} shuffles, and goes on in mid-pass: the {dropped} batches that were taken of it are "
        "dropped from another order, so that in this pass some rows are trained on twice and others never. "
        "tfnb.Source(loader) keeps its order; or seed the loader's generator= before this call as before the first one",
        stacklevel=user_level(None),
    )


def exact_of(exact: object, mode: Mode, microbatches: object) -> bool | None:
    """Validate ``exact``: whether tasks sum in mid-step (True), look first whether that is needed, or neither (False).

    Raises InvalidArgument for another value, and for True where rows are not divided over tasks in step.
    """
    if exact not in (None, True, False) or (isinstance(exact, int) and not isinstance(exact, bool)):
        raise InvalidArgument(f"exact is None, True or False, not {exact!r}")
    if exact is True and microbatches not in (None, 1):
        raise InvalidArgument(
            f"exact=True sums over tasks in mid-step, and microbatches={microbatches!r} come one after the other: each "
            "ends before the next one begins. Leave out one of them"
        )
    if exact is True and (mode.name != "sync" or mode.may_have_spare):
        raise InvalidArgument(
            f"exact=True sums over all tasks in mid-step, and with mode={mode} no task waits for the others there: use "
            "mode='sync' without backup tasks"
        )
    return exact  # type: ignore[return-value]


def ensure_limits(timeout: object, restarts: object, progress_after: object) -> None:
    """Raise InvalidArgument for a number of seconds, or of restarts, that is none."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise InvalidArgument(f"timeout is in seconds, more than 0, not {timeout!r}")
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise InvalidArgument(f"restarts is how often a lost server is replaced, an int of at least 0: {restarts!r}")
    if isinstance(progress_after, bool) or not isinstance(progress_after, int | float) or not progress_after >= 0:
        raise InvalidArgument(f"progress_after is in seconds, 0 or more, not {progress_after!r}")


def division_of(microbatches: object, session: Session, mode: Mode) -> Division:
    """Into how many microbatches a step is divided; raises InvalidArgument, or Unimplemented with a cluster."""
    if microbatches is None and mode.is_pipeline:
        raise InvalidArgument("mode='pipeline' divides each step into microbatches: say how many, microbatches=8")
    if microbatches is None:
        return WHOLE
    asked = division(microbatches)
    if asked.microbatches != AUTO and asked.microbatches < mode.pipelines:
        raise InvalidArgument(
            f"replicas={mode.pipelines} of a pipeline divide its microbatches={asked.microbatches} among them, and "
            f"some would have none: take microbatches={4 * mode.pipelines}, for example, or fewer replicas"
        )
    if asked.is_whole:
        return WHOLE
    if mode.is_pipeline and asked.microbatches == AUTO:
        raise InvalidArgument(
            "microbatches='auto' is chosen by a memory budget, and mode='pipeline' has none: say how many"
        )
    if mode.is_pipeline:  # in this process the loop over microbatches, with the same values
        return asked._replace(schedule="" if session.cluster is None else mode.schedule, replicas=mode.pipelines)
    if session.cluster is not None:
        raise Unimplemented(
            f"microbatches={microbatches} are of trainings in this process and of mode='pipeline', and a cluster is "
            f"connected, whose tasks divide the rows of a step in mode={mode.name!r}: leave out microbatches, close "
            "the cluster, or place stages on its tasks (tfnb.device) for mode='pipeline'"
        )
    if mode.name != "sync":
        raise InvalidArgument(
            f"microbatches={microbatches} belong to mode='sync', not to {mode.name!r}: a step waits for all of them"
        )
    if mode.backup:
        raise InvalidArgument(f"microbatches={microbatches} are done by one process: there is no backup={mode.backup}")
    return asked


def look_at_means(
    session: Session, fetches: Fetches, keys: Sequence[Any], values: Sequence[Any], division: Division
) -> None:  # fmt: skip
    """Warn, once for each step and number of microbatches, of a loss that is no mean over the rows of a batch."""
    microbatches = session.microbatches_of(fetches, dict(zip(keys, values, strict=True)), division)
    if microbatches == 1:
        return
    step, tensors = session.step_of(fetches, dict(zip(keys, values, strict=True)))
    known: set[Any] = step.whole.attached.setdefault("divided by microbatches", set())
    updates = frozenset(node.id for node in step.graph.nodes if node.op == "tfnb.assign")
    key = updates, step.fetches, "microbatches", microbatches
    first = next(iter(batches_of(step, [(tensors, 0)])), None)
    if key not in known and first is not None:
        is_mapped = any(v.initialized and region_of(v.kept) is not None for v in step.variables)
        room = session.memory_budget if is_mapped else None
        seen = look_at_microbatches(step, microbatches, first, room)
        for note in seen.notes:
            warnings.warn(note, stacklevel=user_level(None))
        if seen.is_settled:
            known.add(key)


def operations_of(fetch: Fetches, session: Session) -> list[Any]:
    """The fetches with effects: operations, and writes of Variables."""
    leaves: list[Any] = []
    structure(fetch, leaves)
    ops = [(leaf, _spec(leaf, session)) for leaf in leaves if not isinstance(leaf, Variable)]
    return [leaf for leaf, (spec, op) in ops if spec is None or op == "tfnb.assign"]


def mode_of(
    mode: TaskMode, backup: int, staleness: int | None, allow_plain_collectives: bool = False,
    schedule: object = None, replicas: object = 1,
) -> Mode:  # fmt: skip
    """The mode that is asked for; raises InvalidArgument for one that there is not."""
    pipeline = _pipeline_of(mode, schedule, replicas)
    if not isinstance(allow_plain_collectives, bool):
        raise InvalidArgument(f"allow_plain_collectives is True or False, not {allow_plain_collectives!r}")
    if allow_plain_collectives and mode != "allreduce" and not isinstance(mode, LocalSGD):
        raise InvalidArgument(f"allow_plain_collectives belongs to mode='allreduce' and LocalSGD, not to {mode!r}")
    if type(mode) in SAYS:
        if backup or staleness is not None:
            raise InvalidArgument(f"{type(mode).__name__} says {SAYS[type(mode)]}: leave out backup and staleness")
        return _mode_of_object(mode, allow_plain_collectives)
    if not isinstance(mode, str):
        raise InvalidArgument(
            f"mode={mode!r:.200} is no mode; there are: {', '.join(MODES)}, and objects of tfnb.train"
        )
    if mode not in MODES:
        near = difflib.get_close_matches(mode, MODES, 1)
        nearest = f"; near: {near[0]!r}" if near else ""
        raise InvalidArgument(
            f"unknown mode {mode!r}{nearest}; there are: {', '.join(MODES)}, tfnb.train.Downpour, LocalSGD, "
            "Sandblaster and SyncReplicas"
        )
    if isinstance(backup, bool) or not isinstance(backup, int) or backup < 0:
        raise InvalidArgument(f"backup is the number of spare tasks, an int of at least 0, not {backup!r}")
    if backup and mode != "sync":
        raise InvalidArgument(
            f"backup={backup} belongs to mode='sync', not to {mode!r}: there no task waits for others"
        )
    if staleness is not None and mode != "bounded":
        raise InvalidArgument(f"staleness={staleness!r} belongs to mode='bounded', not to {mode!r}")
    if mode == "bounded" and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        raise InvalidArgument(
            "mode='bounded' takes staleness, the number of steps that a task may be ahead of the slowest one: an int "
            f"of at least 0, not {staleness!r}"
        )
    return pipeline or Mode(mode, backup, staleness, is_plain=allow_plain_collectives)


def _mode_of_object(mode: object, is_plain: bool) -> Mode:
    """The mode of an object of `tfnb.train`."""
    match mode:
        case SyncReplicas():
            return Mode("sync", mode.backup, None, mode.m, mode.n or 0, mode.elastic or not mode.distinct)
        case LocalSGD():
            return Mode("local", is_plain=is_plain, every=mode.every)
        case Downpour():
            alone = Mode("downpour", warm_start=mode.most_alone, is_warmth_measured=mode.warm_start == "auto")
            return alone._replace(n_fetch=mode.n_fetch, n_push=mode.n_push)
    raise AssertionError(mode)


def _pipeline_of(mode: TaskMode, schedule: object, replicas: object) -> Mode | None:
    """The mode of a pipeline; None for another mode, which has none of its options. Raises InvalidArgument."""
    if type(replicas) is not int or replicas < 1:
        raise InvalidArgument(f"replicas is how many copies of a pipeline work, an int of at least 1, not {replicas!r}")
    if mode == "pipeline":
        if schedule is not None and schedule not in SCHEDULES:
            raise InvalidArgument(f"schedule is one of {', '.join(map(repr, SCHEDULES))}, not {schedule!r}")
        return Mode("pipeline", schedule=SCHEDULES[0] if schedule is None else schedule, pipelines=replicas)
    if replicas > 1:
        raise InvalidArgument(
            f"replicas={replicas} are of mode='pipeline': in mode {mode!r} each compute task is a replica, so that "
            "tfnb.connect says how many there are"
        )
    if schedule is not None:
        raise InvalidArgument(f"schedule={schedule!r} belongs to mode='pipeline', not to {mode!r}")
    return None
