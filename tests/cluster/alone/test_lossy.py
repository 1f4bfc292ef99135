"""Numbers of 16 bits on a connection: how far they are from what was sent, and what stays."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.wire.lossy import AS_THEY_ARE, FORMATS, LossyPeers, LossyTransfers, narrowed
from tfnb.errors import InvalidArgument, NonFinite
from tfnb.execution.dataflow.executor import Here

ERRORS = {"bfloat16": 2**-8, "bfloat16_truncated": 2**-7, "float16": 2**-11}


def test_numbers_of_the_contract():
    found = {name: narrowed(torch.tensor([math.pi, 1 / 3]), name, "it").float().tolist() for name in FORMATS}
    assert found["bfloat16_truncated"] == [3.140625, 0.33203125]
    assert found["bfloat16"] == [3.140625, 0.333984375]
    assert found["float16"] == [3.140625, 0.333251953125]


@pytest.mark.parametrize("format", FORMATS)
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
    found = narrowed(sent, format, "it").float()
    assert found.isinf().tolist() == [True, True, False, False, False] and found[2].isnan()
    assert found.signbit().tolist()[3:] == [False, True] and found[:2].tolist() == [math.inf, -math.inf]
    assert narrowed(lowest, format, "it").isnan().all(), "a NaN whose upper bits are those of infinity"


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
        ({"edges": "int8"}, "the formats are 'bfloat16'"),
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
