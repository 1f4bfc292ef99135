"""Magics that look at runs, stop them, reuse their values and compare them: parse, call one public function.

``tfnb.<name>`` loads torch when first used.
"""

from __future__ import annotations

import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument
from IPython.display import display

import tfnb
from tfnb.magics.cell import compiled
from tfnb.magics.options import magic, parsed
from tfnb.magics.shared_magics import SharedMagics
from tfnb.magics.watch_names import expressions


class RunMagics(SharedMagics):
    """Magics on the runs of a graph."""

    @magic(
        argument("what", nargs="*", metavar="EXPR", help="names or patterns; NAME:hist for a histogram"),
        argument("--every", type=int, metavar="K", help="look at each K-th run; else as often as takes little time"),
        argument("--hist", action="store_true", help="histograms of all"),
        argument("--stop", action="store_true", help="look no more"),
    )
    def tfwatch(self, line: str, cell: str | None = None) -> Any:
        """Follow values during runs and fit, as curves and histograms; bare: what is followed.

        %tfwatch loss, "conv*/weight":hist --every 10
        """
        options = self._line_only(self.tfwatch, line, cell)
        if options.help:
            return self._help(self.tfwatch)
        items = list(expressions(options.what, self.shell.user_ns))
        graph, what = self._graph(options.graph, *(name for name, _ in items)), [item for _, item in items]
        watch = tfnb.watch(*what, every=options.every, hist=options.hist, graph=graph, show=not options.quiet)
        self._store(options, watch)
        return watch.stop() if options.stop else None if options.what else watch

    @magic(
        argument("node", nargs="?", metavar="NODE", help="the name of a value; then: if nan, if inf, if EXPRESSION"),
        argument("--off", action="store_true", help="remove the breakpoint at NODE, or all"),
    )
    def tfbreak(self, line: str, cell: str | None = None) -> Any:
        """Stop runs and fit at a node when a condition on its value holds; nothing is written. Bare: the breakpoints.

        The next cell has the inputs of the node and its value, by name, in the dict `stopped`.

        %tfbreak loss if nan
        %tfbreak logits if value.abs().max() > 100
        """
        head, _, rest = line.partition(" if ")
        behind = re.search(r"((\s+(-g|--graph|-o|--out)(\s+|=)\S+)+)\s*$", rest)  # options after the condition
        condition = rest[: behind.start()] if behind else rest
        options = self._line_only(self.tfbreak, f"{head} {behind[1] if behind else ''}", cell)
        if options.help:
            return self._help(self.tfbreak)
        graph = self._graph(options.graph, *filter(None, [options.node]))
        node = options.node and self._fetch(graph, options.node)
        points = tfnb.break_at(node, condition.strip() or None, graph=graph, off=options.off)
        return self._out(options, points)

    def hand_over(self, ran: object) -> None:
        """After a cell: give the next cell the values at the breakpoint that stopped this one."""
        if isinstance(error := getattr(ran, "error_in_exec", None), tfnb.errors.BreakpointReached):
            self.shell.user_ns["stopped"] = error.details
            display(error.details)

    @magic(
        argument("switch", nargs="?", choices=("on", "off"), help="begin or end to reuse values (off)"),
        argument("--clear", action="store_true", help="drop the values"),
    )
    def tfcache(self, line: str, cell: str | None = None) -> Any:
        """Let runs reuse the values of nodes that did not change, also after an edit; bare: bytes held and hits.

        %tfcache on
        """
        options = self._line_only(self.tfcache, line, cell)
        if options.help:
            return self._help(self.tfcache)
        on, graph = {"on": True, "off": False, None: None}[options.switch], self._graph(options.graph)
        return self._out(options, tfnb.reuse_values(on, clear=options.clear, graph=graph))

    @magic(
        argument("fetch", nargs="?", metavar="FETCH", help="what each step runs"),
        argument(
            "-f", "--feed", action="append", nargs="+", default=[], metavar="NAME=EXPR", help="arrays of the data"
        ),
        argument("--data", metavar="EXPR", help="data as of fit, such as a DataLoader, in place of -f"),
        argument("--feeds", metavar="EXPR", help="what the parts of an item of the data are fed to: (x,y)"),
        argument("-w", "--watch", action="append", metavar="LOSS", help="a scalar to compare; may be repeated"),
        argument("-e", "--epochs", type=int, default=1, metavar="N", help="passes over the data (1)"),
        argument("--seeds", type=int, default=5, metavar="N", help="runs of each mode (5)"),
    )
    def tfcompare(self, line: str, cell: str | None = None) -> Any:
        """Train in several ways and compare a value at equal samples and equal time. Variables are as before then.

        Each name that the body gives a dict is a way to train: options of fit, also fetch="other".

            %%tfcompare train -w loss --seeds 5 -f x=images -f y=labels
            small = {"batch_size": 16}
            large = {"batch_size": 256}

        Data that batches itself: --data loader --feeds (x,y).
        """
        __tracebackhide__ = True
        options = parsed(self.tfcompare, line)
        if options.help or not line.strip():
            return self._help(self.tfcompare)
        if cell is None:
            raise UsageError("%%tfcompare is a cell magic: the ways to train stand in its body, one dict a line")
        if not options.fetch or not options.watch:
            raise UsageError("say what each step runs and what is compared: %%tfcompare FETCH -w LOSS")
        if bool(options.feed) == bool(options.data):
            raise UsageError("say what it trains on: -f NAME=EXPR of each placeholder, or --data EXPR")
        graph, before = self._graph(options.graph, options.fetch), self.shell.user_ns
        names = compiled(self.shell, "tfcompare", line, cell).names(full_tracebacks=self.full_tracebacks)
        modes = {
            name: value for name, value in names.items() if isinstance(value, dict) and before.get(name) is not value
        }
        step = tfnb.Operation(graph, self._node(graph, options.fetch))
        data = self._value("--data", options.data) if options.data else dict(map(self._feed, options.feed))
        how = {"watch": options.watch, "epochs": options.epochs, "seeds": options.seeds}
        how |= {"feeds": self._value("--feeds", options.feeds)} if options.feeds else {}
        return self._out(options, tfnb.compare(step, data, modes, **how))
