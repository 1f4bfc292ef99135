"""Shape rules by example: what they tell, and what they leave to the rule on symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.recording.shapes import shape_examples
from tfnb.recording.shapes.shape_examples import Fresh, ask
from tfnb.recording.shapes.symbols import Symbols

aten = torch.ops.aten


def asked(op: Any, *shapes: tuple[Any, ...], **kwargs: Any) -> Any:
    """What the examples tell of ``op`` on tensors of these shapes; letters vary, their samples are 4 long."""
    symbols = Symbols()
    sizes = {letter: symbols.fresh(letter, 4) for shape in shapes for letter in shape if isinstance(letter, str)}
    with symbols.fake_mode:
        fakes = [torch.empty([sizes.get(s, s) for s in shape]) for shape in shapes]
    found = ask(fakes, kwargs, op)
    return found and tuple(symbols.size(s) for s in found.shape) if isinstance(found, Fresh) else found


def test_sizes_are_those_of_arguments_or_the_same_in_both() -> None:
    assert [str(s) for s in asked(aten.mm.default, ("B", 5), (5, "T"))] == ["B", "T"]
    assert asked(aten.mm.default, (3, "B"), ("B", 5)) == (3, 5)
    found = asked(F.conv2d, ("B", 3, 9, 9), (4, 3, 3, 3))
    assert [str(s) for s in found] == ["B", "4", "7", "7"]


@pytest.mark.parametrize("told", [
    lambda: asked(lambda a, b: torch.cat([a, b]), ("B", 5), ("B", 5)),  # 2*B
    lambda: asked(lambda a: a[:7], ("B", 5)),  # at most 7
    lambda: asked(aten.diagonal_copy.default, ("B", 3)),  # at most 3, and 3 for the sample
    lambda: asked(aten.diagonal_copy.default, ("B", "T")),  # the lesser one
    lambda: asked(lambda a: a.new_empty(torch.sym_max(a.shape[0], 4)), ("B",)),  # at least 4
    lambda: asked(aten.add.Tensor, ("B", 5), (4, 5)),  # right for the sample only
    lambda: asked(aten.add.Tensor, ("B", 5), ("T", 5)),  # right where they are equal
    lambda: asked(aten.mm.default, (3, 5), (5, 4)),  # nothing varies
    lambda: asked(aten.mm.default, ("B", 5), (6, 4)),  # wrong
    lambda: asked(lambda a: torch.empty_like(a).t(), ("B", 5)),  # not contiguous
], ids=["sum", "least", "rows", "two", "most", "sample", "equal", "plain", "wrong", "strides"])  # fmt: skip
def test_what_the_examples_do_not_tell(told: Callable[[], Any]) -> None:
    assert told() is None


def test_sizes_that_an_op_makes_equal_are_heard() -> None:
    with pytest.warns(UserWarning, match="B became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 5))
        y = x + torch.ones(4, 5)
    assert y.spec.shape == (4, 5)


def test_wrong_channels_of_a_batch_norm_fail_in_a_lazy_recording() -> None:
    with pytest.raises(Exception, match="length 7"), tfnb.record(lazy=True):
        F.batch_norm(tfnb.placeholder(torch.randn(4, 5, 6)), torch.ones(7), torch.ones(7), training=True)


def test_a_recording_again_asks_no_rule_anew() -> None:
    def step() -> None:
        with tfnb.record():
            x, y = (tfnb.placeholder(torch.ones(7, 91)) for _ in range(2))
            tfnb.gradients(((x @ torch.ones(91, 3)).relu() - y[:, :3]).square().sum(), [x])

    step()
    before = shape_examples._told.cache_info()
    step()
    after = shape_examples._told.cache_info()
    assert (after.misses, after.hits > before.hits) == (before.misses, True)
