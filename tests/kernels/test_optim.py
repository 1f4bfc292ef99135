"""Optimizer kernels against torch.optim itself, over many steps and several variables at once."""

from __future__ import annotations

import pytest
import torch

from tfnb.kernels import optim
from tfnb.kernels.optim import FUSED

SHAPES = [(5, 7), (3,), (), (2, 0), (33, 4)]
ADAM = ("exp_avg", "exp_avg_sq", "step")

# torch's class, its arguments, our op, its settings, its slots
CASES = {
    "sgd": (torch.optim.SGD, {}, "sgd", {}, ()),
    "sgd decay": (torch.optim.SGD, {"weight_decay": 0.1}, "sgd", {"weight_decay": 0.1}, ()),
    "sgd maximize": (torch.optim.SGD, {"maximize": True}, "sgd", {"maximize": True}, ()),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9}, "sgd", {"momentum": 0.9}, ("momentum_buffer",)),
    "sgd nesterov": (
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        "sgd",
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        ("momentum_buffer",),
    ),
    "sgd dampening": (
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.3},
        "sgd",
        {"momentum": 0.9, "dampening": 0.3},
        ("momentum_buffer", "step"),
    ),
    "adagrad": (torch.optim.Adagrad, {}, "adagrad", {}, ("sum", "step")),
    "adagrad decays": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
        "adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
        ("sum", "step"),
    ),
    "rmsprop": (torch.optim.RMSprop, {}, "rmsprop", {}, ("square_avg",)),
    "rmsprop momentum": (
        torch.optim.RMSprop,
        {"momentum": 0.5, "weight_decay": 0.1},
        "rmsprop",
        {"momentum": 0.5, "weight_decay": 0.1},
        ("square_avg", "momentum_buffer"),
    ),
    "rmsprop centered": (
        torch.optim.RMSprop,
        {"centered": True, "alpha": 0.9, "maximize": True},
        "rmsprop",
        {"centered": True, "alpha": 0.9, "maximize": True},
        ("square_avg", "grad_avg"),
    ),
    "rmsprop centered momentum": (
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.9},
        "rmsprop",
        {"centered": True, "momentum": 0.9},
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "adam": (torch.optim.Adam, {}, "adam", {}, ADAM),
    "adam betas": (
        torch.optim.Adam,
        {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
        "adam",
        {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
        ADAM,
    ),
    "adam amsgrad": (
        torch.optim.Adam,
        {"amsgrad": True},
        "adam",
        {"amsgrad": True},
        (*ADAM, "max_exp_avg_sq"),
    ),
    "adamw": (torch.optim.AdamW, {}, "adam", {"weight_decay": 0.01, "decoupled_weight_decay": True}, ADAM),
}


def zeros(w, names):
    """Slots of one variable, all starting at zero."""
    return [torch.zeros(()) if name == "step" else torch.zeros_like(w) for name in names]


def values(dtype, seed):
    """One tensor a shape, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def reference(case, dtype, steps, lr):
    """Parameters and optimizer after torch.optim's own single-tensor steps."""
    make, arguments = CASES[case][:2]
    parameters = [torch.nn.Parameter(w) for w in values(dtype, 0)]
    optimizer = make(parameters, lr=lr, foreach=False, **arguments)
    for step in range(steps):
        for parameter, grad in zip(parameters, values(dtype, step + 1), strict=True):
            parameter.grad = grad
        optimizer.step()
    return parameters, optimizer


def trained(case, dtype, steps, lr=None, rate=None):
    """Variables and slots after the in-place kernel's steps."""
    _, _, op, settings, names = CASES[case]
    ws = values(dtype, 0)
    slots = [zeros(w, names) for w in ws]
    tail = () if rate is None else (rate,)
    for step in range(steps):
        grads = values(dtype, step + 1)
        rows = [(w, grad, *state, *tail) for w, grad, state in zip(ws, grads, slots, strict=True)]
        FUSED[f"tfnb.{op}.default"](rows, lr=lr, **settings)
    return ws, slots


# Relative to the largest entry: the fused kernels round in another order than torch's single-tensor formulas.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def assert_near(got, expected, dtype):
    """Equal within rounding."""
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_hundred_steps_follow_torch_optim(case, dtype):
    expected, optimizer = reference(case, dtype, 100, 0.01)
    ws, slots = trained(case, dtype, 100, lr=0.01)
    assert_near(ws, expected, dtype)
    for parameter, state in zip(expected, slots, strict=True):
        oracle = [optimizer.state[parameter].get(name) for name in CASES[case][4]]
        known = [(a, b) for a, b in zip(state, oracle, strict=True) if b is not None]
        assert_near([a for a, _ in known], [b for _, b in known], dtype)


@pytest.mark.parametrize("case", CASES)
def test_rate_may_be_a_tensor(case):
    expected, _ = trained(case, torch.float64, 5, lr=0.125)
    got, _ = trained(case, torch.float64, 5, rate=torch.tensor(0.125))
    assert all(map(torch.equal, got, expected))


def first_row(case, dtype=torch.float64):
    """Inputs of one update."""
    names = CASES[case][4]
    w, grad = values(dtype, 0)[0], values(dtype, 1)[0]
    return w, grad, zeros(w, names)


@pytest.mark.parametrize("case", CASES)
def test_op_is_bitwise_the_in_place_kernel_and_writes_nothing(case):
    _, _, op, settings, _ = CASES[case]
    w, grad, slots = first_row(case, torch.float32)
    before = [x.clone() for x in (w, *slots)]
    outputs = getattr(torch.ops.tfnb, op)(w, grad, slots, lr=0.1, **settings)
    assert all(map(torch.equal, (w, *slots), before))
    FUSED[f"tfnb.{op}.default"]([(w, grad, *slots)], lr=0.1, **settings)
    assert all(map(torch.equal, outputs, (w, *slots)))


@pytest.mark.parametrize("case", CASES)
def test_ops_pass_opcheck(case):
    _, _, op, settings, _ = CASES[case]
    w, grad, slots = first_row(case)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    overload = getattr(torch.ops.tfnb, op).default
    torch.library.opcheck(overload, (w, grad, slots), {"lr": 0.1, **settings}, test_utils=tests)


@pytest.mark.parametrize("case", CASES)
def test_strides_do_not_matter(case):
    _, _, op, settings, _ = CASES[case]
    w, grad, slots = first_row(case)
    expected = getattr(torch.ops.tfnb, op)(w, grad, slots, lr=0.1, **settings)
    strided = [x.mT.contiguous().mT if x.dim() == 2 else x.clone() for x in (w, grad, *slots)]
    FUSED[f"tfnb.{op}.default"]([tuple(strided)], lr=0.1, **settings)
    got = [strided[0], *strided[2:]]
    assert all(map(torch.equal, got, expected))


def test_gradients_that_are_other_variables_are_read_before_the_writes():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    FUSED["tfnb.sgd.default"]([(a, b), (b, a)], lr=1.0)
    assert a.tolist() == [-9.0, -18.0]
    assert b.tolist() == [9.0, 18.0]


def test_variables_that_began_at_different_steps_are_damped_apart():
    settings = {"momentum": 0.5, "dampening": 0.5}
    row = [(torch.ones(1), torch.ones(1), torch.zeros(1), torch.tensor(float(step))) for step in (0, 1)]
    FUSED["tfnb.sgd.default"](row, lr=1.0, **settings)
    assert [r[2].item() for r in row] == [1.0, 0.5]
    assert [r[3].item() for r in row] == [1.0, 2.0]


def test_several_rates_and_dtypes_in_one_call():
    kinds = [(dtype, rate) for dtype in TOLERANCE for rate in (0.5, 2.0)]
    rows = [(torch.zeros(2, dtype=d), torch.ones(2, dtype=d), torch.tensor(rate)) for d, rate in kinds]
    FUSED["tfnb.sgd.default"](rows)
    assert [row[0][0].item() for row in rows] == [-0.5, -2.0, -0.5, -2.0]


@pytest.mark.parametrize("case", ["sgd momentum", "adagrad", "adam", "rmsprop centered"])
def test_complex_variables_follow_torch_optim(case):
    make, arguments, op, settings, names = CASES[case]
    w = torch.randn(4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(w.clone())
    optimizer = make([parameter], lr=0.1, foreach=False, **arguments)
    slots = zeros(w, names)
    for _ in range(5):
        parameter.grad = parameter.detach().conj() * 0.5
        grad = w.conj() * 0.5
        optimizer.step()
        FUSED[f"tfnb.{op}.default"]([(w, grad, *slots)], lr=0.1, **settings)
    torch.testing.assert_close(w, parameter.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("op", sorted(op for op in FUSED if "_rows." not in op and "_product." not in op))
@pytest.mark.parametrize(
    ("grad", "error"), [(torch.ones(4), ValueError), (torch.ones(3, dtype=torch.float64), ValueError)]
)
def test_bad_gradient_is_refused_before_anything_is_written(op, grad, error):
    slots = {"tfnb.sgd.default": 0, "tfnb.rmsprop.default": 1}.get(op, 2)
    rows = [(torch.zeros(3), g, *(torch.zeros(3) for _ in range(slots))) for g in (torch.ones(3), grad)]
    with pytest.raises(error, match=r"float32\[3\]"):
        FUSED[op](rows, lr=1.0)
    assert all(not x.any() for row in rows for x in (row[0], *row[2:]))


def test_factors_of_no_gradient_are_refused_before_anything_is_written():
    good = torch.zeros(2, 2), torch.ones(2, 1), torch.ones(1, 2)
    for left, right in [(torch.ones(2, 3), torch.ones(2, 2)), (torch.ones(3, 1), torch.ones(1, 2))]:
        with pytest.raises(ValueError, match=r"no gradient of the variable float32\[2, 2\]"):
            FUSED["tfnb.sgd_product.default"]([good, (torch.zeros(2, 2), left, right)], lr=1.0)
    assert not good[0].any()


def test_integer_variable_is_refused():
    with pytest.raises(TypeError, match="int64"):
        FUSED["tfnb.sgd.default"]([(torch.zeros(2).long(), torch.ones(2).long())], lr=1.0)


def test_op_needs_exactly_one_rate():
    with pytest.raises(ValueError, match="either"):
        torch.ops.tfnb.sgd(torch.zeros(2), torch.ones(2), [])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}, {"centered": True}])
def test_a_rate_that_lies_on_a_device_is_not_waited_for(settings: dict[str, float]) -> None:
    """The values of a meta tensor cannot be had, so reading the rate would raise."""
    count = 1 + ("momentum" in settings) + ("centered" in settings)
    row = tuple(torch.zeros(3, device="meta") for _ in range(2 + count))
    FUSED["tfnb.rmsprop.default"]([(*row, torch.tensor(0.1, device="meta"))], **settings)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}])
def test_a_rate_that_stays_a_tensor_moves_as_the_number_does(
    settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1 + ("momentum" in settings) + ("centered" in settings)
    moved = []
    for how in (float, torch.Tensor.clone):
        monkeypatch.setattr(optim, "_rate", lambda rate, w, how=how: how(rate))
        torch.manual_seed(0)
        w, grad, *slots = (torch.randn(5) for _ in range(2 + count))
        slots = [slot.square() + 1 for slot in slots]
        slots[0] += 100  # a mean of squares is above the square of a mean
        FUSED["tfnb.rmsprop.default"]([(w, grad, *slots, torch.tensor(0.1))], **settings)
        moved.append(w)
    torch.testing.assert_close(moved[1], moved[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_of_a_product_is_sgd_with_the_product(dtype: torch.dtype) -> None:
    w, left, right = torch.randn(6, 5, dtype=dtype), torch.randn(6, 3, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    before = w.clone()
    (new,) = torch.ops.tfnb.sgd_product(w, left, [], right, lr=0.1)
    (wanted,) = torch.ops.tfnb.sgd(w, left @ right, [], lr=0.1)
    torch.testing.assert_close(new, wanted)
    assert torch.equal(w, before)
    FUSED["tfnb.sgd_product.default"]([(w, left, right)], lr=0.1)
    assert torch.equal(w, new)


def test_sgd_with_momentum_of_a_product_is_sgd_with_the_product() -> None:
    w, left, right = torch.randn(6, 5), torch.randn(6, 3), torch.randn(3, 5)
    buffer = torch.randn(6, 5)
    new = torch.ops.tfnb.sgd_product(w, left, [buffer], right, lr=0.1, momentum=0.9)
    torch.testing.assert_close(new, torch.ops.tfnb.sgd(w, left @ right, [buffer], lr=0.1, momentum=0.9))
    FUSED["tfnb.sgd_product.default"]([(w, left, buffer, right)], lr=0.1, momentum=0.9)
    assert torch.equal(w, new[0]) and torch.equal(buffer, new[1])


def test_slots_that_do_not_fit_a_product_are_refused_before_anything_is_written() -> None:
    w, left, right = torch.zeros(2, 2), torch.ones(2, 1), torch.ones(1, 2)
    for slots, momentum in [([], 0.9), ([torch.zeros(2, 2)], 0.0), ([torch.zeros(2)], 0.9)]:
        with pytest.raises(ValueError, match=f"with momentum={momentum}"):
            FUSED["tfnb.sgd_product.default"]([(w, left, *slots, right)], lr=1.0, momentum=momentum)
    assert not w.any()


def test_a_factor_in_memory_of_a_weight_is_read_before_that_is_written() -> None:
    first, second = torch.randn(4, 4), torch.randn(4, 4)
    wanted = [first - 0.1 * second @ second, second - 0.1 * first @ second]
    FUSED["tfnb.sgd_product.default"]([(first, second, second), (second, first, second)], lr=0.1)
    torch.testing.assert_close([first, second], wanted)


def test_a_factor_in_memory_of_a_momentum_is_read_before_that_is_written() -> None:
    w, buffer, right = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    wanted = 0.9 * buffer + buffer @ right
    FUSED["tfnb.sgd_product.default"]([(w.clone(), buffer, buffer, right)], lr=0.1, momentum=0.9)
    torch.testing.assert_close(buffer, wanted)
