"""The store: addresses stay, the budget holds, errors change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tfnb.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, ShapeError, TfnbError
from tfnb.state.store import Store


@pytest.fixture
def store() -> Store:
    store = Store(budget=40)
    store.create("w", torch.ones(4))
    return store


def test_create_copies(store: Store) -> None:
    value = torch.zeros(2)
    store.create("b", value)
    value += 1
    assert store.get("b").tolist() == [0, 0]


def test_create_makes_read_only_and_strided_tensors_its_own(store: Store) -> None:
    store.create("b", torch.ones(1).expand(3))
    store.assign("b", torch.tensor([1.0, 2.0, 3.0]))
    assert store.get("b").tolist() == [1, 2, 3]


def test_assign_keeps_the_address(store: Store) -> None:
    held = store.get("w")
    store.assign("w", torch.full((4,), 2.0))
    assert held.tolist() == [2] * 4
    assert store.get("w") is held


def test_parameter_with_gradient_is_stored_without(store: Store) -> None:
    store.assign("w", torch.zeros(4, requires_grad=True))
    assert not store.get("w").requires_grad


def test_budget_is_checked_before_memory_is_taken(store: Store) -> None:
    huge = torch.empty(1).expand(2**50)  # copying it would fail
    with pytest.raises(ResourceExhausted, match=f"no room for huge: asked {2**52} bytes, used 16, limit 40"):
        store.create("huge", huge)
    store.create("b", torch.zeros(6))
    assert store.bytes == 40


def test_dropped_bytes_are_free_again(store: Store) -> None:
    store.drop("w")
    store.create("v", torch.zeros(10))
    assert list(store) == ["v"] and len(store) == 1 and "w" not in store


def test_without_a_budget_there_is_no_limit() -> None:
    store = Store()
    store.create("w", torch.zeros(1000))
    assert store.bytes == 4000


def test_snapshot_does_not_change_with_the_store(store: Store) -> None:
    snapshot = store.snapshot()
    store.assign("w", torch.zeros(4))
    assert snapshot["w"].tolist() == [1] * 4


def test_errors_say_what_is_there(store: Store) -> None:
    with pytest.raises(AlreadyExists, match=r"w exists in the store as float32\[4\]"):
        store.create("w", torch.zeros(1))
    with pytest.raises(NotFound, match="no 'W' in the store"):
        store.get("W")
    with pytest.raises(NotFound, match="near: w"):
        store.drop("ww")
    with pytest.raises(ShapeError, match=r"cannot assign float64\[4\] to w, which is float32\[4\]"):
        store.assign("w", torch.zeros(4, dtype=torch.float64))
    with pytest.raises(InvalidArgument):
        Store(budget=-1)
    assert store.get("w").tolist() == [1] * 4


class Machine(RuleBasedStateMachine):
    """The store against a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.model = Store(budget=64), {}

    keys, sizes = st.sampled_from("abc"), st.integers(0, 9)

    @rule(key=keys, size=sizes)
    def create(self, key: str, size: int) -> None:
        fits = key not in self.model and 4 * (size + sum(map(len, self.model.values()))) <= 64
        try:
            self.store.create(key, torch.full((size,), float(size)))
        except TfnbError:
            assert not fits
        else:
            assert fits
            self.model[key] = [float(size)] * size

    @rule(key=keys, size=sizes, value=st.integers(-5, 5))
    def assign(self, key: str, size: int, value: int) -> None:
        fits = key in self.model and len(self.model[key]) == size
        try:
            self.store.assign(key, torch.full((size,), float(value)))
        except TfnbError:
            assert not fits
        else:
            assert fits
            self.model[key] = [float(value)] * size

    @rule(key=keys)
    def drop(self, key: str) -> None:
        try:
            self.store.drop(key)
        except NotFound:
            assert key not in self.model
        else:
            del self.model[key]

    @invariant()
    def same(self) -> None:
        assert {key: self.store.get(key).tolist() for key in self.store} == self.model
        assert self.store.bytes == 4 * sum(map(len, self.model.values()))


TestStoreIsADict = Machine.TestCase
