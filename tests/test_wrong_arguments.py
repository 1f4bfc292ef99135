"""A wrong argument of a public name is an error that says so, and changes nothing."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wrong_arguments import WRONG, World, cases, made
from tfnb.errors import InvalidType, TfnbError, ensure_type

LONGEST = 10  # seconds
EXAMPLES = int(os.environ.get("TFNB_FUZZ", "150"))
INNER = (AttributeError, LookupError, AssertionError, RecursionError, UnboundLocalError)
ENDLESS = {("while_loop", "cond"), ("compare", "seeds")}  # what is asked for is done for as long as it takes
AFTERWARDS = {("fit", "callbacks")}  # a function of the user fails after a step


class Worlds:
    """A world that is made anew after a call that changed it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.fresh()

    def fresh(self) -> None:
        """Make another one."""
        self.world = World(self._factory.mktemp("world"))
        self.calls, self.state = self.world.calls(), self.world.state()

    def check(self, name: str, argument: str, wrong: Any) -> None:
        """Make a call with a wrong argument."""
        __tracebackhide__ = True
        signal.alarm(LONGEST)
        try:
            made(self.calls[name], argument, wrong)
        except TfnbError:
            assert (name, argument) in AFTERWARDS or self.world.state() == self.state
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            assert not isinstance(error, INNER) or Path(last).name == "wrong_arguments.py", "".join(
                traceback.format_exception(error)
            )
        finally:
            signal.alarm(0)
            if self.world.state() != self.state:
                self.fresh()


def _stop(number: int, frame: object) -> None:
    raise AssertionError(f"the call took longer than {LONGEST} s")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wrong paths are good names of files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    before = signal.signal(signal.SIGALRM, _stop)
    yield Worlds(tmp_path_factory)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")
def test_right_arguments_are_right(worlds: Worlds) -> None:
    """Else a wrong one beside them would prove nothing."""
    for name, argument in list(cases(worlds.world)):
        made(worlds.calls[name], argument, worlds.calls[name].right[argument])
        worlds.fresh()


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, *HealthCheck]
)
@given(data=st.data())
def test_a_wrong_argument_is_told_and_changes_nothing(worlds: Worlds, data: st.DataObject) -> None:
    every = [case for case in cases(worlds.world) if case not in ENDLESS]
    name, argument = data.draw(st.sampled_from(every))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worlds.check(name, argument, data.draw(st.sampled_from(WRONG)))


FOUND = [
    "Graph.diff", "Graph.since", "Graph.commit", "Graph.derive", "Graph.value", "Graph[]", "Variable.set", "initialize",
    "stop_gradient", "Session.reads", "map_fn", "races", "compare", "eval", "Session.run", "Spec.of", "name_scope",
    "record", "scan", "fold", "Variable.scatter_update",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
def test_calls_that_failed_in_our_own_code_say_what_they_take(worlds: Worlds, name: str) -> None:
    for argument in worlds.calls[name].right:
        if (name, argument) not in ENDLESS:
            for wrong in WRONG:
                worlds.check(name, argument, wrong)


def test_a_save_after_a_refused_source_is_as_before(worlds: Worlds, tmp_path: Path) -> None:
    for wrong in WRONG:
        with pytest.raises(InvalidType, match=r"Session\.reads takes a Source, a queue or a scheduler"):
            worlds.world.session.reads(wrong)
    worlds.world.session.save(tmp_path / "v")


def test_the_message_says_what_was_given_and_is_short() -> None:
    with pytest.raises(InvalidType, match=r"^seed takes int, and was given True, which is bool$"):
        ensure_type(True, int, "seed")
    with pytest.raises(InvalidType) as caught:
        ensure_type("x" * 10**6, int, "seed")
    assert len(str(caught.value)) < 200 and isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
