"""Programs whose nodes ask for several tasks, softly: they run in one part, in several here, and on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tfnb

Model = Callable[[torch.Tensor], Any]


def on(task: int) -> Any:
    """Soft, so that the same graph runs in one part, too."""
    return tfnb.device(f"task:{task}", soft=True)


def layers(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    for layer in range(4):
        with on(layer % 3):
            x = torch.tanh(torch.nn.Linear(8, 8)(x))
    return x


def loop(x: torch.Tensor) -> torch.Tensor:
    def body(i: Any, h: torch.Tensor) -> Any:
        with on(0):
            h = h + 1
        with on(1):
            h = torch.tanh(h * 0.5)
        with on(2):
            return i + 1, h - x

    return tfnb.while_loop(lambda i, h: h.sum() < 3, body, (0, x), maximum_iterations=6)[1]


def branch(x: torch.Tensor) -> torch.Tensor:
    def then() -> torch.Tensor:
        with on(1):
            return x.exp()

    def other() -> torch.Tensor:
        with on(2):
            return x.sum(0, keepdim=True) + x

    with on(0):
        return tfnb.cond(x.sum() > 0, then, other)


def loop_in_branch(x: torch.Tensor) -> torch.Tensor:
    with on(1):
        return tfnb.cond(x.sum() > 0, lambda: loop(x), lambda: x * 2)


def sizes(x: torch.Tensor) -> torch.Tensor:
    """The second task needs the number of rows only."""
    with on(0):
        total = x.sum()
    with on(1):
        return total + torch.zeros(x.shape[0], 3) + 1


def draws(x: torch.Tensor) -> torch.Tensor:
    with on(0):
        x = F.dropout(x, 0.5)

    def body(carry: torch.Tensor, row: torch.Tensor) -> Any:
        with on(1):
            return carry + torch.rand(8) * row, F.dropout(row, 0.5)

    carry, rows = tfnb.scan(body, torch.zeros(8), x)
    return carry + rows.sum(0)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Values that are not contiguous cross: sums of a contiguous copy round otherwise."""
    with on(0):
        table = torch.sin(x.sum() * torch.linspace(0.1, 1, 300 * 70).reshape(300, 70))
        turned, thirds = table.t(), table[:, ::3]
    with on(1):
        return x + turned.sum(0)[:8] + thirds.sum(1)[:8] + thirds.mean()


MODELS: list[Model] = [layers, loop, branch, loop_in_branch, sizes, draws, strided]


def trained() -> tuple[tfnb.Graph, Any, Any, Any]:
    """A model with batch norm and dropout over two tasks, trained by Adam: graph, feeds, and fetches of a step."""
    torch.manual_seed(0)
    encoder, head = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)), torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 1e-2)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(6, 8), shape=("B", 8), name="x")
        y = tfnb.placeholder(torch.randint(0, 4, (6,)), shape=("B",), name="y")
        with on(0):
            h = torch.tanh(encoder(x))
        with on(1):
            loss = F.cross_entropy(head(F.dropout(h, 0.3)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = tfnb.effects()
    return g, x, y, [loss, step]


def batch(x: Any, y: Any, rows: int) -> dict[Any, torch.Tensor]:
    """Feeds of so many rows."""
    return {x: torch.linspace(-1, 1, rows * 8).reshape(rows, 8), y: torch.arange(rows) % 4}
