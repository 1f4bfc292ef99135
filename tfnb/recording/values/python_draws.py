"""Random numbers of Python and NumPy, and clocks: each call that a recording's own code makes is put on the tape.

Calls in converted code come from `tfnb.control_flow.staging.conversion`, whatever name they are called by. Elsewhere
the functions of the modules ``random``, ``numpy.random`` and ``time`` are replaced while a thread records. At the end
`tfnb.recording.cells.draw_flow` decides which of the numbers reached the graph.
"""

from __future__ import annotations

import datetime
import os
import pickle
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from tfnb.graph.graph import new_id
from tfnb.recording.marks.settings import holds_settings
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.values.recording import Recording, open_recording

_SOURCES = (random.Random, np.random.RandomState, np.random.Generator)
_NO_DRAWS = frozenset({
    "seed", "getstate", "setstate", "get_state", "set_state", "spawn", "jumped", "__init__", "__reduce__",
    "__getstate__", "__setstate__",
})  # fmt: skip
_CLOCKS = {
    **{getattr(time, name): f"time.{name}" for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
        "process_time_ns", "thread_time", "thread_time_ns",
    )},
    datetime.datetime.now: "datetime.now", datetime.datetime.utcnow: "datetime.utcnow",
    datetime.datetime.today: "datetime.today", datetime.date.today: "date.today",
}  # fmt: skip
_FUNCTIONS = {
    np.random.sample: "np.random.sample", np.random.ranf: "np.random.ranf", os.urandom: "os.urandom",
    **{getattr(secrets, name): f"secrets.{name}" for name in ("randbelow", "randbits", "choice", "token_bytes")},
    uuid.uuid1: "uuid.uuid1", uuid.uuid4: "uuid.uuid4",
}  # fmt: skip
_CLOCK_NAMES = frozenset(_CLOCKS.values())
_KINDS = frozenset({FunctionType, MethodType, BuiltinMethodType, type(np.random.sample)})
_ORIGINAL = "__tfnb_draws__"
_GLOBAL = {id(random.random.__self__): "random", id(np.random.rand.__self__): "np.random"}  # type: ignore[attr-defined]
_PLAIN = random.__file__
_MANY = 64  # draws of one line of which the way to the graph is looked at


class DrawFrame(NamedTuple):
    """A frame on the call path of a draw: its file and line, the function's name, and the visible names."""

    file: str
    line: int
    function: str
    names: Mapping[str, Any]


class Draw(NamedTuple):
    """One call that gives another value each time. ``places``: the innermost first; later nodes than ``node``."""

    called: str
    is_clock: bool
    places: tuple[DrawFrame, ...]
    node: int


def drawing(function: Any) -> str | None:
    """The qualified name of a function that draws a number or reads a clock; None for others."""
    kind = type(function)
    if kind not in _KINDS:
        return None
    if kind is FunctionType:
        function = _unheard(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _SOURCES):
        name = function.__name__
        return None if name in _NO_DRAWS else f"{_GLOBAL.get(id(owner), type(owner).__name__)}.{name}"
    return None if kind is MethodType else _CLOCKS.get(function) or _FUNCTIONS.get(function)


def is_clock(called: str) -> bool:
    """Whether a function of this name reads a clock."""
    return called in _CLOCK_NAMES


def _unheard(function: object) -> Any:
    return function.__dict__.get(_ORIGINAL, function) if type(function) is FunctionType else function


def heard(function: Callable[..., Any], called: str) -> Callable[..., Any]:
    """A function wrapped so that its calls are put on the recording's tape."""
    function = _unheard(function)
    owner = getattr(function, "__self__", None)

    def call(*args: object, **kwargs: object) -> Any:
        recording = open_recording()
        if recording is not None:
            _hear(recording, called, owner)
        return function(*args, **kwargs)

    call.__dict__[_ORIGINAL] = function
    return call


def of_module(original: Callable[..., Any]) -> Any:
    """The replacement of a function of a module while a thread records."""
    hearing = heard(original, drawing(original) or original.__name__)

    def call(*args: object, **kwargs: object) -> Any:
        return (original if _is_ours(sys._getframe(1)) else hearing)(*args, **kwargs)

    call.__dict__[_ORIGINAL] = original
    return call


def of_class(original: Callable[..., Any]) -> Any:
    """The replacement of a method of Python's generators on which all their other methods are based."""

    def method(self: random.Random, *args: object) -> Any:
        recording = open_recording()
        if recording is not None and not _is_ours(_caller(sys._getframe(1))):
            _hear(recording, drawing(MethodType(original, self)) or original.__name__, self)
        return original(self, *args)

    return method


def seeding(original: Callable[..., Any]) -> Any:
    """The replacement of ``random.Random.seed``, which the constructor calls, too."""

    def seed(self: random.Random, a: object = None, *args: object, **kwargs: object) -> None:
        original(self, a, *args, **kwargs)
        if a is not None and id(self) not in _GLOBAL:
            _remember_seeded(self)

    return seed


def making(original: Callable[..., Any]) -> Any:
    """The replacement of ``numpy.random.default_rng``."""

    def default_rng(seed: object = None) -> Any:
        made = original(seed)
        if isinstance(seed, (int, np.integer)):
            _remember_seeded(made)
        return made

    return default_rng


def _remember_seeded(generator: object) -> None:
    """Remember a generator seeded inside a function: it draws the same numbers at every call, as in a run."""
    recording = open_recording()
    if recording is None:
        return
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename == _PLAIN or _is_ours(frame)):
        frame = frame.f_back
    if frame is not None and len(_outer_code(_places(frame, recording.stop, recording.is_cell))) > 1:
        recording.tape.seeded.append(generator)


def _outer_code(places: tuple[DrawFrame, ...]) -> set[tuple[str, str]]:
    return {(place.file, place.function) for place in places}


class NamedGenerator(NamedTuple):
    """A generator that the program has a name for, and its state when the recording began."""

    name: str
    called: str
    owner: object
    state: bytes


def held_generators(names: Mapping[str, Any]) -> list[NamedGenerator]:
    """The generators bound to names of a block or in its modules: compiled code draws from them without a recorded
    call.
    """
    named = [(name, value) for name, value in names.items() if isinstance(value, _SOURCES) or drawing(value)]
    objects = [(name, getattr(value, "__dict__", {})) for name, value in names.items() if holds_settings(type(value))]
    named += [(name, each) for name, own in objects for each in own.values() if isinstance(each, _SOURCES)]
    named += [
        (name, value)
        for name, module in names.items() if isinstance(module, torch.nn.Module)
        for inner in module.modules() for value in vars(inner).values() if isinstance(value, _SOURCES)
    ]  # fmt: skip
    found = []
    for name, value in named:
        owner = value if isinstance(value, _SOURCES) else getattr(value, "__self__", None)
        if isinstance(owner, _SOURCES):
            found.append(NamedGenerator(name, drawing(value) or f"{type(owner).__name__}.random", owner, _state(owner)))
    return found


def have_drawn(held: Iterable[NamedGenerator], heard: Collection[int]) -> list[NamedGenerator]:
    """The generators that drew in the meantime without a recorded call."""
    return [each for each in held if id(each.owner) not in heard and _state(each.owner) != each.state]


def _state(owner: Any) -> bytes:
    if isinstance(owner, random.SystemRandom):  # it has none, and its calls are heard
        return b""
    if isinstance(owner, random.Random):
        return pickle.dumps(owner.getstate())
    is_new = isinstance(owner, np.random.Generator)
    return pickle.dumps(owner.bit_generator.state if is_new else owner.get_state(legacy=False))


def functions_of(module: ModuleType) -> tuple[str, ...]:
    """Names of the functions of a module that draw or read a clock."""
    return tuple(name for name, each in vars(module).items() if drawing(each) is not None)


def _hear(recording: Recording, called: str, owner: object) -> None:
    if any(owner is seeded for seeded in recording.tape.seeded):
        return
    recording.tape.heard.add(id(owner))
    outer = called
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename == _PLAIN or _is_ours(frame)):
        if not _is_ours(frame) and frame.f_code.co_name[0] != "_":  # `uniform`, which calls `random`
            outer = f"{called.rpartition('.')[0]}.{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        return
    key = outer, frame.f_code, frame.f_lineno
    count = recording.tape.drawn[key] = recording.tape.drawn.get(key, 0) + 1
    if count > _MANY:
        return
    places = _places(frame, recording.stop, recording.is_cell)
    if places:
        drawn = Draw(outer, is_clock(called), places, new_id())
        known = (each for each in recording.tape.draws if _way(each.places) == _way(places))
        if next(known, None) is None:
            recording.tape.draws.append(drawn)


def _caller(frame: FrameType) -> FrameType:
    """The frame outside of the module ``random``, whose methods call each other."""
    while frame.f_code.co_filename == _PLAIN and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    """Whether the frame is tfnb's own code, whose deadlines read clocks on their own account."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tfnb"


def _way(places: tuple[DrawFrame, ...]) -> list[tuple[str, int]]:
    return [(place.file, place.line) for place in places]


def _places(frame: FrameType, stop: FrameType | None, is_cell: bool) -> tuple[DrawFrame, ...]:
    """The program's frames from a draw outwards; none for draws that are no part of a step's computation.

    That is in code of packages, except for the forward method of a module; where a module is made; and in a loader.
    """
    package = _package(frame)
    if package in _NOT_MODULES:
        return ()
    found: list[DrawFrame] = []
    in_forward = package is None
    for each in _outwards(frame, stop):
        if each is stop and is_cell:
            break
        code = each.f_code
        if code.co_name == "__init__" and isinstance(each.f_locals.get("self"), torch.nn.Module):
            return ()
        if f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}" in code.co_filename:
            return ()
        own = _package(each)
        if own == package and code.co_name == "forward":
            in_forward = True
        if own is None or own == package:
            found.append(DrawFrame(code.co_filename, each.f_lineno, code.co_name, each.f_globals))
    return tuple(found) if in_forward else ()


def _outwards(frame: FrameType | None, stop: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        if frame is stop:
            return
        frame = frame.f_back


_NOT_MODULES = frozenset({"", "torch", "numpy", "tfnb"})


def _package(frame: FrameType) -> str | None:
    """The package that a frame's code is of, empty for Python's own; None for the user's."""
    file = frame.f_code.co_filename
    if not is_foreign(file):
        return None
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return "" if name in sys.stdlib_module_names else name
