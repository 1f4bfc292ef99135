"""The iterations of the loops of a traced run, for a drawing: words for its boxes, and data for its sliders.

A trace is anything with the fields of `tfnb.execution.Trace`. Imports the words, the boxes and their wiring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from tfnb.view import facts
from tfnb.view.box import Box, Key, common, key_name
from tfnb.view.inside import OpenedGraph
from tfnb.view.wiring import Wiring
from tfnb.widgets.escaping import shorten

LONGEST = 30  # characters of a value on a card


def value(seen: Any) -> str:
    """The numbers of a value in brief; empty if unknown."""
    bad = {"NaN": seen.nan, "infinite": seen.infinite}
    if any(bad.values()):
        return ", ".join(f"{count:,} {word}" for word, count in bad.items() if count)
    words = [number(item) for item in seen.numbers]
    if seen.is_whole:
        return words[0] if seen.shape == () and words else f"[{', '.join(words)}]" if words else ""
    return words[0] if len(set(words)) == 1 else " to ".join(words)


def number(item: float) -> str:
    """A number in three digits.

    >>> number(0.123456), number(1234567), number(True)
    ('0.123', '1234567', 'True')
    """
    return f"{item:.3g}" if isinstance(item, float) else str(item)


def spec(seen: Any) -> str:
    """Dtype and shape of a value: ``float32[3, 2]``."""
    return f"{str(seen.dtype).removeprefix('torch.')}{list(seen.shape)}"


def history(trace: Any, path: tuple[int, ...], most: int = 200) -> str:
    """The values of an inner node in each kept iteration, a line each; without them, its number of runs."""
    rows = [
        (iteration, note)
        for iterations in trace.loops
        for iteration in iterations.kept
        if (note := iteration.notes.get(path))
    ]
    if not rows:
        amount = trace.inside.get(path)
        return f"{amount.calls:,} times; values are kept of iterations" if amount else "not run in the last traced run"
    lines = [
        f"{_named(iteration)}: " + ", ".join(f"{spec(s)} {value(s)}".rstrip() for s in n.values)
        for iteration, n in rows
    ]
    return "\n".join([*lines[:most], *([f"… {len(lines) - most:,} more"] if len(lines) > most else [])])


def _named(iteration: Any) -> str:
    """``iteration 2 in iteration 1`` of the enclosing loop."""
    return f"iteration {iteration.number + 1:,}" + (
        f" in {_named(iteration.around)}" if iteration.around is not None else ""
    )


class LoopSliders:
    """Records of single loop iterations in a traced run, by the boxes of one drawing."""

    def __init__(self, trace: Any, opened: OpenedGraph, wiring: Wiring) -> None:
        self.loops = tuple(trace.loops)
        self.wiring, self.sides = wiring, opened.sides
        self.calls = {path: amount.calls for path, amount in trace.inside.items()}
        self.paths = opened.paths
        self.ids = {path: node for node, path in opened.paths.items()}
        self.notes: dict[int, list[tuple[int, int, Any]]] = {}  # by the drawing's node: loop, iteration, note
        for place, iterations in enumerate(self.loops):
            for at, iteration in enumerate(iterations.kept):
                for path, note in iteration.notes.items():
                    if path in self.ids:
                        self.notes.setdefault(self.ids[path], []).append((place, at, note))
        self.frames = dict(self._frames())

    def _frames(self) -> Iterator[tuple[Key, int]]:
        """The boxes that hold a loop and nothing else, or else its body."""
        where, taken = self.wiring.where, set[Key]()
        for place, iterations in enumerate(self.loops):
            path = iterations.path
            inside = [where[node] for node, p in self.paths.items() if p[: len(path)] == path and node in where]
            own = where.get(self.ids.get(path, path[-1]))
            for keys in ([key for key in inside if key != own], [*inside, own] if own else inside):
                frame = common(keys)
                if frame and iterations.kept and frame not in taken and self.wiring.root.at(frame).children:
                    taken.add(frame)
                    yield frame, place
                    break

    def is_inside(self, box: Box) -> bool:
        """Whether a box is in a loop that has a slider, and did something there."""
        above = (box.key[:depth] for depth in range(1, len(box.key)))
        return any(key in self.frames for key in above) and any(node.id in self.notes for node in box.nodes)

    def gives(self, box: Box) -> int | None:
        """The node whose values a box shows."""
        if not box.children:
            return box.node.id if box.node.id in self.notes else None
        results = self.wiring.results(box)
        return results[0][0].id if len(results) == 1 and results[0][0].id in self.notes else None

    def words(self, box: Box) -> list[str]:
        """The words on the card of a box: of all iterations together, then of single ones; none outside of loops."""
        node = self.gives(box) if self.is_inside(box) else None
        if node is None:
            return []
        place = self.notes[node][0][0]
        calls = self.calls.get(self.paths[node], self.loops[place].total)
        return [f"{calls:,} times", *dict.fromkeys(_short(note) for _, _, note in self.notes[node])]

    def label(self, box: Box) -> tuple[int, str] | None:
        """Number and initial text of the slider of an unfolded box, if any."""
        place = self.frames.get(box.key)
        return None if place is None else (place, f"all {facts.plural(self.loops[place].total, 'iteration')}")

    @cached_property
    def data(self) -> dict[str, Any]:
        """The data of the sliders: see ``loop_sliders.js`` of `tfnb.widgets`."""
        if not self.frames:
            return {}
        words: dict[str, int] = {}
        place_of = {iterations.path: place for place, iterations in enumerate(self.loops)}
        index = {id(iteration): at for iterations in self.loops for at, iteration in enumerate(iterations.kept)}
        loops = [
            {
                "around": place_of.get(iterations.around, -1), "every": iterations.every, "total": iterations.total,
                "iterations": [[one.number, index[id(one.around)] if one.around else -1] for one in iterations.kept],
            }
            for iterations in self.loops
        ]  # fmt: skip
        where = self.wiring.where
        nodes = {key_name(where[n]): list(_packed(self.notes[n], words)) for n in self.notes if n in where}
        gives = {box.name: key_name(where[n]) for box in self._groups() if (n := self.gives(box)) in where}
        return {"loops": loops, "nodes": nodes, "gives": gives, "sides": list(self._sides()), "words": [*words]}

    def _groups(self) -> Iterable[Box]:
        return (box for box in self.wiring.root.walk() if box.children and self.is_inside(box))

    def _sides(self) -> Iterator[list[Any]]:
        """Loop, nodes of a side of a branch, and the iterations that took the side."""
        ids: Mapping[tuple[Any, bool], tuple[int, ...]] = self.sides
        where = self.wiring.where
        for place, iterations in enumerate(self.loops):
            for path in dict.fromkeys(path for iteration in iterations.kept for path in iteration.sides):
                for way in (True, False):
                    keys = [key_name(where[node]) for node in ids.get((path, way), ()) if node in where]
                    taken = [at for at, iteration in enumerate(iterations.kept) if iteration.sides.get(path) is way]
                    yield [place, keys, taken]


def _short(note: Any) -> str:
    return shorten(", ".join(filter(None, map(value, note.values))), LONGEST)


def _packed(notes: Iterable[tuple[int, int, Any]], words: dict[str, int]) -> Iterator[int]:
    """The loop, then four numbers an iteration: index, words on a card and in the tooltip, tenths of microseconds."""
    for count, (place, at, note) in enumerate(notes):
        if not count:
            yield place
        long = "\n".join(f"{spec(seen)}  {value(seen)}".rstrip() for seen in note.values)
        took = -1 if math.isnan(note.seconds) else round(1e7 * note.seconds)
        yield from (at, *(words.setdefault(text, len(words)) for text in (_short(note), long)), took)
