"""A failing kernel as an error of ours: node, op, the user's line, and the shapes that were given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tfnb.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, TfnbError
from tfnb.execution.lowering.program import Program
from tfnb.execution.running import Deadline, Stop
from tfnb.execution.tiers.compiled_loops import NativeLoop
from tfnb.execution.tiers.scalarize import Quick, parts
from tfnb.execution.tracing.probes import Probe, ProbedCode
from tfnb.graph import Node, Spec
from tfnb.recording.marks.notes import line_of
from tfnb.recording.values.workspace import workspace


def explained(program: Program, error: Exception, tensors: Iterable[torch.Tensor | None]) -> TfnbError:
    """The user's error for ``error``, raised by the generated code of ``program`` on these feeds.

    program: a Program, or a Dataflow of several. A feed that is None is one that nobody needed.
    """
    by_id = program.whole.contents.by_id
    feeds = zip(program.feeds, tensors, strict=True)
    fed = ", ".join(f"{by_id[value.node].name}: {Spec.of(t)}" for value, t in feeds if t is not None)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kind: type[TfnbError] = InvalidArgument
    if _is_out_of_memory(error):
        kind, reason = ResourceExhausted, f"{reason}; feed fewer rows, or set a memory_budget of the session"
    elif isinstance(error, OverflowError):  # an op of ours that has no room, such as that of a table
        kind = ResourceExhausted
    node = failing_node(program, error)
    if node is None:
        return kind(f"the run failed: {reason}\n  fed: {fed or 'nothing'}")
    known = by_id | _inside(program)
    specs = tuple(str(known[v.node].outputs[v.index]) for v in node.inputs if v.node in known)
    where = f"\n  at {node.source}{_asked(program, node)}" if node.source else ""
    return kind(
        f"{node.op} failed: {reason}\n"
        f"  node {node.name}, inputs as recorded: {', '.join(specs) or 'none'}\n  fed: {fed or 'nothing'}{where}",
        **node.where, inputs=specs,
    )  # fmt: skip


def _inside(program: Program) -> dict[int, Node]:
    """The nodes of all loops, branches and regions."""
    codes = (code for inner in program.inner for code in _codes(inner) if isinstance(code, Program))
    return {
        id_: node for code in codes for graph in (code.whole, code.graph) for id_, node in graph.contents.by_id.items()
    }


def _asked(program: Program, node: Node) -> str:
    """The line of a called function that recorded a node, if known."""
    at = workspace(program.whole).asked.get(node.id)
    return "" if at is None else f"\n  in {line_of(*at)}"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error means out of memory: a class on accelerators, a sentence of torch's allocator on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def deadline(program: Program, timeout: float) -> Deadline:
    """The seconds that a step has, and the error for one that took longer."""

    def why(stop: Stop) -> DeadlineExceeded:
        at = failing_node(program, stop)
        line = None if at is None else at.source
        where = "" if at is None else f" (it stood at node {at.name}{f', {line}' if line else ''})"
        waits = "".join(f"\n  {line}" for line in stop.waits)
        where += f"; what it waited for:{waits}\n " if waits else ";"
        return DeadlineExceeded(
            f"run did not end within {timeout} s{where} nothing was written", node=at.name if at else None,
            cell=line.label if line else None, line=line.line if line else None,
        )  # fmt: skip

    return timeout, why


def failing_node(program: Program, error: BaseException) -> Node | None:
    """The failing node, from the traceback's line in the generated code, or attached to the error.

    In a loop or branch it is the innermost one.
    """
    trace, found = error.__traceback__, getattr(error, "node", None)
    programs = {type(p.module).forward.__code__: p for p in _codes(program)}
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in programs:
            found = _at_line(programs[frame.f_code], trace.tb_lineno) or found
        elif isinstance(loop := frame.f_locals.get("self"), NativeLoop):
            found = loop.loop.node  # in C++, or in Python whose loops are compiled
        elif isinstance(probe := frame.f_locals.get("probe"), Probe):  # a traced run's
            found = _at_line(probe.code, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def _codes(program: Any) -> Iterator[Program | Quick]:
    """All generated code of a lowered step, with inner programs."""
    if isinstance(program, Program):
        yield program
        yield from parts(program.quick)
    for inner in program.inner:
        yield from _codes(inner)


def _at_line(program: Program | Quick | ProbedCode, line: int) -> Node | None:
    text = program.code.splitlines()
    if not 0 < line <= len(text):
        return None
    return program.node_of.get(text[line - 1].split("=")[0].split(":")[0].strip())
