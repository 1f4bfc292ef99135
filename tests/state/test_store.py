"""The store: readers see one generation, the budget holds, errors change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import tfnb.state.store as store_module
from tfnb.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, ShapeError, TfnbError
from tfnb.state.store import ALIGN, GENERATIONS, Store


@pytest.fixture
def store() -> Store:
    store = Store(budget=40)
    store.create({"w": torch.ones(4)})
    return store


def write(store: Store, value: float, key: str = "w") -> None:
    """As a program does: in place, into what was opened."""
    store.open([key])[key].fill_(value)
    store.publish()


def test_create_copies(store: Store) -> None:
    value = torch.zeros(2)
    store.create({"b": value})
    value += 1
    assert store.get("b").tolist() == [0, 0]


def test_create_makes_read_only_and_strided_tensors_its_own(store: Store) -> None:
    store.create({"b": torch.ones(1).expand(3)})
    store.assign({"b": torch.tensor([1.0, 2.0, 3.0])})
    assert store.get("b").tolist() == [1, 2, 3]


def test_values_created_together_lie_in_one_aligned_buffer_for_each_dtype() -> None:
    store = Store()
    store.create({"a": torch.ones(3), "n": torch.arange(5), "b": torch.ones((2, 2)), "e": torch.ones(0, 3)})
    assert store.get("a").untyped_storage().data_ptr() == store.get("b").untyped_storage().data_ptr()
    assert store.get("a").untyped_storage().data_ptr() != store.get("n").untyped_storage().data_ptr()
    assert all(store.get(key).data_ptr() % ALIGN == 0 for key in "anb") and store.get("e").shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex128])
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    value = torch.randn(6).mul(3).to(dtype).view(2, 3)
    store = Store()
    store.create({"v": value, "scalar": value[0, 0]})
    for seen in (store.get("v"), store.read(["v"])[0]):
        assert seen.dtype is dtype and torch.equal(seen.view(torch.uint8), value.contiguous().view(torch.uint8))
    assert store.read(["scalar"])[0].shape == ()


def test_without_a_reader_a_write_stays_in_its_place(store: Store) -> None:
    at = store.read(["w"])[0].data_ptr()
    write(store, 2)
    assert store.get("w").data_ptr() == at and store.spare_bytes == 0


def test_a_reader_keeps_its_generation_and_a_view_is_enough(store: Store) -> None:
    view = memoryview(store.read(["w"])[0].view(torch.uint8).numpy())
    for value in range(5):
        write(store, value)
    assert torch.frombuffer(view, dtype=torch.float32).tolist() == [1] * 4
    assert store.get("w").tolist() == [4] * 4 and store.spare_bytes > 0
    view.release()
    del view
    store.release()
    assert store.spare_bytes == 0


def test_a_slab_has_three_generations_and_then_gives_copies(store: Store) -> None:
    seen = []
    for value in range(8):
        write(store, value)
        seen.append(store.read(["w"])[0])
    assert [s[0].item() for s in seen] == list(range(8))
    assert len(store._slabs["w"]._spares) == GENERATIONS - 1


def test_what_is_opened_is_not_seen_before_it_is_published(store: Store) -> None:
    first = store.read(["w"])[0]
    opened = store.open(["w"])["w"].fill_(7)
    assert store.get("w").tolist() == store.read(["w"])[0].tolist() == first.tolist() == [1] * 4
    store.publish()
    assert store.read(["w"])[0].tolist() == opened.tolist() == [7] * 4


def test_a_read_while_the_current_generation_is_open_is_a_copy(store: Store) -> None:
    opened = store.open(["w"])["w"]
    seen = store.read(["w"])[0]
    opened.fill_(7)
    store.publish()
    assert seen.tolist() == [1] * 4


def test_rows_of_a_large_value_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LARGE", 64)
    store = Store()
    store.create({"table": torch.zeros(100), "small": torch.zeros(1)})
    assert store.get("table").untyped_storage().data_ptr() != store.get("small").untyped_storage().data_ptr()
    write_row = store.open(["table"], rows=1)["table"]
    write_row[3] = 1.0
    store.publish()
    at, seen = store.get("table").data_ptr(), store.read(["table"])[0]
    store.open(["table"], rows=1)["table"][3] = 2.0
    store.publish()
    assert store.get("table").data_ptr() == at and store.spare_bytes == 0
    assert seen[3] == 1 and store.read(["table"])[0][3] == 2, "a reader has a copy"


def test_parameter_with_gradient_is_stored_without(store: Store) -> None:
    store.assign({"w": torch.zeros(4, requires_grad=True)})
    assert not store.get("w").requires_grad


def test_budget_is_checked_before_memory_is_taken(store: Store) -> None:
    huge = torch.empty(1).expand(2**50)  # copying it would fail
    with pytest.raises(ResourceExhausted, match=f"no room for huge: asked {2**52} bytes, used 16, limit 40"):
        store.create({"huge": huge})
    store.create({"b": torch.zeros(6)})
    assert store.bytes == 40


def test_dropped_bytes_are_free_again(store: Store) -> None:
    store.drop(["w"])
    store.create({"v": torch.zeros(10)})
    assert list(store) == ["v"] and len(store) == 1 and "w" not in store


def test_what_is_dropped_leaves_no_hole() -> None:
    store = Store()
    store.create({"a": torch.zeros(1000), "b": torch.ones(2)})
    seen = store.read(["b"])[0]
    store.drop(["a"])
    assert store._slabs["b"].nbytes == ALIGN and store.bytes == 8
    write(store, 5, "b")
    assert seen.tolist() == [1, 1] and store.get("b").tolist() == [5, 5]


def test_without_a_budget_there_is_no_limit() -> None:
    store = Store()
    store.create({"w": torch.zeros(1000)})
    assert store.bytes == 4000


def test_errors_say_what_is_there(store: Store) -> None:
    with pytest.raises(AlreadyExists, match=r"w exists in the store as float32\[4\]"):
        store.create({"w": torch.zeros(1)})
    with pytest.raises(NotFound, match="no 'W' in the store"):
        store.get("W")
    with pytest.raises(NotFound, match="near: w"):
        store.drop(["ww"])
    with pytest.raises(ShapeError, match=r"cannot assign float64\[4\] to w, which is float32\[4\]"):
        store.assign({"w": torch.zeros(4, dtype=torch.float64)})
    with pytest.raises(InvalidArgument):
        Store(budget=-1)
    assert store.get("w").tolist() == [1] * 4


class Machine(RuleBasedStateMachine):
    """The store against a dict of lists, with readers that hold on to what they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.model, self.seen = Store(budget=64), {}, []

    keys, sizes = st.sampled_from("abc"), st.integers(0, 9)

    @rule(some=st.dictionaries(keys, sizes))
    def create(self, some: dict[str, int]) -> None:
        fits = not some.keys() & self.model.keys()
        fits = fits and 4 * (sum(some.values()) + sum(map(len, self.model.values()))) <= 64
        try:
            self.store.create({key: torch.full((size,), float(size)) for key, size in some.items()})
        except TfnbError:
            assert not fits
        else:
            assert fits
            self.model |= {key: [float(size)] * size for key, size in some.items()}

    @rule(key=keys, size=sizes, value=st.integers(-5, 5))
    def assign(self, key: str, size: int, value: int) -> None:
        fits = key in self.model and len(self.model[key]) == size
        try:
            self.store.assign({key: torch.full((size,), float(value))})
        except TfnbError:
            assert not fits
        else:
            assert fits
            self.model[key] = [float(value)] * size

    @rule(some=st.sets(keys), is_published=st.booleans(), reads=st.booleans())
    def add(self, some: set[str], is_published: bool, reads: bool) -> None:
        opened = self.store.open([key for key in sorted(some) if key in self.model])
        self.read("a") if reads else None
        if is_published:
            for key, tensor in opened.items():
                tensor.add_(1)
                self.model[key] = [value + 1 for value in self.model[key]]
            self.store.publish()

    @rule(key=keys)
    def read(self, key: str) -> None:
        if key in self.model:
            self.seen.append((self.store.read([key])[0], self.model[key]))

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        self.seen.pop(which % len(self.seen))

    @rule(key=keys)
    def drop(self, key: str) -> None:
        try:
            self.store.drop([key])
        except NotFound:
            assert key not in self.model
        else:
            del self.model[key]

    @rule()
    def release(self) -> None:
        self.store.release()

    @invariant()
    def same(self) -> None:
        assert {key: self.store.get(key).tolist() for key in self.store} == self.model
        assert self.store.bytes == 4 * sum(map(len, self.model.values()))
        assert all(tensor.tolist() == values for tensor, values in self.seen)
        assert all(len(slab._spares) < GENERATIONS for slab in self.store._slabs.values())


TestStoreIsADict = Machine.TestCase
