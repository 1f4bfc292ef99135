"""Donation: what is written into the memory of a dying operand has the same bits and strides, and nobody sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.programs.checks import in_place
from tfnb.execution import Program, lower
from tfnb.graph import Contents
from tfnb.graph.op_facts import facts
from tfnb.memory import LAST
from tfnb.passes import overwriting, stages, step_graph, table

LARGE = (64, 512)  # float32: 128 KiB


def lowered(function: Callable[..., Any], *data: torch.Tensor) -> tuple[Program, list[torch.Tensor]]:
    """The program, and what it gives."""
    with tfnb.record() as g:
        xs = [tfnb.placeholder(x, shape=tuple(x.shape)) for x in data]
        ys = function(*xs)
    ys = ys if isinstance(ys, (list, tuple)) else [ys]
    program = lower(g, [y.value for y in ys], [x.value for x in xs])
    return program, program.compute([x.clone() for x in data], [v.storage for v in program.variables])[0]


CHAINS: dict[str, tuple[Callable[..., Any], int]] = {
    "a chain": (lambda x: (x.exp() * 2).tanh().neg(), 3),
    "a branch": (lambda x: (lambda y: y.sin() + y.cos())(x.exp()), 2),
    "a value with itself": (lambda x: (lambda y: y * y)(x.exp()), 1),
    "a backward kernel": (lambda x: torch.ops.aten.threshold_backward(x.exp(), x.sin(), 0.5), 1),
    "through views of the whole": (lambda x: x.exp().view(512, 64).t().sin(), 1),
    "a feed": (lambda x: x.neg(), 0),
    "a fetched value": (lambda x: (lambda y: [y, y.neg()])(x.exp()), 0),
    "a view that lives": (lambda x: (lambda y: y.neg() + y.view(-1)[:512].sin())(x.exp()), 1),
    "a part of the memory": (lambda x: x.exp()[:, ::2].neg(), 0),
    "one that is turned": (lambda x: (lambda y: y[:64, :64] + y[:64, :64].t())(x.exp()), 0),
    "the whole, turned": (lambda x: (lambda y: y + y.t())(x[:, :64].exp().repeat(4, 4)), 0),
    "another dtype": (lambda x: x.exp() > 1, 0),
    "a wider result": (lambda x: x.exp()[:, :1] + x, 0),
    "small": (lambda x: x[:2].exp().neg(), 0),
    "one piece of a list": (lambda x: (lambda a, b: a.neg() + b)(*x.exp().chunk(2)), 1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_donated(name: str) -> None:
    function, count = CHAINS[name]
    data = torch.randn(LARGE)
    program, got = lowered(function, data)
    want = function(data)
    for a, b in zip(got, want if isinstance(want, list) else [want], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(program.donated) == count, program.code


def test_variables_and_constants_are_not_written() -> None:
    layer, constant = nn.Parameter(torch.randn(LARGE)), torch.randn(LARGE)
    before, kept = layer.detach().clone(), constant.clone()
    program, _ = lowered(lambda x: (layer.neg() * constant.neg()).exp() + x, torch.randn(LARGE))
    assert len(program.donated) == 3
    assert torch.equal(layer, before) and torch.equal(constant, kept)


def test_what_another_library_saw_is_not_written() -> None:
    held = []

    @torch.library.custom_op("tfnb_test::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        held.append(x)
        return x.sum()

    look.register_fake(lambda x: x.new_empty(()))
    program, _ = lowered(lambda x: (lambda y: look(y) + y.neg())(x.exp()), torch.zeros(LARGE))
    assert not program.donated and torch.equal(held[-1], torch.ones(LARGE))


def test_a_program_without_donation_is_kept_for_steps_in_parts() -> None:
    with tfnb.record() as g:
        x, b = tfnb.placeholder(torch.zeros(LARGE)), tfnb.placeholder(torch.zeros(LARGE))
        y = x.exp()
        z, late = y.neg(), y.sin() * b
    one = torch.ones(LARGE)
    with tfnb.Session(g).step([z, late], [x, b]) as step:
        torch.testing.assert_close(step.fetch(z, {x: one}), -one.exp())
        torch.testing.assert_close(step.fetch(late, {b: one}), one.exp().sin())


def test_a_trained_network_has_the_same_bits() -> None:
    def training(donated: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 8, 3), nn.Tanh()
        net = nn.Sequential(*convolutions)
        x = torch.randn(4, 3, 32, 32)
        with tfnb.record() as g:
            fed = tfnb.placeholder(x, shape=tuple(x.shape))
            loss = (F.dropout(net(fed), 0.1) * 3).square().mean()
            step = tfnb.train.Adam(0.01).minimize(loss)
        ask = [loss.value, step.value], [fed.value]
        program = lower(g, *ask, in_place(1 if donated else 1 << 40))
        assert bool(program.donated) is donated
        losses = []
        for run in range(3):
            fetched, pending = program.compute([x], [v.storage for v in program.variables], run)
            program.commit(pending)
            losses.append(fetched[0])
        return [*losses, *net.state_dict().values()]

    for a, b in zip(training(True), training(False), strict=True):
        assert torch.equal(a, b)


def test_every_variant_that_writes_gives_the_same_bits_and_strides() -> None:
    seen = 0
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        name, _, kind = rest.partition(".")
        functional = getattr(getattr(torch.ops.aten, name), kind or "default") if space == "aten" else None
        if functional is None or torch.Tag.pointwise not in functional.tags:
            continue
        own, found = facts(functional), overwriting(f"aten.{name}.{kind or 'default'}")
        operands = 2 if own.names[1:2] == ("other",) else 1
        if found is not None and own.names[0] == "self" and set(own.names[operands:]) <= own.defaults.keys():
            seen += _is_alike(functional, *found)
    assert seen > 60, seen


def _is_alike(functional: Any, writing: Any, out: str | None) -> bool:
    """Compare them on dense tensors in any order of axes; False where these are no tensors for the op."""
    second = str(functional._schema.arguments[1].type) if facts(functional).names[1:2] == ("other",) else None
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 2, 1)):
        x = torch.rand(3, 4, 5, 6).permute(order)
        others: dict[str | None, list[Any]] = {None: [()], "Tensor": [(torch.rand(x.shape),), (torch.rand(1),), (x,)]}
        for more in others.get(second, [(2,)]):
            try:
                want = functional(x, *more)
            except RuntimeError:  # for whole numbers only
                return False
            if want.dtype is not x.dtype:
                return False
            into = x.clone()
            given = [into if item is x else item for item in more]
            got = writing(into, *given, **({out: into} if out else {}))
            assert got.data_ptr() == into.data_ptr() and got.stride() == want.stride() == x.stride(), functional
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return True


def test_the_table_of_passes_shows_what_it_saves() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(LARGE), shape=LARGE)
        y = x.exp().neg().sin()
    *_, before, after = table(g, [y.value], [x.value], last=LAST)
    assert after.name == "donate" and after.peak == after.bytes == 4 * 64 * 512
    assert before.bytes == 3 * after.bytes and before.peak == 2 * after.peak


def test_the_difference_of_graphs_shows_it_and_a_tag_of_somebody_else_does_nothing() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(LARGE), shape=LARGE)
        y = x.exp().neg()
    *_, before, _, after = (run for _, run in stages(step_graph(g, [y.value], [x.value]), LAST))
    assert any(line.startswith("+") and "aten.neg(%1) in place" in line for line in before.diff(after).splitlines())
    nodes = tuple(replace(node, tags=frozenset({"in place"})) for node in g.nodes)
    program = lower(g.derive(Contents(nodes)), [y.value], [x.value])
    fed = torch.zeros(LARGE)
    assert torch.equal(program.compute([fed], [])[0][0], -torch.ones(LARGE)) and not fed.any()


def test_compiled_code_has_no_donation() -> None:
    program, _ = lowered(lambda x: (lambda y: y.exp().neg() + y.sin() * 2)(x.exp()), torch.randn(LARGE))
    plain = program.undonated()
    assert program.donated and not plain.donated and "_(" not in plain.code.replace("__", "")
    assert [n.name for n in plain.module.graph.nodes] == [n.name for n in program.module.graph.nodes]
    assert plain.undonated() is plain and "exp_" in program.code


@pytest.mark.parametrize("split", ["unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"])
def test_pieces_whose_schema_does_not_say_that_they_are_views_are_not_overwritten(split: str) -> None:
    """The sum may not take the memory of h, which both pieces look at."""
    sample = torch.randn(64, 512)
    about = {"unsafe_split": (32,), "unsafe_chunk": (2,), "unsafe_split_with_sizes": ([32, 32],)}[split]
    with tfnb.record() as graph:
        x = tfnb.placeholder(sample, name="x", shape=(64, 512))
        h = x.sin()
        first, second = getattr(torch, split)(h, *about)
        z, product = (h + 1).exp(), first * second
    found = tfnb.Session(graph, compile="off").run([z, product], {x: sample})
    wanted = (sample.sin() + 1).exp(), sample.sin()[:32] * sample.sin()[32:]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
