"""A wrong argument of a public name is an error that says so, and changes nothing."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import tries
from tests.wrong_arguments import ABSENT, WRONG, World, made, public
from tfnb.errors import InvalidType, TfnbError, ensure_type

LONGEST = 10  # seconds
TRIES, ALL = tries(10), 1000  # of a thousand wrong arguments, how many are tried
INNER = (AttributeError, LookupError, AssertionError, RecursionError, UnboundLocalError)
ENDLESS = {  # what is asked for is done for as long as it takes
    ("while_loop", "cond"), ("compare", "seeds"), ("Coordinator.wait_for_stop", "timeout"),
}  # fmt: skip
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

    def renew(self) -> None:
        """Make another one where this one changed."""
        if self.world.state() != self.state:
            self.fresh()

    def check(self, name: str, argument: str, wrong: Any) -> None:
        """Make a call with a wrong argument."""
        __tracebackhide__ = True
        signal.alarm(LONGEST)
        try:
            made(self.calls[name], **{argument: wrong})
        except TfnbError:
            assert (name, argument) in AFTERWARDS or self.world.state() == self.state
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            assert not isinstance(error, INNER) or Path(last).name == "wrong_arguments.py", "".join(
                traceback.format_exception(error)
            )
        finally:
            signal.alarm(0)
            self.renew()


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


def test_each_public_name_is_in_the_table_or_is_absent_for_a_reason(worlds: Worlds) -> None:
    names, absent = {*public()}, {name for names in ABSENT.values() for name in names.split()}
    assert names - worlds.calls.keys() == absent


@pytest.mark.filterwarnings("ignore")
def test_right_arguments_are_right(worlds: Worlds) -> None:
    """Else a wrong one beside them would prove nothing."""
    for name in list(worlds.calls):
        made(worlds.calls[name])
        worlds.renew()


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_told_and_changes_nothing(worlds: Worlds) -> None:
    every = [(name, argument) for name, call in worlds.calls.items() for argument in call.right]
    chosen = [(*case, place) for case in every if case not in ENDLESS for place in range(len(WRONG))]
    random.Random(0).shuffle(chosen)
    for name, argument, place in chosen[: len(chosen) * TRIES // ALL]:
        worlds.check(name, argument, WRONG[place])


FOUND = [
    "Graph.diff", "Graph.since", "Graph.commit", "Graph.derive", "Graph.value", "Graph.__getitem__", "Variable.set",
    "initialize", "stop_gradient", "Session.reads", "map_fn", "races", "compare", "Tensor.eval", "Session.run",
    "Spec.of", "name_scope", "record", "scan", "fold", "Variable.scatter_update", "clip_by_norm", "gradient_override",
    "TensorArray.write", "TensorArray.scatter", "TensorArray.unstack", "TensorArray.read", "TensorArray.gather",
    "SparseConditionalAccumulator.take_grad", "HashTable.from_file", "TextLineReader", "WholeFileReader",
    "FixedLengthRecordReader", "QueueRunner", "Coordinator.join", "Adagrad",
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
