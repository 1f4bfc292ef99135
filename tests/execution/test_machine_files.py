"""Files that all compilations of a machine share: made once, checked, and never those of another machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tfnb.execution.compiling import machine_files as shared
from tfnb.execution.compiling.package_cache import machine, packages

pytestmark = pytest.mark.usefixtures("own_packages")


class Maker:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> Mapping[str, Any]:
        self.calls += 1
        (folder / "code").write_text(f"version {self.calls}")
        return {"version": self.calls}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    packages().clear()
    monkeypatch.setattr(shared, "_checked", {})
    yield Maker()


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_checked", {})


def test_an_entry_is_made_once_for_all_processes(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared.machine_files("a", make)
    assert first.parent == packages().folder and (first / "code").read_text() == "version 1"
    another_process(monkeypatch)
    assert shared.machine_files("a", make) == first and make.calls == 1
    assert shared.machine_files("b", make) != first and make.calls == 2


def test_a_damaged_entry_is_made_again(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared.machine_files("a", make) / "code").write_text("something else")
    another_process(monkeypatch)
    assert (shared.machine_files("a", make) / "code").read_text() == "version 2"


def test_an_entry_that_made_room_is_made_again(make: Maker) -> None:
    packages().drop(shared.machine_files("a", make).name)
    assert (shared.machine_files("a", make) / "code").read_text() == "version 2"


def test_an_entry_is_of_this_machine(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    here = shared.machine_files("a", make)
    try:
        for name, value in (("torch.__version__", "1.0"), ("sys.version", "4.0")):
            with monkeypatch.context() as other:
                other.setattr(name, value)
                machine.cache_clear()
                assert shared.machine_files("a", make) != here
    finally:
        machine.cache_clear()
    assert shared.machine_files("a", make) == here and make.calls == 3


def test_who_uses_an_entry_may_refuse_it(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 1

    def is_current(_: Path, facts: Mapping[str, Any]) -> bool:
        return bool(facts["version"] == wanted)

    shared.machine_files("a", make, is_current)
    another_process(monkeypatch)
    shared.machine_files("a", make, is_current)
    assert make.calls == 1
    wanted = 2
    another_process(monkeypatch)
    assert (shared.machine_files("a", make, is_current) / "code").read_text() == "version 2"


def test_an_entry_that_cannot_be_made_leaves_nothing(make: Maker) -> None:
    def fails(folder: Path) -> Mapping[str, Any]:
        (folder / "code").write_text("half")
        raise ValueError("no way")

    with pytest.raises(ValueError, match="no way"):
        shared.machine_files("a", fails)
    assert [*packages().folder.iterdir()] == []
    assert (shared.machine_files("a", make) / "code").read_text() == "version 1"
