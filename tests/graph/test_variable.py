"""Variables outside of a recording: eager reads and writes, shared storage, homes, missing values."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, TfnbError
from tfnb.graph import Spec, Variable


@pytest.fixture
def v() -> Variable:
    return Variable(torch.arange(6.0).view(3, 2), name="v")


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "trainable"),
    [
        (torch.zeros(2, 3), torch.float32, (2, 3), True),
        (np.zeros((2, 3)), torch.float64, (2, 3), True),
        ([[1, 2]], torch.int64, (1, 2), False),
        (1.5, torch.float32, (), True),
        (True, torch.bool, (), False),
        (torch.zeros(1, dtype=torch.complex64), torch.complex64, (1,), True),
    ],
)
def test_variable_of_anything(value: Any, dtype: torch.dtype, shape: tuple[int, ...], trainable: bool) -> None:
    v = Variable(value)
    assert (v.dtype, v.shape, v.trainable, v.initialized) == (dtype, torch.Size(shape), trainable, True)
    assert v.spec == Spec(dtype, shape)
    assert np.array_equal(v.value().numpy(), np.asarray(value))


def test_initial_value_is_copied() -> None:
    start = torch.zeros(2)
    v = Variable(start)
    start += 1
    assert v.value().tolist() == [0, 0]


def test_value_is_a_copy(v: Variable) -> None:
    v.value().zero_()
    assert v.value()[2, 1] == 5


def test_writes_return_the_value_after_the_write(v: Variable) -> None:
    before = v.value()
    assert torch.equal(v.assign_add(torch.ones(3, 2)), before + 1)
    assert torch.equal(v.assign_sub(2), before - 1)
    assert torch.equal(v.assign(before * 3), before * 3)
    assert torch.equal(v.value(), before * 3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("update", [10.0, 20.0]),
        ("add", [14.0, 25.0]),
        ("sub", [-6.0, -15.0]),
        ("mul", [40.0, 100.0]),
        ("div", [0.4, 0.25]),
    ],
)
def test_scatter_changes_only_its_rows(v: Variable, kind: str, expected: list[float]) -> None:
    result = getattr(v, f"scatter_{kind}")([2], [[10.0, 20.0]])
    assert torch.allclose(result[2], torch.tensor(expected))
    assert torch.equal(result, v.value())
    assert torch.equal(v.value()[:2], torch.arange(4.0).view(2, 2))


def test_scatter_add_sums_duplicates(v: Variable) -> None:
    v.assign(torch.zeros(3, 2))
    v.scatter_add(torch.tensor([1, 1]), torch.ones(2, 2))
    v.scatter_sub(torch.tensor([0, 0, 0]), torch.ones(3, 2))
    assert v.value().tolist() == [[-3, -3], [2, 2], [0, 0]]


@pytest.mark.parametrize("row", [3, -1])
def test_row_outside_is_named_and_nothing_is_written(v: Variable, row: int) -> None:
    before = v.value()
    with pytest.raises(InvalidArgument, match=f"row {row} is outside of variable v, which has 3 rows"):
        v.scatter_add([0, row], torch.ones(2, 2))
    assert torch.equal(v.value(), before)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), r"cannot assign float32\[2, 3\] to variable v, which is float32\[3, 2\]"),
        (torch.zeros(3, 2, dtype=torch.float64), r"cannot assign float64\[3, 2\] to variable v"),
        (torch.zeros(2), r"cannot assign float32\[2\] to variable v"),
    ],
)
def test_another_shape_or_dtype_is_refused_with_both(v: Variable, value: torch.Tensor, message: str) -> None:
    before = v.value()
    with pytest.raises(ShapeError, match=message):
        v.assign(value)
    assert torch.equal(v.value(), before)


@pytest.mark.parametrize("change", [
    lambda v: v.scatter_update([1], [[1.0, 1.0, 1.0]]),
    lambda v: v.scatter_mul([1.0], [[1.0, 1.0]]),
    lambda v: v.assign_add(torch.ones(3)),
    lambda v: v.assign("a"),
    lambda v: Variable(torch.tensor(3), name="v").assign(1.5),
    lambda v: Variable(None, name="v"),
    lambda v: Variable(1.0, shared_name=3),
    lambda v: Variable(1.0, container=3),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_written(v: Variable, change: Callable[[Variable], Any]) -> None:
    before = v.value()
    with pytest.raises(InvalidArgument, match=r"variable v|a Variable|shared_name are strings"):
        change(v)
    assert torch.equal(v.value(), before)


def test_numbers_are_taken_in_the_dtype_of_the_variable() -> None:
    v = Variable(torch.tensor(1.0, dtype=torch.float64))
    assert v.assign(3).dtype == torch.float64


def test_variable_assigned_to_a_variable(v: Variable) -> None:
    other = Variable(torch.ones(3, 2))
    v.assign(other)
    other.assign_add(1)
    assert v.value().tolist() == [[1, 1]] * 3


# -- as a tensor --------------------------------------------------------------------------------------------


def test_variable_is_used_as_a_tensor(v: Variable) -> None:
    t = v.value()
    for got, expected in [
        (v + 1, t + 1), (1 - v, 1 - t), (v * v, t * t), (2 / (v + 1), 2 / (t + 1)), (v**2, t**2), (-v, -t),
        (v @ t.T, t @ t.T), (t.T @ v, t.T @ t), (v > 2, t > 2), (v <= t, t <= t), (abs(v), t), (v // 2, t // 2),
        (v[1], t[1]), (v.sum(0), t.sum(0)), (v.T, t.T), (torch.relu(v), torch.relu(t)),
        (torch.stack([v, v]), torch.stack([t, t])), (nn.functional.linear(t, v), nn.functional.linear(t, t)),
    ]:  # fmt: skip
        assert torch.equal(got, expected)
    assert len(v) == 3


def test_variable_is_a_dict_key_by_identity(v: Variable) -> None:
    twin = Variable(v.value(), name="v")
    assert {v: 1, twin: 2}[v] == 1
    assert (v == twin) is False


def test_unknown_private_name_is_an_attribute_error(v: Variable) -> None:
    with pytest.raises(AttributeError):
        v._nothing  # noqa: B018


def test_variable_is_not_pickled(v: Variable) -> None:
    with pytest.raises(FailedPrecondition, match=r"v\.value\(\), or session\.save"):
        pickle.dumps(v)


def test_repr_names_spec_and_role() -> None:
    assert repr(Variable([1], name="step")) == "<Variable step: int64[1], not trainable>"


# -- storage ------------------------------------------------------------------------------------------------


def test_variable_of_a_parameter_shares_its_storage() -> None:
    layer = nn.Linear(2, 3)
    w = Variable.of(layer.weight, name="weight", trainable=True)
    assert w.storage.data_ptr() == layer.weight.data_ptr()
    w.assign_add(torch.ones(3, 2))
    assert torch.equal(w.value(), layer.weight.detach())
    with torch.no_grad():
        layer.weight.zero_()
    assert w.value().count_nonzero() == 0
    assert layer.weight.requires_grad and layer.weight.grad is None


def test_variable_outlives_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    v = Variable.of(parameter, name="v", trainable=True)
    del parameter
    gc.collect()
    assert v.value().tolist() == [1, 1]


def test_storage_that_a_module_replaced_is_followed() -> None:
    layer = nn.Linear(2, 3)
    w = Variable.of(layer.weight, name="weight", trainable=True)
    layer.weight.data = torch.zeros(3, 2)
    assert w.value().count_nonzero() == 0


def test_uninitialised_variable_says_so_on_every_read() -> None:
    v = Variable.declared(Spec(torch.float32, (2,)), name="lost", trainable=True)
    assert not v.initialized
    assert (v.shape, v.dtype, v.device) == (torch.Size([2]), torch.float32, "cpu")
    assert repr(v) == "<Variable lost: float32[2]>"
    for read in (v.value, v.read, lambda: v + 1, lambda: v[0], lambda: v.storage, lambda: v.assign_add(1)):
        with pytest.raises(FailedPrecondition, match="Attempting to use uninitialized value lost"):
            read()


def test_uninitialised_variable_takes_a_value() -> None:
    v = Variable.declared(Spec(torch.float32, (2,)), name="v", trainable=True)
    value = torch.tensor([1.0, 2.0])
    v.assign(value)
    value.zero_()
    assert v.initialized and v.value().tolist() == [1, 2]


def test_uninitialised_variable_refuses_another_shape() -> None:
    v = Variable.declared(Spec(torch.float32, (2,)), name="v", trainable=True)
    with pytest.raises(ShapeError):
        v.assign(torch.zeros(3))
    assert not v.initialized


# -- elsewhere ----------------------------------------------------------------------------------------------


class Elsewhere:
    """A home that owns the values."""

    def __init__(self) -> None:
        self.values: dict[Variable, torch.Tensor] = {}

    def value(self, variable: Variable) -> torch.Tensor:
        return self.values[variable].clone()

    def assign(self, variable: Variable, value: torch.Tensor) -> None:
        self.values[variable] = value

    def __str__(self) -> str:
        return "ps:0"


def test_reads_and_writes_go_to_the_home(v: Variable) -> None:
    here = v.value()
    home = Elsewhere()
    home.values[v] = here.clone()
    v.home = home
    v.assign_add(1)
    assert torch.equal(v.value(), here + 1)
    assert torch.equal(v.storage, here)
    assert v.device == "ps:0"
    v.store(here + 2)  # what a pull does
    v.home = None
    assert torch.equal(v.value(), here + 2)


def test_write_of_another_shape_does_not_reach_the_home(v: Variable) -> None:
    v.home = home = Elsewhere()
    with pytest.raises(TfnbError):
        v.assign(torch.zeros(1))
    assert home.values == {}


def test_a_shared_name_is_one_variable_for_every_graph() -> None:
    first = Variable(torch.zeros(2), shared_name="shared-between-graphs")
    second = Variable(torch.ones(2), shared_name="shared-between-graphs")
    assert second is first and second.value().tolist() == [0, 0]
    with pytest.raises(InvalidArgument, match=r"float32\[2\], not a Variable float32\[3\]"):
        Variable(torch.ones(3), shared_name="shared-between-graphs")
    assert Variable(torch.ones(3), container="other", shared_name="shared-between-graphs") is not first


def test_lazy_variable_has_no_value_until_assigned() -> None:
    v = Variable(torch.ones(2), name="late", lazy_init=True)
    with pytest.raises(FailedPrecondition, match="uninitialized value late"):
        v.value()
    v.assign(torch.full((2,), 3.0))
    assert v.value().tolist() == [3, 3]


def test_a_parameter_stays_trainable_when_its_module_is_gone() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    trained, fixed = Variable.of(weight, name="weight"), Variable.of(frozen, name="frozen")
    assert trained.trainable and not fixed.trainable
    frozen.requires_grad_(True)
    assert fixed.trainable
    del weight, frozen
    gc.collect()
    assert trained.trainable and fixed.trainable
