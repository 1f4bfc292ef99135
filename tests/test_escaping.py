"""Everything that makes HTML or SVG shows names and texts as text, whatever they hold: one table of all producers."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfnb
from tests.syntax import parsed
from tests.test_layers import module_of, sources
from tests.view.test_escape import NASTY, graph
from tfnb import view, watching
from tfnb.cluster.notebook import card
from tfnb.doctor import DoctorReport, Finding
from tfnb.execution.pack_step import PackPlan, PackRun
from tfnb.execution.tracing.trace import Event, Trace
from tfnb.fitting import background, comparing, fit_loop
from tfnb.graph import Contents, Graph, Spec, Variable
from tfnb.magics import text_table
from tfnb.memory.lane_clock import Bar, LaneTimes
from tfnb.memory.moves import MoveKind, MovePolicy, Schedule
from tfnb.memory.pack_tasks import DeviceItem, PackPiece, PackTask, Phase, Role
from tfnb.passes import pipeline, step_graph
from tfnb.passes.flow.places import Place
from tfnb.passes.flow.reasons import StepParts, parts_of_graph
from tfnb.passes.flow.step_flow import CutOptions, in_parts
from tfnb.placement.costs import PlacementCosts, Roofline
from tfnb.placement.groups import grouped
from tfnb.placement.placement_search import search
from tfnb.placement.simulation import LinkCost
from tfnb.placement.stages import PipelineStage, StagedStep
from tfnb.session.auto_placement import AutoPlacement
from tfnb.state import checkpoint
from tfnb.widgets import curve, progress
from tfnb.widgets.budget_slider import BudgetSlider

MORE = ["\x85\x9b31m", "\u2066\u2069\u200b\u200e", "\ufeff\ufffe\U000e0001", "\udfff\ud800", "\u061c\u00ad"]
CURVE = [(1.0, 2.0), (2.0, 1.0)]


def running(text: str) -> Any:
    """A training in the background that ended with an error of this text."""
    handle = background.RunHandle(text)
    handle._values = {text: 1.0}
    handle._future.set_exception(ValueError(text))
    return handle


def compared(text: str) -> comparing.Comparison:
    """Runs of a mode of this name."""
    points = [comparing.Point(samples=n, seconds=float(n), value=1.0) for n in range(1, 4)]
    return comparing.Comparison(text, {text: [points, points], "b": [points, points]})


def watched(text: str) -> Any:
    """What watches a graph of this name."""
    made = object.__new__(watching.Watch)
    made.__dict__.update(graph=graph(text), steps=1, every=1, note=text, courses={})
    return made


def passed(text: str) -> pipeline.Passes:
    """Passes of these names over a graph of this name."""
    one = pipeline.PassResult(text, 1, 1, 1, graph(text))
    return pipeline.Passes((one, one))


def placed(text: str) -> StepParts:
    """A step of a graph of this name, and its parts, with what crosses between nodes of this name."""
    nodes = [replace(node, device=f"task:{at}") for at, node in enumerate(graph(text).nodes)]
    return parts_of_graph(Graph(text, Contents(tuple(nodes))))


def staged(text: str) -> StagedStep:
    """A step of a graph of this name, in a stage of a module of this name."""
    stage = PipelineStage(Place(0), (text,), 1, 1, 1.0, 1)
    return StagedStep(graph(text), placed(text)._step, (stage,))


def searched(text: str) -> AutoPlacement:
    """A step of a graph of this name, placed by a search, and a traced run of it."""
    nodes = tuple(replace(node, device=None) for node in graph(text).nodes[:3])
    whole = Graph(text, Contents(nodes))
    step = step_graph(whole, [nodes[-1].value()], [nodes[0].value()])
    groups = grouped(step, 2)
    found = search(groups.problem(lambda node: 1.0, lambda node, output: 8), lambda source, to: LinkCost(0.1, 1e9))
    parts = in_parts(step, CutOptions(is_optimized=True))
    placement = AutoPlacement(whole, parts, groups, found, found.best, PlacementCosts(Roofline(1.0, 1.0, 1.0)), 2)
    whole.attached["trace"] = Trace(whole, step.fetches, (Event(nodes[-1], 0.0, 1.0, 8, text, text),), (), 1.0, 0)
    return placement


def saved(text: str) -> checkpoint.Checkpoint:
    """A variable file of this name, with a Variable and a graph of this name."""
    return checkpoint.Checkpoint(Path(text or "x"), 1, {text: Spec(torch.float32, ())}, {"graph": text})


def paneled(text: str) -> str:
    """The table of a panel of progress, below a status."""
    panel = progress.ProgressPanel(2, text, stream=io.StringIO())
    panel.update(1, {text: 1.0}, curve=[{"step": 1, text: 1.0}, {"step": 2, text: 2.0}])
    return panel.table()


def status(text: str) -> card.Status:
    """The status of a cluster of one member."""
    row = card.CardRow(text, text, text, text, text, ((text, text),), text)
    return card.Status(text, ((text, text),), (row,), (text,), ((text, text),))


def packed(text: str) -> Any:
    """The plan of a step in packs whose tensors and answer have this name."""
    task = PackTask(PackPiece(Phase.FORWARD, 0), 0, ())
    item = DeviceItem(Role.WEIGHT, Variable(torch.zeros(1), name=text))
    bars = (Bar(MoveKind.IN, item, 0.0, 1.0), Bar(MoveKind.RUN, task, 1.0, 2.0))
    one = NamedPlan(text, times=LaneTimes(bars, 2.0, {}, {}), last=PackRun(bars=[*bars]))
    one.others = (NamedPlan(text, budget=1, schedule=Schedule((), {}, 0, MovePolicy()), slowdown=1.0),)
    return one


class NamedPlan(SimpleNamespace):
    """A plan whose answer is a text."""

    def __init__(self, text: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.text = text

    def __str__(self) -> str:
        return self.text


PRODUCERS: dict[str, Callable[[str], str]] = {
    "tfnb.graph.graph.Graph": lambda text: graph(text)._repr_html_(),
    "tfnb.graph.difference.Difference": lambda text: "".join([
        graph(text).diff(graph("b"))._repr_html_(), graph(text).diff(graph("b"))._repr_svg_(),
    ]),
    "tfnb.doctor.DoctorReport": lambda text: DoctorReport((Finding(text, text),))._repr_html_(),
    "tfnb.cluster.notebook.card.Status": lambda text: status(text)._repr_html_(),
    "tfnb.cluster.notebook.card.Status, live": lambda text: status(text).live_html(),
    "tfnb.fitting.fit_loop.RunResult": lambda text: fit_loop.RunResult(
        1, [{text: text}], 1.0, [{"step": 1, text: 1.0}, {"step": 2, text: 2.0}], text, text
    )._repr_html_(),
    "tfnb.fitting.background.RunHandle": lambda text: running(text)._repr_html_(),
    "tfnb.fitting.comparing.Comparison": lambda text: compared(text)._repr_html_(),
    "tfnb.fitting.comparing.Comparisons": lambda text: comparing.Comparisons({text: compared(text)})._repr_html_(),
    "tfnb.watching.Watch": lambda text: watched(text)._repr_html_(),
    "tfnb.passes.pipeline.Passes": lambda text: passed(text)._repr_html_() + passed(text)._repr_svg_(),
    "tfnb.passes.flow.reasons.StepParts": lambda text: placed(text)._repr_html_(),
    "tfnb.placement.stages.StagedStep": lambda text: staged(text)._repr_html_(),
    "tfnb.session.auto_placement.AutoPlacement": lambda text: searched(text)._repr_html_(),
    "tfnb.magics.text_table.Table": lambda text: text_table.Table((text,), [(text,)])._repr_html_(),
    "tfnb.widgets.progress": paneled,
    "tfnb.widgets.curve": lambda text: "".join([
        curve.svg(text, CURVE), curve.bands(text, {text: [(1, 2, 0.1), (2, 1, 0.1)]}), curve.bars(text, [1, 2], 0, 1),
        curve.table([(text, text, "")]), curve.curves([{"step": 1, text: 1.0}, {"step": 2, text: 2.0}]),
    ]),
    "tfnb.view.pack_lanes": lambda text: view.plan_html(packed(text)),
    "tfnb.execution.pack_step.PackPlan": lambda text: PackPlan._repr_html_(packed(text)),
    "tfnb.widgets.budget_slider.BudgetSlider": lambda text: BudgetSlider(
        [text], lambda at: view.plan_html(packed(text))
    )._repr_mimebundle_()["text/html"],
    "tfnb.view.export": lambda text: "".join([view.graph_html(graph(text)), view.graph_svg(graph(text))]),
    "tfnb.view.cluster_picture": lambda text: view.cluster_svg(
        [
            card.CardRow(
                name, "", text, "", "", ((text, text),), text, (text,), 0.5, (("ps:0", 1, text),), ((text, 1, 2),)
            )
            for name in (text, "ps:0")
        ]
    ),
    "tfnb.view.reprs": lambda text: "".join([
        view.variable_html(Variable(torch.zeros(1), name=text)),
        view.checkpoint_html(saved(text)),
        view.session_html(tfnb.Session(graph(text))),
    ]),
}  # fmt: skip
"""What each class or module makes of a text that stands wherever a user, a file or a peer can put one."""

SHOWN_BY_OTHERS = {
    "tfnb.cluster.driver.Cluster": "its status", "tfnb.execution.tracing.trace.Trace": "tfnb.view.timeline",
    "tfnb.widgets.graph_widget.GraphWidget": "a picture of tfnb.view.page, and names as data",
    "tfnb.view.page": "tfnb.view.export", "tfnb.view.face": "tfnb.view.export", "tfnb.view.level": "tfnb.view.export",
    "tfnb.view.drawing": "tfnb.view.export", "tfnb.view.timeline": "tests/view/test_timeline.py",
    "tfnb.passes.flow.reasons.PlacedPart": "StepParts",
    "tfnb.cluster.notebook.card": "Status", "tfnb.fitting.comparing": "Comparison", "tfnb.doctor": "DoctorReport",
    "tfnb.fitting.fit_loop": "RunResult", "tfnb.fitting.background": "RunHandle", "tfnb.watching": "Watch",
    "tfnb.magics.text_table": "Table", "tfnb.widgets.step_slider": "its caller's HTML, which tests/widgets cleans",
    **dict.fromkeys((
        "tfnb.graph.variable.Variable", "tfnb.graph.spec.Spec", "tfnb.graph.queue.Queue",
        "tfnb.session.breakpoints.BreakpointValues", "tfnb.session.session.Session",
        "tfnb.state.checkpoint.Checkpoint", "tfnb.recording.values.tensor.Tensor",
        "tfnb.recording.values.tensor.Operation",
    ), "tfnb.view.reprs"),
}  # fmt: skip
"""Parts of the producers above, and what hands on what they make, with where that is looked at."""

MARKUP = re.compile(r"<(div|pre|table|tr|td|th|span|b|p|figure|figcaption|svg|text|title|rect|script|style)\b[^>]*>?")


class Page(HTMLParser):
    """Collects the elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts = set[str](), set[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.texts += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@cache
def plain_page(name: str) -> Page:
    """The page of a producer that is given nothing to escape."""
    return Page(PRODUCERS[name]("plain"))


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("text", [*NASTY, *MORE], ids=ascii)
def test_a_text_adds_no_element_and_hides_nothing(name: str, text: str) -> None:
    plain, made = plain_page(name), PRODUCERS[name](text)
    made.encode()  # a front end can be sent it
    page = Page(made)
    assert page.tags <= plain.tags, page.tags - plain.tags
    assert page.attributes <= plain.attributes
    hidden = {
        char for part in page.texts for char in part if char != "\n" and not char.isprintable() and char != "\xa0"
    }
    assert hidden == set()


@cache
def found() -> frozenset[str]:
    """Classes with a form for notebooks, and modules with markup in their code."""
    made = set[str]()
    for path in sources():
        tree, module = parsed(path), module_of(path)
        for each in ast.walk(tree):
            if isinstance(each, ast.ClassDef) and any(
                isinstance(item, ast.FunctionDef) and re.fullmatch(r"_repr_(html|svg|mimebundle)_", item.name)
                for item in each.body
            ):
                made.add(f"{module}.{each.name}")
            if isinstance(each, ast.JoinedStr) and any(
                isinstance(part, ast.Constant) and MARKUP.search(str(part.value)) for part in each.values
            ):
                made.add(module)
    return frozenset(made)


def test_every_producer_is_in_the_table() -> None:
    listed = {*PRODUCERS, *SHOWN_BY_OTHERS, "tfnb.view.export"}
    assert found() - listed == set(), "add what makes HTML or SVG to PRODUCERS"
    assert set(SHOWN_BY_OTHERS) - found() == set()


def test_there_is_one_function_that_escapes() -> None:
    others = [
        str(path) for path in sources() if re.search(r"^(from html|import html)\b", path.read_text(), re.MULTILINE)
    ]
    assert [Path(path).name for path in others] == ["escaping.py"]
