"""Ctrl-C in a recording is raised once, where an op has ended, by the handler that the program has."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb

ROOT = Path(__file__).parents[2]


class Mortal:
    """Something whose end is a press of Ctrl-C, where Python drops what is raised."""

    def __init__(self, press: Callable[[int], Any] = signal.raise_signal) -> None:
        weakref.finalize(self, press, signal.SIGINT)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The lines at which a handler of the program's was called."""
    lines: list[str] = []

    def hear(number: int, frame: Any) -> None:
        lines.append(frame.f_code.co_name)

    before = signal.signal(signal.SIGINT, hear)
    yield lines
    assert signal.getsignal(signal.SIGINT) is hear
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_random_presses_end_what_they_come_into() -> None:
    command = [sys.executable, "-m", "tests.recording.presses", "15", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_many_random_presses() -> None:
    command = [sys.executable, "-m", "tests.recording.presses", "200", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_python_would_drop_is_raised_by_the_next_op() -> None:
    things, reached = [Mortal()], []
    with pytest.raises(KeyboardInterrupt), tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2))
        things.clear()
        reached.append(1)
        x + 1
        reached.append(2)
    assert reached == [1] and not graph.nodes


def test_without_an_op_below_it_is_raised_at_the_end_of_the_recording() -> None:
    things, reached = [Mortal()], []
    with pytest.raises(KeyboardInterrupt), tfnb.record() as graph:
        tfnb.placeholder(torch.ones(2)) + 1
        things.clear()
        reached.append(1)
    assert reached == [1] and not graph.nodes


def test_code_that_a_library_makes_is_not_the_users() -> None:
    made: dict[str, Any] = {"__name__": "namedtuple_Pair", "signal": signal}
    exec("def press(number):\n    signal.raise_signal(number)", made)
    things = [Mortal(made["press"])]
    with pytest.raises(KeyboardInterrupt), tfnb.record():
        things.clear()


@pytest.mark.filterwarnings("ignore:recording. this cell or block keeps heard")
def test_a_handler_that_raises_nothing_is_called_once_and_the_recording_goes_on(heard: list[str]) -> None:
    things = [Mortal()]
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2))
        things.clear()
        assert not heard
        x + 1
        assert len(heard) == 1
        signal.raise_signal(signal.SIGINT)
        assert len(heard) == 2
    assert set(heard) == {"test_a_handler_that_raises_nothing_is_called_once_and_the_recording_goes_on"}
    assert len(graph.nodes) == 2


@pytest.mark.filterwarnings("ignore:recording. this cell or block keeps heard")
def test_a_second_press_counts_at_once(heard: list[str]) -> None:
    things = [Mortal(), Mortal()]
    with tfnb.record():
        things.clear()
        assert heard == ["__call__"]  # of the second thing's end
    assert heard == ["__call__"]


def test_nested_recordings_raise_once_and_the_outer_one_goes_on() -> None:
    things = [Mortal()]
    with tfnb.record() as outer:
        x = tfnb.placeholder(torch.ones(2))
        with pytest.raises(KeyboardInterrupt), tfnb.record() as inner:
            tfnb.placeholder(torch.ones(2)) + 1
            things.clear()
        x + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(outer.nodes) == 2 and not inner.nodes


def test_a_handler_that_the_block_sets_stays(heard: list[str]) -> None:
    mine, hear = [], signal.getsignal(signal.SIGINT)
    with tfnb.record():
        before = signal.signal(signal.SIGINT, lambda number, frame: mine.append(number))
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert len(mine) == 2 and not heard
    signal.signal(signal.SIGINT, before)  # what it had put aside
    signal.raise_signal(signal.SIGINT)
    with tfnb.record():
        signal.raise_signal(signal.SIGINT)
    assert len(heard) == 2
    signal.signal(signal.SIGINT, hear)


def test_an_ignored_signal_stays_ignored(heard: list[str]) -> None:
    hear = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with tfnb.record():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, hear)
    assert not heard


def test_a_recording_of_another_thread_leaves_the_handler_alone(heard: list[str]) -> None:
    seen = []

    def other() -> None:
        with tfnb.record():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
