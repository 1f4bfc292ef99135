"""The Variables of a cluster: they live on its servers, and the storages here show them as of some step.

A Variable moves when a step uses it for the first time. What is written here by other means than a step, such as
`load_state_dict`, goes there before the next one.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tfnb.cluster.engine.engine import Engine, Pins
from tfnb.cluster.notebook.holdings import Holdings
from tfnb.cluster.notebook.module_reads import Hooks
from tfnb.cluster.notebook.pinned_values import PinnedValues
from tfnb.cluster.notebook.queue_homes import QueueHomes
from tfnb.cluster.notebook.recovery_copies import CheckpointCopy, CopySet, RecoveryCopies
from tfnb.cluster.queues.contents_there import Copies
from tfnb.cluster.wire.messages import Ask
from tfnb.errors import Aborted, FailedPrecondition, InvalidArgument, TfnbError
from tfnb.graph import Graph, Variable, lazy_memory
from tfnb.graph.queue import Queue
from tfnb.passes import StepGraph
from tfnb.placement.placement import Homes, Piece, read_from
from tfnb.placement.requests import shards_asked
from tfnb.placement.shards import pack, together
from tfnb.placement.stage_homes import moves, stage_shards

REFRESH = 2.0  # seconds between two pulls during a fit, at least, and between two copies
STILL = 0.05  # of the time, at most, that training stands still for them
BUSY = 0.02  # of a processor's time, at most, that they take here; servers compute about as much
RARER = 4.0  # times these shares are smaller while other processes hold a newer copy

Publish = Callable[[dict[str, Any]], Awaitable[None]]  # writes facts of the newest copy to the registry


async def _nowhere(facts: dict[str, Any]) -> None:
    """Publish nothing."""


class VariablesThere:
    """``held``: the Variables on the servers. do: waits for a coroutine in the event loop, named for messages.

    Coroutines run in the event loop, and the rest waits for it.
    """

    def __init__(
        self, engine: Engine, do: Callable[..., Any], queues: QueueHomes | None = None, publish: Publish = _nowhere
    ) -> None:
        self.engine, self.do, self.held, self.hooks = engine, do, Holdings(), Hooks()
        self.safety = RecoveryCopies(engine, self._all_asked, publish)
        self.shown: CopySet | CheckpointCopy | None = None  # the copy that the storages here show; None: a pull
        self.passed_over: list[str] = []  # newer copies that the last `recall` did not take, and why
        self._sent_at: dict[str, float] = {}  # when values were written on the servers, other than by a step
        self._left: dict[Variable, Any] = {}  # with marks of their storages when a server was lost, for `recall`
        self._outdated: list[Variable] = []  # of these, what had been written on servers since the last pull
        self._newer: list[CopySet | CheckpointCopy] = []  # copies that were newer than the values here then
        self._queues = queues
        self.pulled_step = 0  # the step that the storages here show
        self.pulled_at = time.monotonic()
        self.unseen: list[int] = []  # steps of `run`, by the cluster's count, that the storages here may not show
        self.training: list[frozenset[Variable]] = []  # what each training in progress writes
        self._due = time.monotonic() + REFRESH  # when they are to be pulled again
        self._stepped: set[str] = set()  # keys of Variables that steps have written
        self._unseen: set[str] = set()  # folders of which was said that servers do not see them
        self._moves = itertools.count(1)
        self._stage_of: weakref.WeakKeyDictionary[Variable, tuple[int, weakref.ref[Graph]]] = (
            weakref.WeakKeyDictionary()
        )  # by the pipeline that a graph trained

    def outdated(self, step: StepGraph) -> None:
        """A step writes its Variables there: the storages here are old."""
        written = {variable.key for variable in step.writes}
        self.held.stale |= written
        self._stepped |= written

    def homes_of(self, step: StepGraph) -> dict[str, tuple[Piece, ...]]:
        """The homes of a step's Variables: present ones, and new ones for Variables not on servers yet."""
        return self._homes(step, {})

    def _homes(self, step: StepGraph, stages: Mapping[Variable, int]) -> dict[str, tuple[Piece, ...]]:
        held, groups, count = self.held.homes, together(step.graph), len(self.engine.shards)
        asked = {**stages, **shards_asked(step.graph.nodes, groups, held, count)}
        return {**held, **pack(groups, held, self.held.loads(count), step.whole, asked)}

    def homes_of_stages(self, step: StepGraph, tasks: Collection[int], graph: Graph) -> dict[str, tuple[Piece, ...]]:
        """The homes of the Variables of a pipeline whose tasks are servers: those of its stages, where they move.

        graph: of the step. It fixes the stage of its Variables. Raises InvalidArgument naming one whose stage another
        graph has fixed elsewhere, and FailedPrecondition for one that another training writes.
        """
        groups = together(step.graph)
        asked = shards_asked(step.graph.nodes, groups, {}, len(self.engine.shards))  # requests of the user stand
        wanted = {**stage_shards(step, groups, tasks), **asked}
        for variable, shard in wanted.items():
            fixed, owner = self._stage_of.get(variable, (shard, None))
            other = None if owner is None else owner()
            if fixed != shard and other is not None and other is not graph:
                raise InvalidArgument(
                    f"variable {variable.name} lies at task:{fixed}, where a pipeline of graph {other.name} trains it, "
                    f"and graph {graph.name} has it in the stage of task:{shard}: place its stages alike, or connect "
                    "again to train this graph only"
                )
        self._rehome(wanted)
        self._stage_of.update({variable: (shard, weakref.ref(graph)) for variable, shard in wanted.items()})
        return self._homes(step, wanted)

    def _rehome(self, wanted: Mapping[Variable, int]) -> None:
        """Move Variables that do not lie whole on the wanted shards. Raises FailedPrecondition."""
        lies = {variable.key: [piece.shard for piece in self.held.homes[variable.key]] for variable in wanted
                if variable in self.held}  # fmt: skip
        moved = moves(wanted, lies)
        for variable in moved:
            if any(variable in written for written in self.training):
                raise FailedPrecondition(
                    f"variable {variable.name} is to move to task:{wanted[variable]}, the stage of this pipeline, and "
                    "another training writes it: wait for that one"
                )
        if moved:
            homes = {v.key: (Piece(wanted[v], f"{v.key}@{wanted[v]}.{next(self._moves)}"),) for v in moved}
            self.do("moving variables to their stages", None, self._moved, moved, homes)

    async def _moved(self, variables: Sequence[Variable], homes: Homes) -> None:
        """Move Variables from shard to shard, all or none, between two steps; keys on their servers are new ones.

        Tasks keep copies by key and version, and versions are of a server.
        """
        async with self.engine.single.turn:
            old: dict[int, list[str]] = {}
            for variable in variables:
                for piece in self.held.homes[variable.key]:
                    old.setdefault(piece.shard, []).append(piece.key)
            found: dict[str, torch.Tensor] = {}
            asks = [Ask(shard, "pull", {"keys": keys}) for shard, keys in old.items()]
            for ask, answer in zip(asks, await self.engine.insist_on(asks), strict=True):
                found.update(zip(ask.meta["keys"], answer.tensors, strict=True))
            values = {v.key: _joined(self.held.homes[v.key], found) for v in variables}
            self.engine.single.wrote(values)
            await self._create(variables, homes, values)
            for variable in variables:
                self.held.move(variable, homes[variable.key])
                variable.home = RemoteHome(self, [piece.shard for piece in homes[variable.key]])
            await self.engine.insist_on([Ask(shard, "drop", {"keys": keys}) for shard, keys in old.items()])

    def strays(self, step: StepGraph) -> list[Variable]:
        """The variables of a step that are still at home."""
        return [variable for variable in step.variables if variable not in self.held]

    def adopt(self, strays: Sequence[Variable], homes: Homes) -> None:
        """Move variables to their servers, with their current values."""
        for variable in strays:
            if variable.home is not None:
                raise FailedPrecondition(f"variable {variable.name} lives on {variable.home}; close that cluster first")
        if strays:
            self.do("moving variables to the servers", None, self._move, strays, homes)
            self.hooks.add(strays)

    async def _move(self, variables: Sequence[Variable], homes: Homes) -> None:
        """Move all Variables to servers, or none: if a server has no room, the pieces created before are dropped."""
        variables = [variable for variable in variables if variable not in self.held]
        await self._create(variables, homes, {variable.key: variable.kept.cpu() for variable in variables})
        for variable in variables:
            self.held.adopt(variable, homes[variable.key])
            variable.home = RemoteHome(self, [piece.shard for piece in homes[variable.key]])

    async def _create(self, variables: Sequence[Variable], homes: Homes, values: Mapping[str, torch.Tensor]) -> None:
        """Create the pieces of Variables on servers, all or none. values: of the Variables, by key."""
        made: dict[int, list[str]] = {}
        try:
            for is_trained in (True, False):  # what tasks do not read lies in other slabs
                some = [variable for variable in variables if variable.trainable is is_trained]
                for shard, pieces in _on_shards(some, homes, values).items():
                    await self.engine.create(shard, pieces)
                    made.setdefault(shard, []).extend(pieces)
        except TfnbError:
            if self.engine.lost is None:
                await self.engine.insist_on([Ask(shard, "drop", {"keys": keys}) for shard, keys in made.items()])
            raise

    def drop_gone(self) -> None:
        """Variables that nobody can reach, of a cell that was recorded again, are dropped on the servers too."""
        gone = self.held.gone()
        if gone:
            self.do("dropping variables", None, self.engine.drop, gone)

    def send_for_step(self, variables: Sequence[Variable], *, thorough: bool = True) -> None:
        """`send` before a step: raises also where no step may take a value that is looked up here."""
        for variable in variables:
            if variable.leads:
                _ = variable.storage
        self.send(variables, thorough=thorough)

    def send_leading(self, variables: Iterable[Variable]) -> None:
        """Send changed values of Variables that the notebook leads, such as the learning rate of an optimizer."""
        leading = [variable for variable in variables if variable.leads]
        for variable in leading:
            _ = variable.kept  # which looks it up, also where the next step may not take it
        self.send(leading, thorough=False)

    def send(self, variables: Iterable[Variable], *, thorough: bool = True) -> None:
        """Send values written locally outside of steps; raises FailedPrecondition if that would lose steps."""
        written = self.held.written(variables, thorough=thorough)
        for variable in self.held.behind(written):
            raise FailedPrecondition(
                f"variable {variable.name} was written here, but this storage shows step {self.pulled_step} and "
                f"the servers are at step {self.engine.step}: call pull() of the cluster first and write again, "
                "or assign to the Variable, which writes there"
            )
        if written:
            self.do("sending what was written here", None, self._sent, written)

    async def _sent(self, variables: Sequence[Variable]) -> None:
        values = {variable.key: variable.kept.cpu() for variable in variables}
        await self.engine.assign(_on_shards(variables, self.held.homes, values), list(values))
        for variable in variables:
            self.held.same(variable)
            self._sent_at[variable.key] = time.monotonic()

    def sent_but_behind(self) -> list[Variable]:
        """Send local writes, except writes to outdated copies; returns the Variables of these writes."""
        written = self.held.written(self.held.variables, thorough=True)
        behind = self.held.behind(written)
        self.send(v for v in written if v not in behind)
        return behind

    def pull(self, kept: Sequence[Variable] = (), patience: float | None = None) -> int:
        """Copy the servers' values into local storages, except ``kept`` ones; returns the step of the values.

        Raises DeadlineExceeded after ``patience`` seconds.
        """
        return self.do("pull", patience, self.bring_home, kept)

    async def bring_home(self, kept: Sequence[Variable] = ()) -> int:
        """Fetch all values, then assign them at once: local storages, except ``kept`` ones, are of one step."""
        begin, busy = time.monotonic(), time.process_time()
        variables = [variable for variable in self.held.variables if variable not in kept]
        eras = {} if self._queues is None else await self._queues.eras()
        at = {} if self._queues is None else self._queues.at(eras)
        homes, found, pulled = await self.copies(variables, at, unheard=True)
        values = {variable.key: _joined(homes[variable.key], found) for variable in variables}
        with torch.no_grad(), self.held.showing:
            there = [variable for variable in variables if variable in self.held]  # else closed: its value is here
            # looked up before any is assigned: what a look-up makes of one slot may depend on another, such as a count
            for variable, kept_here in zip(there, [variable.kept for variable in there], strict=True):
                lazy_memory.assign(kept_here, values[variable.key])
            for variable in there:
                self.held.same(variable)
            if self.engine.lost is None:  # else none of the values is here
                self.engine.shown(pulled)
                if self._queues is not None:
                    self._queues.copied(eras, pulled)
                self._shows(pulled.step, begin, None)
        still, busy = time.monotonic() - begin, time.process_time() - busy
        times = RARER if self.safety.is_current else 1.0
        self._due = time.monotonic() + max(REFRESH, times * still / STILL, times * busy / BUSY)
        return pulled.step

    def _shows(self, step: int, at: float, copy: CopySet | CheckpointCopy | None) -> None:
        """The storages here show the values of a step, of this instant. copy: whose values these are; None: a pull."""
        self.pulled_step, self.pulled_at, self.shown = step, at, copy
        self.unseen[:] = [number for number in self.unseen if number > step]

    async def values(
        self, variables: Sequence[Variable], queues: Mapping[Queue, tuple[int, str]] = MappingProxyType({})
    ) -> tuple[dict[str, torch.Tensor], int, Copies]:
        """Values by key, their step, and the contents of ``queues`` (given as shard and key) at that step."""
        homes, found, pulled = await self.copies(variables, queues)
        values = {variable.key: _joined(homes[variable.key], found) for variable in variables}
        return values, pulled.step, pulled.held

    async def copies(
        self, variables: Sequence[Variable], queues: Mapping[Queue, tuple[int, str]] = MappingProxyType({}), *,
        unheard: bool = False,
    ) -> tuple[Homes, dict[str, torch.Tensor], Pins]:  # fmt: skip
        """The homes of Variables, their values, and the contents of ``queues`` at the same step; see `Engine.pull`."""
        homes = dict(self.held.homes)
        return homes, *await self.engine.pull(*self._asked(variables, queues), unheard=unheard)

    def _all_asked(self) -> tuple[Homes, dict[int, list[str]]]:
        return dict(self.held.homes), self._asked(self.held.variables, {})[0]

    def _asked(
        self, variables: Iterable[Variable], queues: Mapping[Queue, tuple[int, str]]
    ) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        """Keys of pieces of Variables, and of queues, by shard."""
        wanted, asked = dict[int, list[str]](), dict[int, list[str]]()
        for variable in variables:
            for piece in read_from(self.held.homes[variable.key]):
                wanted.setdefault(piece.shard, []).append(piece.key)
        for shard, key in queues.values():
            asked.setdefault(shard, []).append(key)
        return wanted, asked

    async def pinned(
        self, variables: Mapping[str, Variable], queues: Mapping[Queue, tuple[int, str]]
    ) -> tuple[PinnedValues, int, Copies]:
        """Pin current values of Variables on the servers, by label; with the step and the contents of ``queues``."""
        homes, at = dict(self.held.homes), time.monotonic()
        pins = await self.engine.pin(*self._asked(variables.values(), queues))
        labels = {variable.key: label for label, variable in variables.items()}

        def complete(file: Path | str) -> None:
            if (last := self.safety.written) is None or last.at < at:
                self.safety.written = CheckpointCopy(file, labels, pins, at)

        return PinnedValues(self.engine, variables, homes, pins, self._say_unseen, complete), pins.step, pins.held

    def _say_unseen(self, folder: str, text: str) -> None:
        if folder not in self._unseen:
            self._unseen.add(folder)
            self.engine.notes.append(text)

    def show(self, tensors: Collection[int] | None, patience: float | None = None) -> None:
        """Pull, if servers have a newer value of one of these tensors (by id), or of any. Local writes stay."""
        newer = [variable for variable in self.held.variables if variable.key in self.held.stale]
        if tensors is None:
            is_asked = bool(newer)
        else:
            is_asked = any(variable.held is not None and id(variable.held.tensor()) in tensors for variable in newer)
        if is_asked:
            self.pull(self.held.written(self.held.variables, thorough=True), patience)

    def assigned(self, variable: Variable, value: torch.Tensor) -> None:
        """Keep a value, assigned on the servers outside of a step, safe from the loss of a server.

        A Variable that no step writes, such as a learning rate, is assigned here, too. Of one that steps write copies
        have to be of one step, so all are renewed.
        """
        self.held.superseded(variable)
        self._sent_at[variable.key] = time.monotonic()
        if any(variable in written for written in self.training):
            self.renew()
        elif variable.key in self._stepped:
            self.safety.hurry()
        else:
            with torch.no_grad(), self.held.showing:
                lazy_memory.assign(variable.kept, value.to(variable.kept.device))
                self.held.same(variable)

    def hurry(self) -> None:
        """The next `refresh` pulls at once."""
        self._due = 0.0

    def refresh(self, *, pulls: bool = True) -> None:
        """A copy held by other processes, and a pull, now and then while steps are taken, for the loss of a server.

        pulls: whether the notebook has a copy, too.

        While queues lie on servers the copy is the pulled one: it is of the same step as the queues' contents here.
        What was written here stays: it is sent later, or refused.
        """
        if self._queues is None or not self._queues.are_copied:
            self.safety.refresh(REFRESH)
        if pulls and time.monotonic() > self._due:
            self.renew()

    def renew(self) -> None:
        """Pull during a training, unless a step comes between: then a pull is due soon."""
        try:
            self.pull(self.held.written(self.held.variables, thorough=False))
        except Aborted:
            self._due = time.monotonic() + REFRESH

    def leave(self) -> None:
        """A server is lost: note the complete copies that are newer than the values here, for `recall`.

        The storages here are marked: `recall` does not overwrite values that are written from now on. Queues here are
        of the step of the last pull: while they are copied only the pulled values fit them, and no other copy is noted.
        """
        copies = (self.safety.newest, self.safety.written)
        self._newer = [copy for copy in copies if copy is not None and copy.at > self.pulled_at]
        if not self._newer or (self._queues is not None and self._queues.are_copied):
            self._newer = []
            return
        variables = [variable for variable in self.held.variables if not variable.leads]
        written = self.held.written(variables, thorough=False)
        self._left = {variable: _mark(variable) for variable in variables if variable not in written}
        self._outdated = [variable for variable in self._left if variable.key in self.held.stale]

    def recall(self, *, files: bool) -> bool:
        """After the loss of a server: take the newest complete copy that is newer than the values here.

        files: also a checkpoint. ``passed_over`` says of each newer copy why it was not taken.
        """
        newer = [copy for copy in self._newer if files or isinstance(copy, CopySet)]
        left, outdated = self._left, self._outdated
        self._newer, self._left, self._outdated, self.passed_over = [], {}, [], []
        for copy in sorted(newer, key=lambda copy: copy.at, reverse=True):
            mine = {v: mark for v, mark in left.items() if v.key in copy.variables and self._is_older(v, copy.at)}
            lacks = [variable.name for variable in outdated if variable not in mine]
            try:
                why = f"it lacks {lacks[0]}, which was written since" if lacks else self._taken(copy, mine)
            except TfnbError:  # the client was closed
                return False
            if not why:
                return True
            self.passed_over.append(f"{copy.source}, of step {copy.pins.step}: {why}")
        return False

    def _is_older(self, variable: Variable, at: float) -> bool:
        """Whether a Variable was assigned last before an instant."""
        return self._sent_at.get(variable.key, 0.0) < at

    def _taken(self, copy: CopySet | CheckpointCopy, mine: Mapping[Variable, Any]) -> str:
        """Take the values of Variables from a copy, all or none; returns why it cannot be done, else nothing."""
        link, what = self.engine.link, "taking the copy of the values"
        if isinstance(copy, CheckpointCopy):
            try:
                values = copy.values()
            except (TfnbError, OSError, MemoryError) as error:
                return str(error).partition("\n")[0]
        else:
            found = link.wait(link.start_aside(self.safety.fetched, copy), None, what)  # its calls have deadlines
            if isinstance(found, str):
                return found
            values = {variable.key: _joined(copy.homes[variable.key], found) for variable in mine}
        taking = link.start_aside(self._take, copy, mine, values)
        try:
            return link.wait(taking, None, what)
        except KeyboardInterrupt:
            link.wait(taking, None, what)  # all of them, or none
            raise

    async def _take(
        self, copy: CopySet | CheckpointCopy, mine: Mapping[Variable, Any], values: Mapping[str, torch.Tensor]
    ) -> str:  # fmt: skip
        if changed := [variable.name for variable, mark in mine.items() if _mark(variable) != mark]:
            return f"{changed[0]} was written here since the loss"
        with torch.no_grad(), self.held.showing:
            for variable in mine:
                lazy_memory.assign(variable.kept, values[variable.key])
        self.engine.shown(copy.pins)
        self._shows(copy.pins.step, copy.at, copy)
        return ""

    def release(self) -> None:
        """Variables live here again."""
        for variable in self.held.variables:
            if isinstance(variable.home, RemoteHome) and variable.home.there is self:
                variable.home = None
        self.held.clear()

    def kept(self) -> list[Variable]:
        """Variables that were written here since they were pulled: their values here count.

        Variables whose value on the servers is newer are left out, and a warning names them.
        """
        written = self.held.written(self.held.variables, thorough=True)
        behind = self.held.behind(written)
        self.engine.notes += [gives_way(variable) for variable in behind]
        return [variable for variable in written if variable not in behind]


class RemoteHome:
    """The owner of a variable on one server, or on several; see `tfnb.graph.variable.ValueOwner`."""

    def __init__(self, there: VariablesThere, shards: Sequence[int]) -> None:
        self.there, self._shards = there, shards

    def value(self, variable: Variable) -> torch.Tensor:
        """A copy of the value on the servers."""
        if variable.key not in self.there.held.stale:
            self.there.send([variable])
        values, _, _ = self.there.do("reading a variable", None, self.there.values, [variable])
        return values[variable.key].to(variable.spec.device)

    def assign(self, variable: Variable, value: torch.Tensor) -> None:
        """Write the value on the servers."""
        there = self.there
        new: dict[int, dict[str, torch.Tensor]] = {}
        for piece in there.held.homes[variable.key]:
            new.setdefault(piece.shard, {})[piece.key] = piece.of(value.cpu())
        there.do("assigning a variable", None, there.engine.assign, new, [variable.key])
        there.assigned(variable, value)

    def __str__(self) -> str:
        engine = self.there.engine
        return ", ".join(f"{engine.name_of(shard)} ({engine.shards[shard].peer.addr})" for shard in self._shards)


def _mark(variable: Variable) -> tuple[int, int, int]:
    """A mark of a storage, which every write here changes."""
    storage = variable.kept
    return storage.data_ptr(), 0 if storage.is_inference() else storage._version, variable.version


def _on_shards(
    variables: Iterable[Variable], homes: Homes, values: Mapping[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """The values of Variables, in pieces, by shard."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for variable in variables:
        for piece in homes[variable.key]:
            found.setdefault(piece.shard, {})[piece.key] = piece.of(values[variable.key])
    return found


def _joined(pieces: Sequence[Piece], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return lazy_memory.joined([values[piece.key] for piece in read_from(tuple(pieces))])


def gives_way(variable: Variable) -> str:
    """The warning for a local write to an outdated copy of a Variable, lost to the servers' value."""
    return f"what was written here to variable {variable.name} gives way to the servers' value: it is newer"
