"""The envelope: every dtype round-trips bitwise, and no bytes cost more than an error."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.cluster.wire import envelope
from tfnb.errors import InvalidArgument, ProtocolError, ResourceExhausted, UnsupportedDtype

DTYPES = list(envelope._TAGS.values())
SHAPES = {"0-d": (), "empty": (3, 0), "one": (1,), "small": (5, 7), "64KB": (64 << 10,), "1MB": (1024, 1024)}


def sent(header, tensors):
    """Through the wire as Dask delivers it: a fresh writable buffer for each frame."""
    message = envelope.encode(header, tensors)
    return envelope.decode([memoryview(bytearray(frame)) for frame in message])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and _raw(a) == _raw(b)


def _raw(t):
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) if t.numel() else b""


def filled(shape, dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_c5_every_dtype_round_trips_bitwise(dtype, shape):
    if dtype.itemsize * max(1, torch.Size(shape).numel()) > 4 << 20:
        shape = (256, 1024)
    tensor = filled(shape, dtype)
    header, (got,) = sent({"method": "push"}, [tensor])
    assert same(got, tensor)
    assert header["method"] == "push"


def test_c5_strided_conjugate_and_negative_views_round_trip():
    base = torch.randn(6, 8, dtype=torch.complex64)
    views = [base.T, base[::2, 1::3], base.conj(), base.conj().imag, base.expand(2, 6, 8)]
    _, got = sent({}, views)
    assert all(torch.equal(g, v) for g, v in zip(got, views, strict=True))


def test_c8_received_tensors_are_writable_private_and_aligned():
    tensor = torch.randn(100_000)
    small = torch.randn(3)
    _, got = sent({}, [tensor, small, tensor])
    before = tensor.clone()
    for g in got:
        assert g.data_ptr() % g.element_size() == 0
        g.add_(1)
    assert torch.equal(tensor, before)
    assert torch.equal(got[0], got[2])


def test_read_only_frames_are_copied():
    message = envelope.encode({}, [torch.zeros(100_000)])
    _, (got,) = envelope.decode([bytes(frame) for frame in message])
    assert got.add_(1).sum() == 100_000


def test_sending_a_contiguous_tensor_does_not_copy_it():
    tensor = torch.randn(100_000)
    frame = envelope.encode({}, [tensor])[1]
    tensor[0] = 42.0
    assert struct.unpack("<f", frame[:4]) == (42.0,)


def test_meta_tensors_travel_as_shapes_and_grads_stay():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    _, (meta, got) = sent({}, [torch.empty(1 << 40, device="meta"), parameter])
    assert meta.shape == (1 << 40,) and meta.device.type == "meta"
    assert not got.requires_grad and got.grad is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.ones(2).to_mkldnn() if torch.backends.mkldnn.is_available() else torch.eye(3).to_sparse_csr(),
        torch.ones(2).as_subclass(type("Special", (torch.Tensor,), {})),
    ],
    ids=["sparse", "opaque", "subclass"],
)
def test_c25_other_kinds_are_unsupported_before_anything_is_sent(tensor):
    with pytest.raises(UnsupportedDtype, match="supported"):
        envelope.encode({}, [tensor])


def test_header_takes_json_only():
    for bad in ({"x": object()}, {"x": float("nan")}, {"x": torch.ones(1)}):
        with pytest.raises(InvalidArgument, match="JSON"):
            envelope.encode(bad)


def test_caps_name_asked_used_and_limit():
    with pytest.raises(ResourceExhausted, match=r"asked 400.*limit 100"):
        envelope.encode({}, [torch.zeros(100)], budget=100)
    with pytest.raises(ResourceExhausted, match="limit"):
        envelope.encode({"x": "y" * (2 << 20)})
    message = envelope.encode({}, [torch.zeros(100)])
    with pytest.raises(ResourceExhausted, match="asked 400"):
        envelope.decode(message, budget=100)


def test_the_numbers_of_a_message_have_a_cap_at_both_ends():
    whole = {"seq": 1, "meta": {"step": 2, "since": list(range(envelope.NUMBERS_CAP - 2))}}
    assert sent(whole, []) == (whole, [])
    for over in {**whole, "term": 3}, {"many": list(range(1_100_000))}:
        with pytest.raises(ResourceExhausted, match=f"numbers in a message: asked .*limit {envelope.NUMBERS_CAP}"):
            envelope.encode(over)
    half = envelope.NUMBERS_CAP // 2 + 1
    crafted = [in_envelope(numbers([False, "a", half], [False, "a", half]), bytes(16 * half))]
    with pytest.raises(ResourceExhausted, match=f"numbers in a message: asked {2 * half}, used 0"):
        envelope.decode(crafted)


def in_envelope(header, tail=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = envelope.MAGIC + struct.pack("<I", len(text)) + text
    return bytearray(head + bytes(-len(head) % envelope.ALIGN) + tail)


def entry(**changes):
    tensors = [{"dt": "f32", "shape": [2], "nbytes": 8, "lane": "i", "ref": 0} | changes]
    return {"v": envelope.VERSION, "numbers": [], "tensors": tensors}


def numbers(*names, **more):
    return {"v": envelope.VERSION, "numbers": names, "tensors": [], **more}


BAD = {
    "huge shape": entry(shape=[1 << 40, 1 << 40], nbytes=1 << 82),
    "huge shape, small bytes": entry(shape=[1 << 40, 1 << 40]),
    "huge meta": entry(shape=[1 << 61, 1 << 40], lane="m"),
    "huge beside nothing": entry(shape=[0, 1 << 61, 1 << 61], nbytes=0),
    "huge meta beside nothing": entry(shape=[1 << 61, 1 << 61, 0], lane="m", nbytes=0),
    "negative": entry(shape=[-2]),
    "bool size": entry(shape=[True, 2]),
    "float size": entry(shape=[2.0]),
    "dims": entry(shape=[1] * 65 + [2]),
    "offset": entry(ref=1 << 30),
    "lane": entry(lane="s"),
    "dtype": entry(dt="object"),
    "frame": entry(lane="d"),
    "not an object": numbers(tensors=[3]),
    "not a list": numbers(tensors={}),
    "no tensors": {"v": envelope.VERSION, "numbers": []},
    "no numbers": {"v": envelope.VERSION, "tensors": []},
    "more numbers": numbers([True, "step", 200], meta={}),
    "many numbers": numbers([True, "step", 1 << 60], meta={}),
    "numbers without a name": numbers([True, 3, 2], meta={}),
    "numbers that are no list": numbers(3),
    "numbers of no meta": numbers([True, "step", 0]),
    "numbers in place of meta": numbers([False, "meta", 0], [True, "step", 0], meta={}),
    "meta that is a number": numbers([False, "x", 0], meta=5),
    "meta that is text": numbers([False, "x", 0], meta="ab"),
    "meta that is pairs": numbers([False, "x", 0], meta=[["a", 1]]),
    "meta that is null": numbers(meta=None),
    "version": {"v": 1, "numbers": [], "tensors": []},
    "not a header": [],
    "nan": b'{"v":1,"tensors":[],"x":NaN}',
    "duplicate key": b'{"v":1,"v":1,"tensors":[]}',
    "deep": b"[" * 100_000,
    "utf8": b"\xff\xfe",
    "digits": b'{"v":' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("header", BAD.values(), ids=BAD)
def test_malformed_headers_are_protocol_errors(header):
    with pytest.raises(ProtocolError):
        envelope.decode([in_envelope(header, bytes(8))])


@pytest.mark.parametrize("ref", [["x"], ["x", 0, 0], 7, None], ids=str)
def test_a_lent_tensor_lies_in_a_segment_at_an_offset(ref):
    message = [in_envelope(entry(lane="s", ref=ref), bytes(64))]
    with pytest.raises(ProtocolError, match="in no place"):
        envelope.decode(message, borrow=lambda loan, nbytes: torch.zeros(nbytes, dtype=torch.uint8))


def test_small_tensors_that_overlap_do_not_multiply():
    """A header of some kilobytes that names the same bytes a thousand times would take gigabytes."""
    small = {"dt": "u8", "shape": [envelope.INLINE], "nbytes": envelope.INLINE, "lane": "i"}
    for places in ([0] * 1000, [0, envelope.INLINE - envelope.ALIGN], [envelope.INLINE, 0], [envelope.ALIGN]):
        header = numbers(tensors=[{**small, "ref": place} for place in places])
        with pytest.raises(ProtocolError, match="small tensors do not follow each other"):
            envelope.decode([in_envelope(header, bytes(3 * envelope.INLINE))])


def test_small_tensors_beyond_the_cap_of_an_envelope_have_frames():
    sent = [torch.full((envelope.INLINE // 4,), float(i)) for i in range(1030)]
    first, *frames = message = envelope.encode({"meta": {}}, [torch.ones(3), *sent])
    assert memoryview(first).nbytes <= envelope.FACTS_CAP and len(frames) == 7
    _, (ones, *got) = envelope.decode(message)
    assert torch.equal(ones, torch.ones(3)) and all(map(torch.equal, got, sent))
    with pytest.raises(ResourceExhausted, match="bytes of an envelope"):
        envelope.decode([bytearray(envelope.FACTS_CAP + 1)])


def test_frames_are_named_once_each():
    one = in_envelope(numbers(tensors=[entry(lane="d")["tensors"][0]] * 2))
    with pytest.raises(ProtocolError, match="frames"):
        envelope.decode([one, bytearray(8)])
    with pytest.raises(ProtocolError, match="frames"):
        envelope.decode([in_envelope(numbers()), bytearray(8)])
    with pytest.raises(ProtocolError):
        envelope.decode([])


def test_a_text_is_read_once_and_its_numbers_each_time():
    envelope._known.clear(), envelope._texts.clear()
    for step in range(3):
        header = {
            "method": "push",
            "seq": step,
            "meta": {"step": step, "since": [step, -1], "reads": ["v", "w"], "a": True},
        }
        got, (tensor,) = sent(header, [torch.full((2,), float(step))])
        assert got == header and tensor.tolist() == [step, step]
        got["meta"]["since"].append(3)  # what a reader does to it is its own
        got["meta"]["more"] = got["more"] = 1
    assert len(envelope._known) == len(envelope._texts) == 1
    sent({**header, "meta": {**header["meta"], "a": False}}, [torch.ones(2)]), sent(header, [torch.ones(3)])
    assert len(envelope._known) == len(envelope._texts) == 3


def test_texts_that_are_remembered_have_a_limit():
    for place in range(3 * envelope.KEPT):
        sent({"method": f"{place}", "seq": 1}, [])
        sent({"method": "x" * envelope.KEPT_CAP, "seq": 1}, [])
    assert len(envelope._known) <= envelope.KEPT and len(envelope._texts) <= envelope.KEPT
    assert max(map(len, envelope._known)) <= envelope.KEPT_CAP


@pytest.mark.slow
def test_what_is_kept_of_texts_has_a_limit_in_bytes():
    envelope._known.clear()
    tracemalloc.start()
    for turn in range(envelope.KEPT):
        crafted = {f"{turn:03}": [[]] * 15_900} if turn % 2 else {f"{turn:03}": [{}] * 15_900}
        text = json.dumps({**numbers([False, "x", 0]), **crafted}, separators=(",", ":"))
        envelope.decode([in_envelope(text.encode(), bytes(8))])
        assert 3 * len(text) > 2 * envelope.KEPT_CAP and sum(map(len, envelope._known)) <= envelope.KEPT_BYTES
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    envelope._known.clear()
    assert 2 << 20 < kept < 40 << 20


def test_truncation_at_every_byte_is_a_protocol_error():
    message = envelope.encode({"method": "push"}, [torch.arange(9.0)])
    for cut in range(len(message[0]) - 28):
        with pytest.raises(ProtocolError):
            envelope.decode([message[0][:cut]])


def test_c7_random_bytes_cost_an_error_and_no_memory():
    source = random.Random(1)
    good = bytes(envelope.encode({"method": "push", "meta": {"a": [1, 2]}}, [torch.arange(9.0), torch.ones(2, 3)])[0])
    tracemalloc.start()
    refused = 0
    for turn in range(3_000):
        data = bytearray(good)
        if turn % 4 == 0:
            data = bytearray(source.randbytes(source.randrange(200)))
        else:
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.randrange(256)
        frames = [data] + [bytearray(source.randbytes(8))] * (turn % 3 == 0)
        try:
            envelope.decode(frames)
        except (ProtocolError, ResourceExhausted):
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 1500
    assert peak < 2 << 20


@pytest.mark.parametrize("meta", [5, "ab", None, [1, 2], [["a", 1]]], ids=str)
def test_meta_is_a_dict_where_it_is_sent_too(meta):
    with pytest.raises(InvalidArgument, match="meta"):
        envelope.encode({"meta": meta, "seq": 1})


VALUES = [
    None, True, 0.5, -1, 0, 3, 9, 1 << 31, 1 << 61, 1 << 62, 1 << 64, "", "x", "ab", "meta", "i", "m", "s", "\ud800",
    [], [3], [9], [["a", 1]], [0, 1 << 61, 1 << 61], [1 << 61, 1 << 62, 0], [0, 1 << 40], {}, {"a": 1}, [False, "x", 0],
]  # fmt: skip
VALID = [
    envelope.encode(header, [torch.arange(9.0), torch.ones(0, 3), torch.ones(2, device="meta"), torch.ones(5, 5000)])
    for header in (
        {"method": "push", "seq": 7, "meta": {"step": 3, "since": [1, -2], "reads": ["v"], "last": True}},
        {"method": "x", "seq": 7, "meta": {"parts": [[1]], "of": {"a": None}}},
        {"method": "y", "seq": 7, "meta": {"last": True}},
        {},
    )
]


def change(source, value):
    """Another JSON value at some place in a list or dict."""
    key = source.choice([*value] if isinstance(value, dict) else range(len(value)))
    if isinstance(value[key], dict | list) and value[key] and source.random() < 0.75:
        change(source, value[key])
    else:
        value[key] = copy.deepcopy(source.choice(VALUES))


@settings(max_examples=400)
@given(st.randoms(use_true_random=True))
def test_mutated_messages_decode_or_cost_an_error_of_the_wire(source):
    first, *frames = source.choice(VALID)
    changed = bytearray(first)
    if source.random() < 0.75:
        header = json.loads(first[8 : 8 + struct.unpack_from("<I", first, 4)[0]])
        for _ in range(source.randint(1, 3)):
            change(source, header)
        changed = in_envelope(header, bytes(1 << 10))
    else:
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(len(changed))] ^= source.randrange(1, 256)
    with contextlib.suppress(ProtocolError, ResourceExhausted):
        message = [changed, *map(bytearray, frames)]
        envelope.decode(message, borrow=lambda loan, size: torch.zeros(size, dtype=torch.uint8))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), max_size=6),
    st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.none() | st.booleans(), st.lists)),
)
def test_any_message_round_trips(tensors, meta):
    made = [filled(tuple(shape), dtype) for dtype, shape in tensors]
    header, got = sent({"meta": meta}, made)
    assert header["meta"] == meta
    assert all(same(a, b) for a, b in zip(made, got, strict=True))
