"""One piece of compiled code for feeds of many sizes: what it is made for, when it is refused, and who runs it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

import tfnb
from tests.compiling import compile_soon
from tfnb.errors import Unimplemented
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers import compiled_loops
from tfnb.execution.tiers import tiered as tiers
from tfnb.execution.tiers.agreement import at_other_sizes
from tfnb.execution.tiers.decompositions import decompositions
from tfnb.execution.tiers.interface import TierRequest, Unfit
from tfnb.execution.tiers.native import package
from tfnb.execution.tiers.native.exportable import _sized, exportable
from tfnb.execution.tiers.native.manifest import About, about
from tfnb.execution.tiers.native.request import Axis, NativeRequest, Operand, varying_axes
from tfnb.execution.tiers.native.tier import loaded

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor's own
needs_compiler = pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="there is no C++ compiler")
WIDTH = 6


def batch(rows: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, WIDTH, generator=made), torch.randint(3, (rows,), generator=made)]


class Classifier:
    """A net with dropout, its step, and a session."""

    def __init__(self, mode: str = "off") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
        with tfnb.record() as graph:
            self.fed = [tfnb.placeholder(sample, name=name) for name, sample in zip("xy", batch(4), strict=True)]
            loss = F.cross_entropy(self.model(self.fed[0]), self.fed[1])
            self.fetches = [loss, tfnb.train.Adam(0.1).minimize(loss)]
        self.session = tfnb.Session(graph, compile=mode)

    def loss(self, rows: int) -> float:
        return float(self.session.run(self.fetches, dict(zip(self.fed, batch(rows), strict=True)))[0])

    @property
    def program(self) -> Program:
        self.loss(4)
        (prepared,) = self.session._prepared.values()
        return prepared.code.program.undonated()  # type: ignore[no-any-return]


def request(program: Program, rows: int) -> NativeRequest:
    storages = [variable.storage for variable in program.variables]
    return NativeRequest.of(program, [*batch(rows), *storages, 0], varies=True)


def traced(wanted: NativeRequest) -> tuple[Any, About]:
    table = decompositions(select_decomp_table())
    module, _, found = exportable(wanted.program().undonated(), wanted.operands, table, wanted.varying)
    return module, found


def test_sizes_between_powers_of_two_ask_for_the_same_code() -> None:
    program = Classifier().program
    keys = {rows: request(program, rows).key() for rows in (33, 40, 64, 65)}
    assert keys[33] == keys[40] == keys[64] != keys[65]
    assert request(program, 64).varying == (Axis(0, 0, "B"), Axis(1, 0, "B"))
    assert {operand.shape[0] for operand in request(program, 4).operands[:2]} == {7}  # 5 and 3 are sizes of the net


def test_what_is_drawn_varies_with_the_feeds() -> None:
    _, found = traced(request(Classifier().program, 8))
    drawn = found.varying[2:]
    assert [axis.symbol for axis in drawn] == ["B"] and drawn[0].operand >= 2
    assert found.at([(21, WIDTH), (21,)]).operands[drawn[0].operand].shape == (21, 5)


def test_code_that_decides_about_a_size_is_refused() -> None:
    axes, examples = (Axis(0, 0, "B"), Axis(1, 0, "B")), (torch.randn(9, 3), torch.randn(9, 9))
    with _sized(examples, axes) as (x, y):
        assert type(x.shape[0]) is not int and type(y.shape[1]) is int  # of two axes of nine one varies
        (x.sum() + y[: x.shape[0]].sum()) / (x.shape[0] * 2)
    with (
        pytest.raises(Unimplemented, match="sizes cannot vary: tracing it decided"),
        _sized(examples, axes) as (x, _),
    ):
        assert x.shape[0] > 4
    with (
        pytest.raises(Unimplemented, match="sizes cannot vary: tracing it decided"),
        _sized(examples, axes) as (x, y),
    ):
        assert x.shape[0] == y.shape[1]


def test_feeds_that_are_none_of_its_sizes_do_not_fit() -> None:
    operands = tuple(Operand.of(torch.empty(shape)) for shape in ((9, 3), (9,), (3, 3)))
    found = About(operands, (), (0,), False, (Axis(0, 0, "B"), Axis(1, 0, "B")))
    assert [x.shape for x in found.at([(5, 3), (5,)]).operands] == [(5, 3), (5,), (3, 3)]
    for shapes in ([(5, 3), (4,)], [(1, 3), (1,)], [(5,), (5,)]):
        with pytest.raises(Unfit):
            found.at(shapes)


@needs_compiler
def test_two_sizes_have_code_of_their_own_so_has_one_row_and_the_others_share() -> None:
    found = tiers.Tiers(Classifier().program, "auto")
    own = {rows: found._found((torch.Size([rows, WIDTH]), torch.Size([rows]))) for rows in (8, 7, 6, 1, 5, 9)}
    assert own[6] is own[5] is own[9] and len({*map(id, own.values())}) == 4


def test_no_more_choices_of_sizes_are_remembered_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "REMEMBERED", 5)
    found = tiers.Tiers(Classifier().program, "auto")
    for rows in range(2, 12):
        assert callable(found.forward((torch.Size([rows, WIDTH]), torch.Size([rows]))))
    assert len(found._sizes) == 5


@needs_compiler
def test_code_that_is_right_for_one_size_only_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        name = "compiled"

        def made(self, asked: TierRequest) -> Any:
            forward, rows = asked.program.forward, len(asked.args[0])
            return lambda *given: tuple(
                x + 1 if isinstance(x, torch.Tensor) and len(given[0]) != rows else x for x in forward(*given)
            )

    monkeypatch.setattr(tiers, "VARYING", Fixed())
    monkeypatch.setattr(tiers, "MOST", 0)
    mine, theirs = Classifier("now"), Classifier()
    for rows in (4, 5, 9):
        assert mine.loss(rows) == theirs.loss(rows)
    assert "other sizes [...]: generated code (compiled code differs: " in mine.session.status()[0]


@needs_compiler
def test_steps_of_about_the_same_size_decide_which_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name = "compiled"

        def made(self, asked: TierRequest) -> Any:
            def forward(*given: Any) -> Any:
                time.sleep(0.01)
                return asked.program.forward(*given)

            return forward

    monkeypatch.setenv("TFNB_COMPILE", "auto")
    monkeypatch.setattr(tiers, "VARYING", Slow())
    monkeypatch.setattr(tiers, "MOST", 0)
    compile_soon(monkeypatch)
    mine, theirs, end = Classifier("auto"), Classifier(), time.monotonic() + 60
    for rows in itertools.count(33):
        assert mine.loss(rows) == theirs.loss(rows)
        if "not faster" in mine.session.status()[0]:
            break
        assert time.monotonic() < end


def test_other_sizes_have_rows_of_the_feeds() -> None:
    program = Classifier().program
    x, y = batch(4)
    found = [args[:2] for args in at_other_sizes(varying_axes(program), [x, y, 0])]
    assert [len(x) for x, _ in found] == [len(y) for _, y in found] == [5, 11, 2]
    assert found[0][0].equal(torch.cat([x, x[:1]])) and found[2][1].equal(y[:2])


@pytest.mark.slow
@needs_compiler
def test_steps_of_many_sizes_by_one_package_are_generated_steps(tmp_path: Path) -> None:
    program = Classifier().program
    request(program, 4).save(tmp_path)
    package.build(NativeRequest.load(tmp_path), tmp_path)
    assert about(tmp_path).varying
    step: Any = loaded(tmp_path, program)
    mine, theirs = ([variable.storage.clone() for variable in program.variables] for _ in "ab")
    for run, rows in enumerate((4, 2, 9, 33, 4, 100, 3, *range(5, 30), 4)):  # more than are kept
        feeds = batch(rows)
        wanted, pending = program.compute(feeds, theirs, run)
        program.commit(pending)
        torch.testing.assert_close(step(feeds, mine, run), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(Unfit):
        step([batch(5)[0], batch(4)[1]], mine, 0)
