"""Posts between tasks, without a cluster: every value arrives bitwise, no send waits, and no bytes do harm."""

from __future__ import annotations

import math
import selectors
import socket
import struct
import threading
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.alone.test_wire import DTYPES
from tfnb.cluster.wire import posting
from tfnb.cluster.wire.envelope import ALIGN, bytes_of
from tfnb.cluster.wire.lending import FREE, HELD, ServerLoans, TaskLoans
from tfnb.cluster.wire.posting import BUFFER, LEND, Post, PostReader, Receiver, Sender, written
from tfnb.cluster.wire.streams import StreamBroken
from tfnb.errors import InvalidArgument, ProtocolError, ResourceExhausted, UnsupportedDtype

HEAD = struct.Struct("<QqiBBBB")
DEAD, NONE, INT, BOOL, FLOAT, META, TENSOR, LENT, STRIDES = range(9)


def data(*post, loans=None):
    return b"".join(written(*post, loans))


def tensor(dtype, *shape):
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def is_same(one, other):
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and (one == other or (one != one and other != other))
    is_alike = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return is_alike and bytes_of(one, 0) == bytes_of(other, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 0), (1,), (5, 7), (300, 700)], ids=str)
def test_tensors_of_every_dtype_and_size_arrive_bitwise(dtype, shape):
    value = tensor(dtype, *shape)
    (post,) = PostReader().feed(data(1, 2, (3, 4), value, None))
    assert post[:3] == (1, 2, (3, 4)) and post.dead is None and post.nbytes == value.numel() * value.itemsize
    assert is_same(post.value, value) and (not value.numel() or post.value.data_ptr() % 16 == 0)
    (post,) = PostReader().feed(data(1, 2, (), value.to("meta"), None))
    assert is_same(post.value, value.to("meta")) and post.nbytes == 0


@pytest.mark.parametrize(
    "value", [0, -(1 << 63), (1 << 63) - 1, True, False, 1.5, math.inf, math.nan, -0.0, None], ids=str
)
def test_numbers_arrive_as_they_are(value):
    (post,) = PostReader().feed(data(-5, -2, (), value, None))
    assert is_same(post.value, value) and post[:3] == (-5, -2, ()) and str(post.value) == str(value)


def test_dead_values_and_tensors_that_are_views_or_need_a_gradient():
    (post,) = PostReader().feed(data(1, 2, (0,), None, (-3, 9)))
    assert post == Post(1, 2, (0,), None, (-3, 9))
    strided = tensor(torch.float32, 40, 500).t()[::2]
    (post,) = PostReader().feed(data(1, 2, (), strided.requires_grad_(), None))
    assert is_same(post.value, strided.detach()) and not post.value.requires_grad


def images(*sizes):
    return torch.randn(sizes).to(memory_format=torch.channels_last)


STRIDED = {
    "transposed": lambda: torch.randn(40, 500).t(),
    "small": lambda: torch.randn(2, 3).t(),
    "every third": lambda: torch.randn(30, 70)[:, ::3],
    "one row of many": lambda: torch.randn(8, 16, 5)[:, 3],
    "permuted": lambda: torch.randn(3, 4, 5, 6).permute(2, 0, 3, 1),
    "expanded": lambda: torch.randn(30, 1, 7).expand(2, 30, 9, 7),
    "one number": lambda: torch.randn(()).expand(6, 5),
    "images": lambda: images(2, 3, 5, 7),
    "images of one channel": lambda: images(2, 1, 5, 7),
    "one image": lambda: images(1, 3, 5, 7),
    "larger than a buffer": lambda: torch.randn(300, 700).t(),
    "lent": lambda: torch.randn(700, 900).t(),
    "lent, with gaps": lambda: torch.randn(900, 700)[:, 1::2],
    "bfloat16": lambda: torch.randn(30, 70).bfloat16().t(),
    "bool": lambda: (torch.randn(30, 70) > 0).t(),
    "conjugated": lambda: torch.randn(30, 70, dtype=torch.complex128).t().conj(),
    "negated": lambda: torch.randn(30, 70, dtype=torch.complex64).conj().imag.t(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_tensor_arrives_with_the_strides_that_it_has(name, pair):
    """Sums and products of other strides round otherwise."""
    torch.manual_seed(0)
    value, one = STRIDED[name](), pair(lends=True)
    one.sender.post(1, 2, (3,), value, None)
    one.sender.post(1, 3, (), 7, None)
    first, second = one.pump(2)
    strides = value.resolve_conj().resolve_neg().stride()
    assert is_same(first.value, value) and first.value.stride() == strides and second.value == 7
    for dim in range(value.dim()):
        found, expected = (x.sum(dim) for x in (first.value, value))
        assert is_same(found, expected)


@pytest.mark.parametrize(
    "value",
    [torch.randn(2000, 3000)[::100, ::100], torch.randn(40).unfold(0, 5, 2), torch.randn(3, 0, 2).permute(2, 1, 0)],
    ids=["gaps", "overlaps", "empty"],
)
def test_a_tensor_with_large_gaps_or_overlaps_arrives_contiguous(value):
    (post,) = PostReader().feed(data(1, 2, (), value, None))
    assert is_same(post.value, value) and post.value.is_contiguous()


@pytest.mark.parametrize(
    ("post", "kind", "named"),
    [
        ((1, 7, (), 1 << 63, None), InvalidArgument, "edge 7, tag"),
        ((1, 7, (1 << 63,), 1, None), InvalidArgument, "edge 7"),
        ((1, 1 << 31, (), 1, None), InvalidArgument, "cannot travel"),
        ((1, 7, (0,) * 65, 1, None), InvalidArgument, "limit 64"),
        ((1, 7, (), torch.zeros((1,) * 17), None), InvalidArgument, "limit 16"),
        ((1, 7, (), "text", None), InvalidArgument, "a str cannot travel"),
        ((1, 7, (), torch.zeros(3).to_sparse(), None), UnsupportedDtype, "sparse"),
    ],
    ids=["int", "tag", "edge", "tags", "dims", "str", "sparse"],
)
def test_what_cannot_travel_is_refused_by_name(post, kind, named):
    with pytest.raises(kind, match=named):
        written(*post)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(range(8)), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_pieces_of_any_messages_are_the_messages(kinds, source):
    values = [3, None, True, 2.5, tensor(torch.float32, 5), torch.empty(4, 2, device="meta"),
              tensor(torch.int8, BUFFER - 40 + source.randrange(50)), tensor(torch.int16, 2, BUFFER)]  # fmt: skip
    sent = [Post(9, edge, (0, edge), values[kind]) for edge, kind in enumerate(kinds)]
    whole = b"".join(data(*post[:5]) for post in sent)
    reader, found, at = PostReader(), [], 0
    while at < len(whole):
        count = min(source.choice([1, 7, 100, 5000, 1 << 20]), len(reader.room()), len(whole) - at)
        reader.room()[:count] = whole[at : at + count]
        found += reader.came(count)
        at += count
    assert reader.is_between and [post[:3] for post in found] == [post[:3] for post in sent]
    assert all(is_same(a.value, b.value) for a, b in zip(found, sent, strict=True))


def head(whole, kind, tags=0, code=0, dims=0, numbers=()):
    return HEAD.pack(whole, 1, 2, kind, tags, code, dims) + struct.pack(f"<{len(numbers)}q", *numbers)


F32 = posting._CODES[torch.float32]
BAD = {
    "kind": (head(0, 16), ProtocolError),
    "strides of no tensor": (head(0, STRIDES | NONE), ProtocolError),
    "strides of sizes alone": (head(16, STRIDES | META, code=F32, dims=1, numbers=[2, 1]), ProtocolError),
    "strides of a number": (head(4, STRIDES | TENSOR, code=F32) + bytes(4), ProtocolError),
    "negative strides": (head(16 + 8, STRIDES | TENSOR, code=F32, dims=1, numbers=[2, -1]), ProtocolError),
    "strides that overlap": (head(32 + 16, STRIDES | TENSOR, code=F32, dims=2, numbers=[2, 2, 1, 1]), ProtocolError),
    "strides beyond the budget": (
        head(16 + 8, STRIDES | TENSOR, code=F32, dims=1, numbers=[2, 1 << 50]),
        ResourceExhausted,
    ),
    "dtype": (head(8, TENSOR, code=200), ProtocolError),
    "tags": (head(8 * 65, NONE, tags=65), ProtocolError),
    "dims": (head(8 * 17, TENSOR, code=F32, dims=17), ProtocolError),
    "dims of an int": (head(16, INT, dims=1), ProtocolError),
    "int too long": (head(16, INT), ProtocolError),
    "dead too short": (head(8, DEAD), ProtocolError),
    "shorter than its sizes": (head(4, TENSOR, code=F32, dims=1), ProtocolError),
    "sizes differ": (head(8 + 8, TENSOR, code=F32, dims=1, numbers=[3]), ProtocolError),
    "negative": (head(8 + 4, TENSOR, code=F32, dims=1, numbers=[-1]), ProtocolError),
    "overflow": (head(16, TENSOR, code=F32, dims=2, numbers=[1 << 40, 1 << 40]), ProtocolError),
    "meta overflow": (head(16, META, code=F32, dims=2, numbers=[1 << 40, 1 << 40]), ProtocolError),
    "budget": (head(8 + (1 << 50), TENSOR, code=F32, dims=1, numbers=[1 << 48]), ResourceExhausted),
    "length": (head((1 << 64) - 1, TENSOR, code=F32, dims=1), ResourceExhausted),
    "lent to nobody": (head(8 + 80, LENT, code=F32, dims=1, numbers=[2]) + bytes(80), ProtocolError),
    "lent beyond the budget": (head(8 + 80, LENT, code=F32, dims=1, numbers=[1 << 50]) + bytes(80), ResourceExhausted),
}


@pytest.mark.parametrize(("sent", "kind"), BAD.values(), ids=BAD)
def test_headers_that_lie_are_an_error_and_take_no_memory(sent, kind):
    reader = PostReader()
    tracemalloc.start()
    try:
        with pytest.raises(kind):
            reader.feed(sent)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=400)
@given(st.randoms(use_true_random=True))
def test_mutated_bytes_are_posts_or_an_error_of_the_wire(source):
    loans = TaskLoans()
    values = [
        5,
        True,
        1.5,
        None,
        tensor(torch.float16, 3, 4),
        torch.empty(2, device="meta"),
        tensor(torch.int8, LEND + 1),
        tensor(torch.int16, 3, 4, 5).permute(2, 0, 1),
        tensor(torch.int32, 9, 4)[:, ::2],
    ]
    whole = b"".join(data(1, edge, (edge,), value, None, loans=loans) for edge, value in enumerate(values))
    changed = bytearray(whole + data(1, 9, (), None, (1, 2)))
    for _ in range(source.randint(1, 6)):
        changed[source.randrange(len(changed))] ^= source.randrange(1, 256)
    server = ServerLoans(loans.name)
    try:
        found = PostReader(1 << 20, server.borrowing).feed(changed)
    except (ProtocolError, ResourceExhausted, OSError):
        return
    assert all(type(post) is Post and len(post.tag) <= 64 for post in found)


@pytest.mark.parametrize("start", [-ALIGN, -(1 << 63), 1 << 40, 1, (1 << 63) - ALIGN])
def test_a_loan_outside_of_its_memory_is_refused(start):
    loans = TaskLoans()
    message = bytearray(data(1, 0, (), tensor(torch.int8, LEND + 1), None, loans=loans))
    struct.pack_into("<q", message, len(message) - 16, start)  # a loan ends with its first byte and its word
    with pytest.raises(ProtocolError, match="are lent"):
        PostReader(1 << 20, ServerLoans(loans.name).borrowing).feed(message)


# -- connections ------------------------------------------------------------------------------------------------------


class Pair:
    """Both ends of a connection, and what came."""

    def __init__(self, *, lends=False):
        here, there = socket.socketpair()
        self.lost, self.posts = [], []
        self.loans = TaskLoans(4) if lends else None
        self.sender = Sender(self.lost.append)
        there.setblocking(False)
        borrows = ServerLoans(self.loans.name) if self.loans is not None else None
        self.receiver = Receiver(there, borrows, self.posts.extend, self.lost.append)
        self.here = here

    def open(self):
        self.sender.connect(self.here, self.loans)
        return self

    def pump(self, count):
        """As the thread that hosts both ends, until so many posts came."""
        for _ in range(100_000):
            if len(self.posts) >= count:
                return self.posts
            if self.sender.events() & selectors.EVENT_WRITE:
                self.sender.ready(selectors.EVENT_WRITE)
            self.receiver.ready(selectors.EVENT_READ)
        raise AssertionError(f"{len(self.posts)} of {count} posts")

    def close(self):
        self.sender.over(StreamBroken("closed")), self.receiver.over(StreamBroken("closed"))
        self.here.close()


@pytest.fixture
def pair():
    made = []

    def make(**options):
        made.append(Pair(**options))
        return made[-1].open()

    yield make
    for one in made:
        one.close()


def test_a_send_does_not_wait_and_the_value_is_as_it_was(pair):
    one = pair()
    value = torch.arange(3_000_000, dtype=torch.float32)
    expected = value.clone()
    assert one.sender.post(1, 2, (), value, None), "the socket does not take it whole, and nobody reads"
    value.zero_()  # as an update in place does, right after
    one.sender.post(1, 3, (), 7, None)
    large, small = one.pump(2)
    assert torch.equal(large.value, expected) and small.value == 7
    assert one.sender.events() == selectors.EVENT_READ, "nothing is kept"


def test_what_is_sent_before_the_connection_is_there_comes_later_or_by_another_way():
    for by_socket in (True, False):
        one = Pair()
        for edge in range(5):
            assert one.sender.post(1, edge, (), torch.full((9,), edge), None)
        if by_socket:
            one.open()
            posts = one.pump(5)
        else:
            reader, posts = PostReader(), []
            while taken := one.sender.take(100):
                posts += reader.feed(taken)
                assert reader.is_between, "whole messages"
        assert [post.value.tolist() for post in posts] == [[edge] * 9 for edge in range(5)]
        one.close()


def test_large_tensors_are_lent_and_their_memory_is_free_when_nobody_holds_them(pair):
    one = pair(lends=True)
    values = [tensor(torch.float32, LEND // 4 + 1 + turn) for turn in range(6)]
    for edge, value in enumerate(values):
        one.sender.post(1, edge, (), value, None)
    posts = one.pump(6)
    assert all(
        torch.equal(post.value.view(torch.int32), v.view(torch.int32)) for post, v in zip(posts, values, strict=True)
    )
    assert [region.word for region in one.loans._regions] == [HELD] * 4, "the others found no place, and were sent"
    assert not one.sender.has_let_go
    del posts[:]
    assert [region.word for region in one.loans._regions] == [FREE] * 4 and one.sender.has_let_go


def test_an_end_that_closes_is_noticed_by_the_other(pair):
    one = pair()
    one.receiver.over(StreamBroken("closed"))
    with pytest.raises(StreamBroken):
        one.sender.ready(selectors.EVENT_READ)
    assert one.sender.post(1, 2, (), tensor(torch.int8, 100_000), None) in (True, False), "it raises nothing by itself"
    with pytest.raises(OSError):
        for _ in range(10):
            one.sender.post(1, 2, (), 5, None)
            one.sender.events()
    one.sender.over(StreamBroken("closed"))
    with pytest.raises(StreamBroken):
        one.sender.post(1, 2, (), 5, None)
    other = pair()
    other.sender.over(StreamBroken("closed"))
    with pytest.raises(StreamBroken):
        other.receiver.ready(selectors.EVENT_READ)
    assert len(one.lost) == 2 and len(other.lost) == 1


def test_a_receiver_that_is_paused_reads_nothing(pair):
    one = pair()
    one.receiver.is_paused = True
    one.sender.post(1, 2, (), 5, None)
    one.receiver.ready(selectors.EVENT_READ)
    assert one.receiver.events() == 0 and one.posts == []
    one.receiver.is_paused = False
    assert one.pump(1)[0].value == 5


def test_threads_that_send_at_a_time_do_not_tear_each_others_messages(pair):
    one = pair()

    def send(edge):
        for turn in range(200):
            one.sender.post(1, edge, (turn,), torch.full((5000,), edge * 1000 + turn), None)

    threads = [threading.Thread(target=send, args=(edge,)) for edge in range(3)]
    for thread in threads:
        thread.start()
    posts = one.pump(600)
    for thread in threads:
        thread.join()
    assert {(post.edge, *post.tag) for post in posts} == {(edge, turn) for edge in range(3) for turn in range(200)}
    assert all(bool((post.value == post.edge * 1000 + post.tag[0]).all()) for post in posts)
