"""The magics themselves: parse, call one public function, return its object.

``tfnb.<name>`` loads torch when first used, so that ``%load_ext tfnb`` does not.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

import tfnb
from tfnb.magics.cell import compiled, place
from tfnb.magics.complete import VERBS
from tfnb.magics.export_files import exported
from tfnb.magics.graph_names import is_graph
from tfnb.magics.live import Lives
from tfnb.magics.options import device, existing, magic, near, parsed
from tfnb.magics.rerun import Cells, Change, RecordedCell, change
from tfnb.magics.run_magics import RunMagics
from tfnb.magics.sticky import Sticky
from tfnb.magics.text_table import COLUMNS, Table, TextLines, variable_row
from tfnb.magics.watch import recorded_by, shadowed

NOTHING = (
    "this cell recorded nothing: it calls torch on no placeholder, Variable or module; x = tfnb.placeholder(sample) "
    "makes data a part of the graph"
)


def _servers(text: str) -> int | str:
    """``2``, or ``stages``."""
    try:
        return text if text == "stages" else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of parameter servers, and not stages") from None


@magics_class
class TfnbMagics(RunMagics):
    """Settings and magics; ``%config TfnbMagics`` lists the settings."""

    def __init__(self, shell: InteractiveShell, **kwargs: object) -> None:
        super().__init__(shell=shell, **kwargs)
        self.lives, self.cells = Lives(), Cells()
        self.sticky = Sticky(lambda: self.watch.is_running)

    # -- recording and looking ------------------------------------------------------------------------------

    @magic(
        argument("words", nargs="*", metavar="NAME", help="the graph; line form also a verb: " + " ".join(VERBS)),
        argument("-i", "--input", action="append", default=[], metavar="NAME[:DIMS]",
                 help="make the tensor NAME a placeholder; x:B,T,8 names axes, _ keeps the sample's size"),
        argument("-d", "--device", type=device, metavar="DEV", help="where factories and placeholders go"),
        argument("--lazy", action="store_true", help="shapes only, no sample values"),
        argument("-N", "--no-execute", action="store_true", help="show what AutoGraph makes of the cell, run nothing"),
        argument("--no-autograph", action="store_true", help="if, while and for stay Python, decided by the samples"),
        argument("--auto", action="store_true", help="then record again the cells that lost nodes by an edit"),
        argument("--append", action="store_true", help="keep the nodes of earlier runs of this cell"),
        argument("--show", action="store_true", default=None, help="draw the cell's part of the graph (default)"),
        argument("--no-show", action="store_false", dest="show", help="do not draw"),
        argument("--live", action="store_true", help="the live view: values on a click, and the connected cluster"),
        argument("--yes", action="store_true", help="with clear: drop the nodes without asking"),
    )  # fmt: skip
    def tfgraph(self, line: str, cell: str | None = None) -> Any:
        """Record a cell into a graph, or look at graphs.

        Cell form: the body is ordinary PyTorch, run at once on samples; a last expression becomes Out[n]. ``if``,
        ``while`` and ``for`` on tensors become part of the graph, and each run decides them anew; other Python
        statements run once, now. -o stores the graph. Line form: show (default), ls, rm [In[n]], clear --yes, export
        FILE; refresh: records cells again that lost nodes by an edit above them, or whose modules have changed; on: the
        cells below are recorded, too, but those that start with a magic; off ends that.

            %%tfgraph digits -i images:B,1,8,8
            %tfgraph digits export digits.svg
        """
        __tracebackhide__ = True
        options = parsed(self.tfgraph, line)
        if options.help:
            return self._help(self.tfgraph)
        if cell is None:
            return self._verb(options)
        program = compiled(self.shell, "tfgraph", line, cell)
        if options.no_execute:
            return self.watch.show({"text/plain": program.converted(tfnb.control_flow.Cell).text()})
        return self._recorded(RecordedCell(program, options, self.watch.owner(cell)))

    def _recorded(self, cell: RecordedCell) -> Any:
        """Record a cell, show its part of the graph, and report changes since its last run."""
        __tracebackhide__ = True
        program, options = cell.program, cell.options
        name = self._name(options)
        known = tfnb.graphs().get(name)
        before, contents = recorded_by(known), getattr(known, "contents", None)
        with (
            self._names_kept(options.input, name),
            tfnb.recording.record_cell(
                name, owner=cell.owner, label=program.label, filename=program.filename,
                namespace=self.shell.user_ns, device=options.device, lazy=options.lazy, append=options.append,
                failed=lambda graph, node: self._draw_failed(graph, program.label, node, options), body=program.body,
            ) as graph,
        ):  # fmt: skip
            self.shell.user_ns.update(map(self._input, options.input))
            result = program.run(self.full_tracebacks, None if options.no_autograph else tfnb.control_flow.Cell)
        found = change(contents, graph, cell.owner)
        self.cells.ran(graph, cell, found)
        is_empty = not any(n.owner is not None and n.owner.key.startswith(cell.owner) for n in graph.nodes)
        self._draw(graph, program.label, options, silent=program.silent or not graph.nodes, found=found)
        for note in (
            *([NOTHING] if is_empty and self.sticky.graph is None and not options.quiet else []),
            *graph.notes,
            *shadowed(graph, before, self.shell.user_ns),
            *found.lines(),
        ):
            self.watch.show({"text/plain": f"note: {note}"})
        if options.auto:
            self._refresh(graph)
        self._store(options, graph)
        return None if program.silent else result

    def _refresh(self, graph: object) -> None:
        """Record again the cells that lost nodes, from the top, with the cells that lose nodes by this."""
        __tracebackhide__ = True
        tried: set[str] = set()
        while cells := [cell for cell in self.cells.stale(graph) if cell.owner not in tried]:
            tried.add(cells[0].owner)
            label, quiet = cells[0].program.label, Namespace(**{**vars(cells[0].options), "show": False, "auto": False})
            self._recorded(replace(cells[0], options=quiet))
            self.watch.show({"text/plain": f"note: {label} was recorded again"})

    def _name(self, options: Namespace) -> str | None:
        name = options.graph if options.graph and not options.words else " ".join(options.words)
        if not name:
            return tfnb.graph().name if tfnb.graphs() else None
        try:
            return tfnb.recording.graph_name(name)
        except tfnb.errors.InvalidArgument as error:
            raise UsageError(str(error)) from None

    def _input(self, text: str) -> tuple[str, Any]:
        """``x`` or ``x:B,_,8`` -> the name and its placeholder."""
        name, _, dims = text.partition(":")
        if name not in self.shell.user_ns:
            raise UsageError(f"-i {name}: there is no variable {name!r}")
        sample = self.shell.user_ns[name]
        sample = sample.sample if isinstance(sample, tfnb.Tensor) else sample
        sizes = dims.split(",") if dims else None
        rank = len(getattr(sample, "shape", ()))
        if sizes is not None and len(sizes) != rank:
            raise UsageError(f"-i {text}: {name} has {rank} axes, {len(sizes)} are named")
        shape = None if sizes is None else list(map(_axis, sizes, sample.shape))
        try:
            return name, tfnb.placeholder(sample, shape=shape, name=name)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"-i {text}: {name} is no sample of a placeholder: {error}") from None

    @contextlib.contextmanager
    def _names_kept(self, inputs: list[str], graph: str | None) -> Iterator[None]:
        """A cell that fails leaves the names that held recorded values, and its inputs, as they were.

        An interrupt that comes when the graph has taken what was recorded leaves both as they are now.
        """
        handles = (tfnb.Tensor, tfnb.Operation)
        inputs = [text.partition(":")[0] for text in inputs]
        names = self.shell.user_ns
        before = {name: value for name, value in names.items() if name in inputs or isinstance(value, handles)}
        version = getattr(tfnb.graphs().get(graph or "graph"), "version", None)
        try:
            yield
        except BaseException:
            if getattr(tfnb.graphs().get(graph or "graph"), "version", None) == version:
                names.update(before)
            raise

    def _draw(
        self, graph: object, cell: str | None, options: Namespace, *, silent: bool, found: Change | None = None
    ) -> None:
        """Show the cell's part of the graph below its result."""
        wanted = self.display != "none" if options.show is None else options.show
        if silent or options.quiet or not wanted:
            return
        badges = found.badges if found is not None else {}
        self.watch.show(self._plain(tfnb.view.graph_bundle(graph, cell=cell, badges=badges)))
        is_asked = getattr(options, "live", False)
        if is_asked:  # a setting for all cells leaves the cluster's view where it is
            self.lives.follow_cluster(tfnb.session.connected())
        if is_asked or self.display == "live":
            self.watch.show(_bundle(self.lives.make(graph, cell, self.watch.owner(""), badges).widget))

    def _live(self, graph: tfnb.Graph, options: Namespace) -> Any:
        """Open the live view in this cell: the connected cluster, and the drawing of a graph. Returns its widget."""
        self.lives.follow_cluster(tfnb.session.connected())
        if not options.quiet:  # what a saved notebook shows; the widget below hides it
            display(self._plain(tfnb.view.graph_bundle(graph)), raw=True)
        return self.lives.make(graph).with_run().widget

    def _draw_failed(self, graph: object, cell: str | None, node: object, options: Namespace) -> None:
        """Show the nodes recorded until an op failed, the op in red; below the error."""
        wanted = node is not None and not options.quiet and options.show is not False and self.display != "none"
        with contextlib.suppress(Exception):  # the user's error is what counts
            if wanted:
                self.watch.show(self._plain(tfnb.view.graph_bundle(graph, cell=cell, failing=node)))

    def _verb(self, options: Namespace) -> Any:
        """The line form: ``[NAME] [VERB] [FILE]`` in any order of the first two."""
        words = list(options.words)
        verb = next((word for word in words if word in VERBS), "show")
        names = [word for word in words if word != verb]
        file = names.pop() if verb == "export" and names else None
        cell = names.pop() if verb == "rm" and names and names[-1].startswith("In[") else None
        unknown = [] if verb in ("on", "off") else [n for n in names if not is_graph(self.shell.user_ns, n)]
        if meant := next(filter(None, (near(name, VERBS) for name in unknown)), ""):
            raise UsageError(f"unknown: {' '.join(names)}; did you mean {meant}?")
        if len(names) > 1:
            raise UsageError(f"unknown: {' '.join(names[1:])}; verbs are {' '.join(VERBS)}")
        if verb == "ls":
            rows = [(g.name, len(g.nodes), len(g.variables), g.version) for g in tfnb.graphs().values()]
            return Table(("graph", "nodes", "variables", "version"), rows)
        if verb in ("on", "off"):
            return self._stick(self._name(Namespace(words=names, graph=options.graph)), verb)
        graph = self._graph(options.graph or next(iter(names), None))
        if cell is not None:
            self._remove_cell(graph, cell)
        elif verb == "rm":
            _forget(graph)
        elif verb == "clear":
            _clear(graph, is_confirmed=options.yes)
        elif verb == "export":
            return exported(graph, file)
        elif verb == "refresh":
            if not self.cells.stale(graph):
                why = f"no cell of graph {graph.name} lost nodes or read what changed"
                self.watch.show({"text/plain": f"{why}: nothing is recorded again"})
            return self._refresh(graph)
        elif options.live:
            return self._out(options, self._live(graph, options))
        return self._out(options, None if verb == "rm" else graph)

    def _stick(self, name: str | None, verb: str) -> None:
        """Record the cells below, or no more."""
        before, self.sticky.graph = self.sticky.graph, (name or "graph") if verb == "on" else None
        if verb == "on":
            text = f"the cells below are recorded into graph {self.sticky.graph}; %tfgraph off ends that"
        else:
            text = f"cells are no more recorded into graph {before}" if before else "no cells were recorded"
        self.watch.show({"text/plain": text})

    def _remove_cell(self, graph: tfnb.Graph, cell: str) -> None:
        """Remove the nodes recorded by a cell."""
        owners = {node.owner.key for node in graph.nodes if node.source is not None and node.source.label == cell}
        if not owners:
            cells = dict.fromkeys(node.source.label for node in graph.nodes if node.source is not None)
            raise UsageError(f"{cell} recorded nothing in graph {graph.name}; there are: {', '.join(cells) or 'none'}")
        for owner in owners:
            with tfnb.recording.record_cell(graph, owner=owner, label=cell, filename="", namespace={}):
                pass

    # -- differentiating and running ------------------------------------------------------------------------

    @magic(
        argument("loss", nargs="?", help="what to differentiate"),
        argument("variables", nargs="*", metavar="VAR", help="variables, patterns allowed; none: all trainable ones"),
        argument("--wrt", action="append", default=[], metavar="PATTERN", help="further variables"),
        argument("--no-show", action="store_false", dest="show", default=None, help="do not draw"),
    )
    def tfgrad(self, line: str, cell: str | None = None) -> Any:
        """Add the gradient nodes of LOSS to its graph; returns {variable name: gradient}, without variables that LOSS
        does not depend on.

        %tfgrad loss
        %tfgrad loss conv.* -o grads
        """
        __tracebackhide__ = True
        options = self._line_only(self.tfgrad, line, cell)
        if options.help or not options.loss:
            return self._help(self.tfgrad)
        graph = self._graph(options.graph, options.loss)
        value, wanted = self._node(graph, options.loss), self._variables(graph, [*options.variables, *options.wrt])
        with self._line_recorded(graph, line), tfnb.recording.reopen(graph) as recorder:
            loss = recorder.tensor(value)
            grads = dict(zip(wanted, tfnb.gradients(loss, list(wanted.values())), strict=True))
        self._draw(graph, None, options, silent=False)
        return self._out(options, {name: grad for name, grad in grads.items() if grad is not None})

    @contextlib.contextmanager
    def _line_recorded(self, graph: object, line: str) -> Iterator[None]:
        """A recording whose nodes the same line in the same cell replaces."""
        label, filename = place(self.shell)
        owner = f"{self.watch.owner(line)}/{line}"
        names = self.shell.user_ns
        with tfnb.recording.record_cell(graph, owner=owner, label=label, filename=filename, namespace=names):
            yield

    def _variables(self, graph: tfnb.Graph, patterns: list[str]) -> dict[str, Any]:
        """Variables whose label matches a pattern; without patterns the trainable ones."""
        labels = graph.contents.variables
        if not patterns and (trainable := {label: v for label, v in labels.items() if v.trainable}):
            return trainable
        if not patterns:
            raise UsageError(f"graph {graph.name} has no trainable variables: name what to differentiate by")
        for pattern in patterns:
            if not any(fnmatch(label, pattern) for label in labels):
                raise UsageError(f"no variable matches {pattern!r}; there are: {', '.join(labels) or 'none'}")
        return {label: labels[label] for label in labels if any(fnmatch(label, pattern) for pattern in patterns)}

    @magic(
        argument("fetches", nargs="*", metavar="FETCH", help="names in the graph"),
        argument("-f", "--feed", action="append", nargs="+", default=[], metavar="NAME=EXPR",
                 help="after the fetches: feed a placeholder; with -n an iterator gives one value a step"),
        argument("-n", "--steps", type=int, metavar="N", help="run N steps; returns a RunResult"),
        argument("-a", "--async", action="store_true", dest="background", help="with -n: in the background; a handle"),
        argument("--resume", action="store_true", help="with -n: go on with the training that was stopped"),
        argument("--timeout", type=float, metavar="S", help="seconds before the run is given up"),
        argument("--progress-after", type=float, metavar="S", help="with -n: seconds until progress is shown (2)"),
        argument("--profile", action="store_true", help="time each node; %%tfprof shows what took how long"),
        argument("--kernels", action="store_true", help="--profile with what torch.profiler sees, on accelerators too"),
    )  # fmt: skip
    def tfrun(self, line: str, cell: str | None = None) -> Any:
        """Run what FETCH needs; one fetch gives its value, several a dict.

        Cell form: the body runs once, and what it assigns to placeholders' names is fed.

            %tfrun loss -f x=images[:64] -f y=labels[:64]
            %tfrun train loss -n 1000 -a -o training -f x=iter(images) -f y=iter(labels)
        """
        __tracebackhide__ = True
        options = parsed(self.tfrun, line)
        if options.help or not options.fetches:
            return self._help(self.tfrun)
        graph = self._graph(options.graph, *options.fetches)
        feeds = dict(map(self._feed, options.feed)) | self._assigned(graph, line, cell)
        named = {name: self._fetch(graph, name) for name in options.fetches}
        fetches = named[options.fetches[0]] if len(options.fetches) == 1 else named
        if options.steps is None:
            session = tfnb.session.default_session(graph)
            how = "kernels" if options.kernels else options.profile
            if options.background or options.resume:
                raise UsageError("-a and --resume are of trainings: say how many steps, -n N")
            if options.progress_after is not None:
                raise UsageError("--progress-after is of trainings: say how many steps, -n N")
            return self._out(options, session.run(fetches, feeds, timeout=options.timeout, trace=how))
        if options.steps < 0:
            raise UsageError(f"-n {options.steps}: a number of steps from 0 was expected")
        if options.profile or options.kernels:
            raise UsageError("--profile times one run: leave out -n")
        batches = islice(_drawn(feeds), options.steps)
        first, *watched = options.fetches
        watch = {name: named[name] for name in watched} or None
        step, train = tfnb.Operation(graph, self._node(graph, first)), tfnb.launch if options.background else tfnb.fit
        how = {"steps": options.steps, "watch": watch, "timeout": options.timeout, "resume": options.resume}
        how |= {} if options.progress_after is None else {"progress_after": options.progress_after}
        return self._out(options, train(step, batches, **how))

    @magic(
        argument("fetches", nargs="*", metavar="FETCH", help="what the profiled run must have fetched"),
        argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"),
        argument("--top", type=int, default=10, metavar="N", help="rows of each table (10)"),
        argument(
            "--by",
            choices=("time", "bytes", "node", "op", "line", "scope", "place"),
            default="time",
            help="time or bytes: what colours the drawing (time); the others: what a row of the open table is",
        ),
    )
    def tfprof(self, line: str, cell: str | None = None) -> Any:
        """Show the last profiled run: the graph coloured by time, a timeline, bytes alive, and tables. Runs nothing.

        %tfrun loss -f x=images[:64] -f y=labels[:64] --profile
        %tfprof --by line
        %tfprof --trace digits.trace.json --top 20
        """
        options = self._line_only(self.tfprof, line, cell)
        if options.help:
            return self._help(self.tfprof)
        graph = self._graph(options.graph, *options.fetches)
        trace = tfnb.session.default_session(graph).trace
        if trace is None or not {self._node(graph, name).node for name in options.fetches} <= trace.fetched:
            what = " ".join(options.fetches)
            feeds = " ".join(f"-f {graph.contents.shown(node)}=..." for node in graph.placeholders)
            command = f"%tfrun {what or 'FETCH'} {feeds}"
            raise UsageError(f"no profiled run of {what or f'graph {graph.name}'} yet: {command.rstrip()} --profile")
        if options.trace:
            trace.save(options.trace)
        how = {"colours" if options.by in ("time", "bytes") else "grouped": options.by}
        return self._out(options, replace(trace, rows=options.top, **how))

    @magic(
        argument("names", nargs="*", metavar="NAME", help="two graphs; with --passes what a run would fetch"),
        argument("--passes", action="store_true", help="the graph before and after its passes, and what each one does"),
        argument("--text", action="store_true", help="lines instead of a drawing"),
    )
    def tfdiff(self, line: str, cell: str | None = None) -> Any:
        """Compare two graphs, or one graph before and after passes: what is new, gone and changed. Runs nothing.

        %tfdiff digits wider
        %tfdiff --passes loss train
        """
        options = self._line_only(self.tfdiff, line, cell)
        if options.help or not options.names:
            return self._help(self.tfdiff)
        if options.passes:
            graph = self._graph(options.graph, *options.names)
            fetches = [self._fetch(graph, name) for name in options.names]
            found = tfnb.session.default_session(graph).passes(fetches, graph.placeholders)
            return self._out(options, TextLines(f"{found!r}\n{found.diff()}") if options.text else found)
        if len(options.names) != 2:
            raise UsageError(f"two graphs are compared; got: {' '.join(options.names)} (or is it %tfdiff --passes?)")
        before, after = map(self._graph, options.names)
        found = before.diff(after)
        return self._out(options, TextLines(found) if options.text else found)

    def _assigned(self, graph: tfnb.Graph, line: str, cell: str | None) -> dict[str, Any]:
        """Run a body on a copy of the namespace; returns the values given to names of placeholders."""
        if cell is None:
            return {}
        names = compiled(self.shell, "tfrun", line, cell).names(full_tracebacks=self.full_tracebacks)
        before, places = self.shell.user_ns, {node.id for node in graph.placeholders}
        known = [name for name, value in graph.contents.feed_names.items() if value.node in places]
        fed = {name: names.get(name) for name in known}
        return {name: value for name, value in fed.items() if value is not None and value is not before.get(name)}

    # -- variables and files --------------------------------------------------------------------------------

    @magic(
        argument("patterns", nargs="*", metavar="PATTERN", help="names, with * and ?"),
        argument("--sort", choices=COLUMNS, metavar="COL", help="one of " + " ".join(COLUMNS)),
    )
    def tfvars(self, line: str, cell: str | None = None) -> Any:
        """The variables of a graph: spec, bytes, where they live.

        %tfvars conv* --sort bytes
        """
        options = self._line_only(self.tfvars, line, cell)
        if options.help:
            return self._help(self.tfvars)
        graph = self._graph(options.graph, *options.patterns)
        labels = graph.contents.variables
        patterns = options.patterns or ["*"]
        if options.patterns:
            self._variables(graph, patterns)  # a pattern that matches nothing is told
        rows = [variable_row(label, v) for label, v in labels.items() if any(fnmatch(label, p) for p in patterns)]
        if options.sort:
            rows.sort(key=lambda row: row[COLUMNS.index(options.sort)])
        return self._out(options, Table(COLUMNS, rows))

    @magic(
        argument("size", nargs="?", metavar="SIZE", help="such as 512MB or 1.5GiB; without it: what is planned"),
        argument("--off", action="store_true", help="no budget"),
        argument("--slider", action="store_true", help="20 budgets for the step in packs that ran last"),
    )
    def tfbudget(self, line: str, cell: str | None = None) -> Any:
        """The memory that a step may hold, variables included, feeds not; values are computed again to keep it.

        --slider draws when copies and tasks of a step in packs and microbatches go on, and predicts its time on the
        chosen budget. %tfbudget 512MB
        """
        options = self._line_only(self.tfbudget, line, cell)
        if options.help:
            return self._help(self.tfbudget)
        graph = self._graph(options.graph)
        session = tfnb.session.default_session(graph)
        if options.size or options.off:
            try:
                session = tfnb.session.limit(graph, options.size)
            except tfnb.errors.InvalidArgument as error:
                raise UsageError(str(error)) from None
        budget = session.memory_budget
        if options.slider:
            plan = session.plan
            if not hasattr(plan, "others"):
                raise UsageError(
                    "no step of this graph in packs ran here: fit(..., memory_budget=, microbatches=) divides one"
                )
            labels = [tfnb.memory.byte_counts.told(one.budget) for one in plan.others]
            nearest = min(range(len(labels)), key=lambda at: abs(plan.others[at].budget - plan.budget))
            picture = lambda at: tfnb.view.lanes_html(plan.others[at])  # noqa: E731
            return self._out(options, tfnb.widgets.BudgetSlider(labels, picture, nearest))
        rows = [(at, found.plan.peak, found.plan.state, budget, str(found)) for at, found in session.plans()]
        columns = ("feeds", "peak", "variables", "budget", "plan")
        return self._out(options, Table(columns, rows or [("any", "", "", budget, "")]))

    @magic(argument("file", nargs="?", type=Path, help="a .safetensors file"))
    def tfsave(self, line: str, cell: str | None = None) -> Any:
        """Write the variables of a graph to one safetensors file, those of its optimizer among them.

        Without -g it is the latest graph, or the one that has all its variables and more, such as those of the
        optimizer that trains the model. A note names what of other graphs the file does not hold.

        %tfsave digits.safetensors
        """
        options = self._line_only(self.tfsave, line, cell)
        if options.help or not options.file:
            return self._help(self.tfsave)
        graphs = tfnb.session.checkpoint_graphs
        graph = self._graph(options.graph) if options.graph else graphs.widest(self._graph(None))
        saved = tfnb.session.default_session(graph).save(options.file)
        for names, other in graphs.left_out(graph, related=bool(options.graph)):
            self._note(options, f"not in {options.file}: {names} of graph {other.name}; %tfsave FILE -g {other.name}")
        return self._out(options, saved)

    @magic(
        argument("file", nargs="?", type=Path, help="a .safetensors file"),
        argument("--no-strict", action="store_true", help="variables that the file lacks stay as they are"),
        argument("--map", action="append", default=[], metavar="OLD=NEW", help="OLD in the file is NEW here"),
    )
    def tfload(self, line: str, cell: str | None = None) -> Any:
        """Read the variables of a graph from a file, all or none.

        Without -g it is the graph that %tfsave takes, if the file has all its variables, else the latest. A note names
        what stays as it is, here and in the file.

        %tfload digits.safetensors --map fc.weight=head.weight
        """
        options = self._line_only(self.tfload, line, cell)
        if options.help or not options.file:
            return self._help(self.tfload)
        graph, graphs = self._graph(options.graph), tfnb.session.checkpoint_graphs
        labels, name = graphs.header(existing(options.file))
        mapping = {new: old for old, _, new in (text.partition("=") for text in options.map)}
        if not options.graph and not mapping:
            graph = graphs.fitting(graph, labels, name)
        tfnb.session.default_session(graph).restore(options.file, strict=not options.no_strict, mapping=mapping)
        for names, other in graphs.left_out(graph, related=True):
            self._note(options, f"graph {graph.name} was restored; as they are stay {names} of graph {other.name}")
        taken = {*graph.contents.variables, *mapping.values()}
        if others := [label for label in labels if label not in taken]:
            self._note(options, f"{options.file} has more, for no variable of graph {graph.name}: {graphs.few(others)}")
        return self._out(options, Table(COLUMNS, [variable_row(*item) for item in graph.contents.variables.items()]))

    # -- the cluster ----------------------------------------------------------------------------------------

    @magic(
        argument("cluster", nargs="?", metavar="ADDR|N|VAR",
                 help="an address, a number of compute tasks, or a variable that holds a Client or cluster"),
        argument("--ps", type=_servers, metavar="N|stages",
                 help="parameter servers; stages: each task is that of its stage of a pipeline"),
        argument("--workers", type=int, metavar="N", help="workers to wait for (servers and one compute task)"),
        argument("--resource", action="append", default=[], metavar="NAME=N",
                 help="take only workers that Dask knows to have it"),
        argument("--name", help="state to create or to find again"),
        argument("--insecure", action="store_true", help="allow a plain address that is not on this machine"),
        argument("--timeout", type=float, default=120, metavar="S", help="seconds to wait for it (120)"),
        argument("--threads", type=int, metavar="N", help="of each worker that is started here (1)"),
        argument("--memory", metavar="SIZE", help="the limit of each worker that is started here, such as 2GB"),
        argument("--dashboard", action="store_true", help="Dask's dashboard for a cluster that is started here"),
        argument("--live", action="store_true", help="the live view: the cluster, renewed in place, and the drawing"),
        argument("--close", action="store_true", help="bring the values home and leave"),
    )  # fmt: skip
    def tfcluster(self, line: str, cell: str | None = None) -> Any:
        """Connect to a cluster, or start one here; bare: the connected one, else a default one.

        %tfcluster 2 --ps 1
        %tfcluster 4 --ps stages
        %tfcluster tcp://10.0.0.5:8786
        %tfcluster --close
        """
        options = self._line_only(self.tfcluster, line, cell)
        if options.help:
            return self._help(self.tfcluster)
        connected = tfnb.session.connected()
        if options.close:
            return connected.close() if connected is not None else None
        cluster = connected
        if options.cluster is not None or cluster is None:
            cluster = tfnb.connect(
                self._target(options.cluster), ps=options.ps, name=options.name, workers=options.workers,
                resources=dict(map(_resource, options.resource)), insecure=options.insecure,
                timeout=options.timeout, threads=options.threads, memory=options.memory, dashboard=options.dashboard,
            )  # fmt: skip
        if options.live and tfnb.graphs():
            self.watch.show(_bundle(self._live(self._graph(options.graph), options)))
        elif options.live:
            self.lives.follow_cluster(cluster)
        return self._out(Namespace(**{**vars(options), "quiet": options.quiet or options.live}), cluster)

    def _target(self, word: str | None) -> Any:
        if word is not None and word.isdigit():
            return int(word)
        return self.shell.user_ns.get(word, word)


def _resource(text: str) -> tuple[str, float]:
    """``GPU=1``."""
    name, _, amount = text.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise UsageError(f"--resource {text}: a name and an amount were expected, such as GPU=1") from None


def _forget(graph: tfnb.Graph) -> None:
    """Take a graph from the named ones."""
    if tfnb.graphs().get(graph.name) is not graph:
        raise UsageError(f"this graph {graph.name} is not among the named ones, which %tfgraph ls shows")
    tfnb.recording.forget(graph.name)


def _clear(graph: tfnb.Graph, *, is_confirmed: bool) -> None:
    """Drop all nodes of a graph."""
    if not is_confirmed:
        raise UsageError(f"clear drops the {len(graph.nodes)} nodes of graph {graph.name}; add --yes to do that")
    graph.commit(type(graph.contents)(), removed=[(n.id, f"node {n.name} was cleared") for n in graph.nodes])


def _axis(name: str, size: int) -> int | str:
    """An axis: ``_`` keeps the sample's size, digits fix the size, a letter varies."""
    name = name.strip()
    return size if name == "_" else int(name) if name.isdigit() else name


def _bundle(widget: Any) -> dict[str, Any]:
    """A widget's mime bundle; with metadata in some versions."""
    bundle = widget._repr_mimebundle_()
    return bundle[0] if isinstance(bundle, tuple) else bundle


def _drawn(feeds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The feeds of each step, until an iterator ends: next values of iterators, other values unchanged."""
    while True:
        try:
            fed = {name: next(value) if isinstance(value, Iterator) else value for name, value in feeds.items()}
        except StopIteration:
            return
        yield fed
