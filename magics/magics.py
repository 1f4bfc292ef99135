"""The magics themselves: parse, call one public function, return its object.

``tfnb.<name>`` loads torch when first used, so that ``%load_ext tfnb`` does not.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument
from traitlets import Bool, Enum

import tfnb
from tfnb.magics.arguments import magic, parsed
from tfnb.magics.cell import compiled
from tfnb.magics.complete import VERBS
from tfnb.magics.table import Table
from tfnb.magics.watch import CellWatch

_EXPORTS = {".svg": "graph_svg", ".html": "graph_html", ".dot": "graph_dot"}


@magics_class
class TfnbMagics(Magics):
    """Settings and magics; ``%config TfnbMagics`` lists the settings."""

    display = Enum(["static", "live", "none"], "static", help="how a recorded cell is drawn").tag(config=True)
    repr = Enum(["html", "text"], "html", help="how objects of tfnb are shown").tag(config=True)
    full_tracebacks = Bool(False, help="show the frames of tfnb in tracebacks").tag(config=True)

    def __init__(self, shell: InteractiveShell, **kwargs: Any) -> None:
        super().__init__(shell=shell, **kwargs)
        self.watch = CellWatch(shell)
        self.cluster: Any = None

    # -- recording and looking ------------------------------------------------------------------------------

    @magic(
        argument("words", nargs="*", metavar="NAME", help="the graph; line form also a verb: " + " ".join(VERBS)),
        argument("-i", "--input", action="append", default=[], metavar="NAME[:DIMS]",
                 help="make the tensor NAME a placeholder; x:B,T,8 names axes, _ keeps the sample's size"),
        argument("-d", "--device", metavar="DEV", help="where factories and placeholders go"),
        argument("--lazy", action="store_true", help="shapes only, no sample values"),
        argument("--append", action="store_true", help="keep the nodes of earlier runs of this cell"),
        argument("--show", action="store_true", default=None, help="draw the cell's part of the graph (default)"),
        argument("--no-show", action="store_false", dest="show", help="do not draw"),
        argument("--live", action="store_true", help="draw a live widget too: a click fetches a value"),
    )  # fmt: skip
    def tfgraph(self, line: str, cell: str | None = None) -> Any:
        """Record a cell into a graph, or look at graphs.

        Cell form: the body is ordinary PyTorch, run at once on samples; a last expression becomes Out[n]. -o stores the
        graph. Line form: show (default), ls, rm, clear, export FILE.

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
        with (
            self._names_kept(options.input),
            tfnb.recording.record_cell(
                self._name(options), owner=self.watch.owner(cell), label=program.label, filename=program.filename,
                namespace=self.shell.user_ns, device=options.device, lazy=options.lazy, append=options.append,
            ) as graph,
        ):  # fmt: skip
            self.shell.user_ns.update(map(self._input, options.input))
            result = program.run(full_tracebacks=self.full_tracebacks)
        self._draw(graph, program.label, options, silent=program.silent)
        for note in graph.notes:
            self.watch.show({"text/plain": f"note: {note}"})
        self._store(options, graph)
        return None if program.silent else result

    def _name(self, options: Namespace) -> str | None:
        if len(options.words) > 1:
            raise UsageError(f"one graph name was expected, got: {' '.join(options.words)}")
        name = options.graph or next(iter(options.words), None)
        return name or (tfnb.graph().name if tfnb.graphs() else None)

    def _input(self, text: str) -> tuple[str, Any]:
        """``x`` or ``x:B,_,8`` -> the name and its placeholder."""
        name, _, dims = text.partition(":")
        if name not in self.shell.user_ns:
            raise UsageError(f"-i {name}: there is no variable {name!r}")
        sample = self.shell.user_ns[name]
        sizes = dims.split(",") if dims else None
        rank = len(getattr(sample, "shape", ()))
        if sizes is not None and len(sizes) != rank:
            raise UsageError(f"-i {text}: {name} has {rank} axes, {len(sizes)} are named")
        return name, tfnb.placeholder(sample, shape=sizes and [*map(_axis, sizes, sample.shape)], name=name)

    @contextlib.contextmanager
    def _names_kept(self, inputs: list[str]) -> Iterator[None]:
        """A cell that fails leaves the names that held recorded values, and its inputs, as they were."""
        handles = (tfnb.Tensor, tfnb.Operation)
        inputs = [text.partition(":")[0] for text in inputs]
        names = self.shell.user_ns
        before = {name: value for name, value in names.items() if name in inputs or isinstance(value, handles)}
        try:
            yield
        except BaseException:
            names.update(before)
            raise

    def _draw(self, graph: Any, cell: str | None, options: Namespace, *, silent: bool) -> None:
        """Show the cell's part of the graph below its result."""
        wanted = self.display != "none" if options.show is None else options.show
        if silent or options.quiet or not wanted:
            return
        drawing = {"text/html": tfnb.view.graph_html(graph, cell=cell), "text/plain": repr(graph)}
        self.watch.show(self._plain(drawing))
        if options.live or self.display == "live":
            self.watch.show(tfnb.widgets.GraphWidget.of(graph)._repr_mimebundle_())

    def _verb(self, options: Namespace) -> Any:
        """The line form: ``[NAME] [VERB] [FILE]`` in any order of the first two."""
        words = list(options.words)
        verb = next((word for word in words if word in VERBS), "show")
        names = [word for word in words if word != verb]
        file = names.pop() if verb == "export" and names else None
        if len(names) > 1:
            raise UsageError(f"unknown: {' '.join(names[1:])}; verbs are {' '.join(VERBS)}")
        if verb == "ls":
            rows = [(g.name, len(g.nodes), len(g.variables), g.version) for g in tfnb.graphs().values()]
            return Table(("graph", "nodes", "variables", "version"), rows)
        graph = self._graph(options.graph or next(iter(names), None))
        if verb == "rm":
            tfnb.recording.forget(graph.name)
        elif verb == "clear":
            graph.commit(type(graph.contents)(), removed=[(n.id, f"node {n.name} was cleared") for n in graph.nodes])
        elif verb == "export":
            return self._export(graph, file)
        return self._out(options, None if verb == "rm" else graph)

    def _graph(self, name: str | None) -> Any:
        try:
            return tfnb.graph(name)
        except tfnb.errors.NotFound as error:
            raise UsageError(str(error)) from None

    def _export(self, graph: Any, file: str | None) -> Path:
        path = Path(file or f"{graph.name}.svg")
        if path.suffix == ".json":
            graph.save(path)
        elif path.suffix in _EXPORTS:
            path.write_text(getattr(tfnb.view, _EXPORTS[path.suffix])(graph))
        else:
            raise UsageError(f"cannot export {path.name}: the suffix says the format, one of .json {' '.join(_EXPORTS)}")
        return path

    # -- what all magics share ------------------------------------------------------------------------------

    def _out(self, options: Namespace, result: Any) -> Any:
        self._store(options, result)
        return None if options.quiet else result

    def _store(self, options: Namespace, result: Any) -> None:
        if options.out:
            self.shell.user_ns[options.out] = result

    def _help(self, method: Any) -> None:
        self.watch.show({"text/plain": method.__doc__})

    def _plain(self, bundle: dict[str, Any]) -> dict[str, Any]:
        return bundle if self.repr == "html" else {"text/plain": bundle["text/plain"]}

    def bundle(self, shown: Any) -> dict[str, Any]:
        """The mime bundle of one of tfnb's objects, as ``%config TfnbMagics.repr`` wants it."""
        html = getattr(shown, "_repr_html_", None)
        text = {"text/plain": repr(shown)}
        return self._plain({"text/html": html(), **text} if html else text)


def _axis(name: str, size: int) -> int | str:
    """``_`` keeps the sample's size, digits fix it, a letter varies."""
    name = name.strip()
    return size if name == "_" else int(name) if name.isdigit() else name
