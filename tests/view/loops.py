"""Graphs with loops, traced runs of them, and the hands of a user on their sliders."""

from __future__ import annotations

from typing import Any

import torch

import tfnb
from tests.view.browser import Page
from tfnb.execution import Trace


def while_with_a_branch() -> tuple[tfnb.Graph, Any, Any]:
    """Halves ``y``, from the second iteration on by a product, until it is small."""
    with tfnb.record("halves") as graph:
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        w = torch.nn.Parameter(torch.eye(2))
        _, y = tfnb.while_loop(
            lambda n, y: y.norm() > 1, lambda n, y: (n + 1, tfnb.cond(n < 1, lambda: y / 2, lambda: y @ w / 2)), (0, x)
        )
    return graph, x, y


def nested() -> tuple[tfnb.Graph, Any, Any]:
    with tfnb.record("nested") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = tfnb.map_fn(lambda v: tfnb.while_loop(lambda a: a < 4, lambda a: a.neg() * -2, v.abs()), x)
    return graph, x, y


def traced(program: tuple[tfnb.Graph, Any, Any], fed: Any) -> Trace:
    graph, x, y = program
    session = tfnb.Session(graph, compile="off")
    session.run(y, {x: fed}, trace=True)
    assert session.trace is not None
    return session.trace


FED = torch.tensor([[4.0, 2.0], [0.0, 2.0], [1.0, -4.0]])


BOXES = "[...document.querySelectorAll('.box')]"
TITLED = f"{BOXES}.find(b => b.querySelector(':scope > .face > text').textContent === arguments[0])"


class Loops(Page):
    """A page with a traced loop."""

    def unfold(self) -> None:
        """Everything."""
        folded = "[...document.querySelectorAll('.box[aria-expanded=\"false\"]')].map(b => b.dataset.key)"
        while level := self.js(f"return {folded}"):
            self.js("[...document.querySelectorAll('button')].find(b => b.textContent === 'Unfold').click()")
            self.wait(f"!{folded}.some(key => {level}.includes(key))")

    def sliders(self) -> list[Any]:
        """Outer ones first."""
        depth = "(el) => el.closest('.box').dataset.key.length"
        return list(
            self.js(f"return [...document.querySelectorAll('.iterations')].sort((a, b) => ({depth})(a) - ({depth})(b))")
        )

    def slide(self, slider: Any, *keys: str) -> str:
        """Press keys on a slider; what it says then."""
        self.js("arguments[0].focus()", slider)
        self.keys(*keys)
        return str(slider.get_attribute("aria-valuetext"))

    def opacity(self, title: str) -> float:
        """Of the first box with that title, with what is around it."""
        return float(self.js(
            f"let all = 1; for (let el = {TITLED}.querySelector(':scope > .face'); el.closest; el = el.parentNode)"
            "all *= getComputedStyle(el).opacity; return all", title,
        ))  # fmt: skip

    def card(self, title: str) -> list[str]:
        """The rows of the first card with that title."""
        code = f"return [...{TITLED}.querySelectorAll(':scope > .face > text')].map(t => t.textContent)"
        return list(self.js(code, title))

    def tip(self, title: str) -> str:
        """What a box says to a screen reader and in its tooltip."""
        return str(self.js(f"return {TITLED}.getAttribute('aria-label')", title))


LEFT, RIGHT, END, HOME = "\ue012", "\ue014", "\ue010", "\ue011"
