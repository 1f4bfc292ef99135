"""Numbers of 16 and 8 bits on a connection: how far they are from what was sent, and what stays."""

from __future__ import annotations

import math
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.wire.lossy import AS_THEY_ARE, FORMATS, LEVELS, LossyPeers, LossyTransfers, narrowed
from tfnb.errors import InvalidArgument, NonFinite, ShapeError
from tfnb.execution.dataflow.executor import Here

ERRORS = {"bfloat16": 2**-8, "bfloat16_truncated": 2**-7, "float16": 2**-11}


def received(sent: torch.Tensor, format: str) -> torch.Tensor:
    """A tensor as its receiver has it."""
    return FORMATS[format].widen(narrowed(sent, format, "it"), sent.dtype)


def test_numbers_of_the_contract():
    found = {name: received(torch.tensor([math.pi, 1 / 3]), name).tolist() for name in ERRORS}
    assert found["bfloat16_truncated"] == [3.140625, 0.33203125]
    assert found["bfloat16"] == [3.140625, 0.333984375]
    assert found["float16"] == [3.140625, 0.333251953125]


@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(number=st.floats(6.2e-5, 6.5e4), sign=st.sampled_from([-1.0, 1.0]))
def test_relative_errors(format, dtype, number, sign):
    sent = torch.tensor([sign * number], dtype=dtype)
    found = narrowed(sent, format, "it")
    assert found.element_size() == 2
    assert abs(found.double() - sent.double()).item() <= ERRORS[format] * number


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays(format):
    lowest = torch.tensor([struct.unpack("f", struct.pack("I", bits))[0] for bits in (0x7F800001, 0xFF800001)])
    sent = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    found = received(sent, format)
    assert found.isinf().tolist() == [True, True, False, False, False] and found[2].isnan()
    assert found.tolist()[3:] == [0, 0] and found[:2].tolist() == [math.inf, -math.inf]
    assert found.signbit().tolist()[3:] == [False, format in ERRORS]
    assert received(lowest, format).isnan().all(), "a NaN whose upper bits are those of infinity"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=9), extent=st.sampled_from([1, 2, 3]))
def test_the_error_of_a_number_of_8_bits_is_half_a_step_of_its_tensor(dtype, numbers, extent):
    sent = torch.tensor(numbers * extent, dtype=dtype).reshape(extent, -1).t()
    packed, found = narrowed(sent, "int8", "it"), received(sent, "int8")
    assert packed.numel() == sent.numel() + 9 + 8 * 2 and packed.dtype is torch.int8
    assert found.shape == sent.shape and found.dtype is dtype
    step = sent.abs().max().item() / LEVELS if numbers else 0.0
    assert (found.double() - sent.double()).abs().le(step * 0.50001 + 1e-44).all()


@pytest.mark.parametrize("sizes", [(), (0,), (2, 0, 3), (1, 1, 1, 1)])
def test_sizes_of_all_kinds_arrive_in_8_bits(sizes):
    sent = torch.ones(sizes)
    assert torch.equal(received(sent, "int8"), sent)
    beside = torch.full((*sizes, 2), math.inf)
    beside[..., 1:] = 63.0
    assert torch.equal(received(beside, "int8"), beside), "an infinity widens no step"


@given(bytes=st.binary(max_size=40))
def test_bytes_that_nobody_packed_are_an_error_or_a_tensor(bytes):
    packed = torch.tensor(list(bytes), dtype=torch.uint8).view(torch.int8)
    with suppress(ShapeError):
        FORMATS["int8"].widen(packed, torch.float32)
    with pytest.raises(ShapeError, match="no tensor that was packed"):
        FORMATS["int8"].widen(torch.ones(3, 3, dtype=torch.int8), torch.float32)


@pytest.mark.parametrize(("format", "number"), [("float16", 7e4), ("bfloat16", 3.4e38), ("bfloat16_truncated", 1e39)])
def test_a_number_beyond_the_range_is_an_error_and_never_infinity(format, number):
    with pytest.raises(NonFinite, match=rf"a gradient holds .*{format} cannot hold.*lossy= of connect") as caught:
        narrowed(torch.tensor([1.0, -number], dtype=torch.float64), format, "a gradient")
    assert ("'bfloat16' has the range" in str(caught.value)) == (format == "float16")
    with pytest.raises(NonFinite, match=rf"a gradient holds {number:.4g}".replace("+", r"\+")):
        narrowed(torch.tensor([-math.inf, math.nan, number], dtype=torch.float64), format, "a gradient")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"weights": "bfloat16"}, "the classes are 'gradients', 'edges'"),
        ({"edges": "int4"}, "the formats are 'bfloat16'"),
        ({"edges": torch.float32}, "torch.float32"),
        ("bfloat16", "is no mapping of 'gradients' or 'edges'"),
        ({1: "bfloat16"}, "the classes are"),
    ],
)
def test_choices_that_there_are_not(asked, told):
    with pytest.raises(InvalidArgument, match=told):
        LossyTransfers.of(asked)


def test_a_choice_by_dtype_or_by_name():
    asked = {"gradients": torch.float16, "edges": "bfloat16_truncated"}
    assert str(LossyTransfers.of(asked)) == "gradients as float16, edges as bfloat16_truncated"
    assert LossyTransfers.of({}) == LossyTransfers.of(None) == AS_THEY_ARE


def test_only_the_edges_with_a_dtype_are_narrowed_and_the_receiver_has_the_dtype_of_the_graph():
    peers, got = LossyPeers(Here(), "bfloat16", {1: torch.float64}), []
    for edge, value in ((1, torch.tensor(1 / 3, dtype=torch.float64)), (2, torch.tensor(1 / 3)), (3, 7)):
        peers.tell(edge, 0, (), value, None)
        peers.want(edge, (), lambda value, dead: got.append((value, dead)))
    peers.tell(1, 0, (1,), None, (4, 0))
    peers.want(1, (1,), lambda value, dead: got.append((value, dead)))
    assert got[0][0].dtype is torch.float64 and got[0][0].item() == 0.333984375
    assert got[1][0].item() == torch.tensor(1 / 3).item() and got[2:] == [(7, None), (None, (4, 0))]
