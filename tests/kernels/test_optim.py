"""Optimizer kernels against torch.optim itself, over many steps and several variables at once."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch

from tfnb.kernels import optim
from tfnb.kernels.borrowed import BORROWED
from tfnb.kernels.optim import FUSED, NUMBERS
from tfnb.train.update_rules import UpdateRule, settings_of

SHAPES = [(5, 7), (3,), (), (2, 0), (33, 4)]
ADAM = ("exp_avg", "exp_avg_sq", "step")

MATRICES = [(5, 7), (3, 3), (2, 8)]
DECAYS = {"weight_decay": 0.1, "maximize": True}


class Case(NamedTuple):
    """torch's class and its arguments, our op and its settings, torch's names of the slots, shapes of variables."""

    make: Any
    arguments: dict[str, Any]
    op: str
    slots: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None  # where they are not the arguments
    shapes: list[tuple[int, ...]] = SHAPES
    rule: UpdateRule | None = None  # of one that is torch.optim's own function

    @property
    def given(self) -> dict[str, Any]:
        return self.arguments if self.settings is None else self.settings


def sgd(slots: str = "", **arguments: Any) -> Case:
    return Case(torch.optim.SGD, arguments, "sgd", tuple(slots.split()))


def rmsprop(slots: str, **arguments: Any) -> Case:
    return Case(torch.optim.RMSprop, arguments, "rmsprop", tuple(slots.split()))


def borrowed(
    make: Any, op: str, slots: str, shapes: list[tuple[int, ...]] = SHAPES, **arguments: Any
) -> Case:  # fmt: skip
    """An update that is torch.optim's own function, with the settings that `tfnb.train` makes of the arguments."""
    group = make([torch.nn.Parameter(torch.zeros(2, 2))], **arguments).param_groups[0]
    rule = UpdateRule(make.__name__, 0.01, **settings_of(make.__name__, group))
    return Case(make, arguments, op, tuple(slots.split()), rule.settings, shapes, rule)


def adafactor(op: str, slots: str, shapes: list[tuple[int, ...]], **arguments: Any) -> Case:
    """With numbers in place of its two epsilons, of which the first is the dtype's by default."""
    made = borrowed(torch.optim.Adafactor, op, slots, shapes, **arguments)
    made.given["eps1"] = 1e-4
    return made._replace(arguments=arguments | {"eps": (1e-4, 1e-3)})


CASES = {
    "sgd": sgd(),
    "sgd decays": sgd(**DECAYS),
    "sgd momentum": sgd("momentum_buffer", momentum=0.9),
    "sgd nesterov": sgd("momentum_buffer", momentum=0.8, nesterov=True, weight_decay=0.01),
    "sgd dampening": sgd("momentum_buffer step", momentum=0.9, dampening=0.3),
    "adagrad": Case(torch.optim.Adagrad, {}, "adagrad", ("sum", "step")),
    "adagrad decays": Case(torch.optim.Adagrad, {"lr_decay": 0.1, **DECAYS}, "adagrad", ("sum", "step")),
    "rmsprop": rmsprop("square_avg step"),
    "rmsprop momentum": rmsprop("square_avg momentum_buffer step", momentum=0.5, weight_decay=0.1),
    "rmsprop centered": rmsprop("square_avg grad_avg step", centered=True, alpha=0.9, maximize=True),
    "rmsprop both": rmsprop("square_avg momentum_buffer grad_avg step", centered=True, momentum=0.9),
    "adam": Case(torch.optim.Adam, {}, "adam", ADAM),
    "adam betas": Case(
        torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3, **DECAYS}, "adam", ADAM,
        {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, **DECAYS},
    ),
    "adam amsgrad": Case(torch.optim.Adam, {"amsgrad": True}, "adam", (*ADAM, "max_exp_avg_sq")),
    "adamw": Case(torch.optim.AdamW, {}, "adam", ADAM, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "adadelta": borrowed(torch.optim.Adadelta, "adadelta", "square_avg acc_delta step", weight_decay=0.1),
    "adadelta decays": borrowed(torch.optim.Adadelta, "adadelta", "square_avg acc_delta step", rho=0.5, **DECAYS),
    "adadelta maximizes": borrowed(torch.optim.Adadelta, "adadelta", "square_avg acc_delta step", maximize=True),
    "adafactor": adafactor("adafactor", "row_var col_var step", MATRICES, weight_decay=0.1),
    "adafactor vector": adafactor("adafactor_vector", "variance step", [(3,), (9,)], maximize=True),
    "adamax": borrowed(torch.optim.Adamax, "adamax", "exp_avg exp_inf step", betas=(0.5, 0.9)),
    "asgd": borrowed(torch.optim.ASGD, "asgd", "ax mu eta step", t0=2, lambd=0.01),
    "muon": borrowed(
        torch.optim.Muon, "muon", "momentum_buffer", MATRICES, adjust_lr_fn="match_rms_adamw", ns_steps=3
    ),
    "nadam": borrowed(
        torch.optim.NAdam, "nadam", "exp_avg exp_avg_sq mu_product step", decoupled_weight_decay=True
    ),
    "radam": borrowed(torch.optim.RAdam, "radam", "exp_avg exp_avg_sq step", weight_decay=0.1, betas=(0.5, 0.9)),
    "rprop": borrowed(torch.optim.Rprop, "rprop", "prev step_size step", etas=(0.4, 1.5)),
    "sparse_adam": borrowed(torch.optim.SparseAdam, "sparse_adam", "exp_avg exp_avg_sq step", MATRICES, eps=1e-3),
}  # fmt: skip


def initial(case: Case, w: torch.Tensor) -> list[torch.Tensor]:
    """Slots of one variable, as `tfnb.train` begins them."""
    if case.rule is not None:
        return list(case.rule.initial(w).values())
    return [torch.zeros(()) if name == "step" else torch.zeros_like(w) for name in case.slots]


def values(case: Case, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """One tensor a shape, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in case.shapes]


def reference(case: Case, dtype: torch.dtype, steps: int, lr: float) -> tuple[list[Any], Any]:
    """Parameters and optimizer after torch.optim's own single-tensor steps."""
    parameters = [torch.nn.Parameter(w) for w in values(case, dtype, 0)]
    single = {"foreach": False} if "foreach" in inspect.signature(case.make).parameters else {}
    optimizer = case.make(parameters, lr=lr, **single, **case.arguments)
    for step in range(steps):
        for parameter, grad in zip(parameters, values(case, dtype, step + 1), strict=True):
            parameter.grad = grad.to_sparse(1) if case.op == "sparse_adam" else grad
        optimizer.step()
    return parameters, optimizer


def trained(case: Case, dtype: torch.dtype, steps: int, **rate: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Variables and slots after the in-place kernel's steps."""
    ws = values(case, dtype, 0)
    slots = [initial(case, w) for w in ws]
    tail = (rate["rate"],) if "rate" in rate else ()
    for step in range(steps):
        rows = [(w, grad, *s, *tail) for w, grad, s in zip(ws, values(case, dtype, step + 1), slots, strict=True)]
        FUSED[f"tfnb.{case.op}.default"](rows, lr=rate.get("lr"), **case.given)
    return ws, slots


# Relative to the largest entry: the fused kernels round in another order than torch's single-tensor formulas.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
LOOSE = {torch.float32: 1e-5, torch.float64: 1e-12}  # functions over lists round in other places than those for one


def assert_near(got: Any, expected: Any, tolerance: float) -> None:
    """Equal within rounding."""
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b.detach().to(a.dtype), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_steps_follow_torch_optim(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    steps, tolerance = (30, LOOSE[dtype]) if case.op in BORROWED else (100, TOLERANCE[dtype])
    expected, optimizer = reference(case, dtype, steps, 0.01)
    ws, slots = trained(case, dtype, steps, lr=0.01)
    assert_near(ws, expected, tolerance)
    for parameter, state in zip(expected, slots, strict=True):
        oracle = [optimizer.state[parameter].get(name) for name in case.slots]
        known = [(a, torch.as_tensor(b)) for a, b in zip(state, oracle, strict=True) if b is not None]
        assert_near([a for a, _ in known], [b for _, b in known], tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.op == "sgd"])
def test_sgd_of_reduced_dtypes_is_that_of_torch_in_every_element(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]._replace(shapes=[(1000,), (33, 4), ()])
    expected, _ = reference(case, dtype, 5, 0.125)
    ws, _ = trained(case, dtype, 5, lr=0.125)
    for got, wanted in zip(ws, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CASES)
def test_rate_may_be_a_tensor(name: str) -> None:
    expected, _ = trained(CASES[name], torch.float64, 5, lr=0.125)
    got, _ = trained(CASES[name], torch.float64, 5, rate=torch.tensor(0.125))
    assert all(map(torch.equal, got, expected))


def first_row(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Inputs of one update."""
    w, grad = values(case, dtype, 0)[0], values(case, dtype, 1)[0]
    return w, grad, initial(case, w)


@pytest.mark.parametrize("name", CASES)
def test_op_is_bitwise_the_in_place_kernel_and_writes_nothing(name: str) -> None:
    case = CASES[name]
    w, grad, slots = first_row(case, torch.float32)
    before = [x.clone() for x in (w, grad, *slots)]
    outputs = getattr(torch.ops.tfnb, case.op)(w, grad, slots, lr=0.1, **case.given)
    assert all(map(torch.equal, (w, grad, *slots), before))
    overload = getattr(torch.ops.tfnb, case.op).default
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(overload, (w, grad, slots), {"lr": 0.1, **case.given}, test_utils=tests)
    FUSED[f"tfnb.{case.op}.default"]([(w, grad, *slots)], lr=0.1, **case.given)
    assert all(map(torch.equal, outputs, (w, *slots)))


@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_matter(name: str) -> None:
    case = CASES[name]
    w, grad, slots = first_row(case, torch.float64)
    expected = getattr(torch.ops.tfnb, case.op)(w, grad, slots, lr=0.1, **case.given)
    strided = [x.mT.contiguous().mT if x.dim() == 2 else x.clone() for x in (w, grad, *slots)]
    FUSED[f"tfnb.{case.op}.default"]([tuple(strided)], lr=0.1, **case.given)
    assert all(map(torch.equal, [strided[0], *strided[2:]], expected))


def test_every_borrowed_rule_is_compared() -> None:
    assert {case.op for case in CASES.values()} >= BORROWED.keys()


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.op in BORROWED.keys() - {"muon", "sparse_adam"}]
)
def test_a_borrowed_step_that_fails_half_way_has_written_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    w, grad, slots = first_row(case, torch.float32)
    before = [x.clone() for x in (w, grad, *slots)]

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    for function in ("_foreach_addcmul_", "_foreach_add_", "_foreach_addcdiv_", "_foreach_copy_"):
        monkeypatch.setattr(torch, function, fail)
    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(MemoryError):
        FUSED[f"tfnb.{case.op}.default"]([(w, grad, *slots)], lr=0.1, **case.given)
    assert all(map(torch.equal, (w, grad, *slots), before))


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


@pytest.mark.parametrize("name", ["sgd momentum", "adagrad", "adam", "rmsprop centered"])
def test_complex_variables_follow_torch_optim(name: str) -> None:
    case = CASES[name]
    w = torch.randn(4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(w.clone())
    optimizer = case.make([parameter], lr=0.1, foreach=False, **case.arguments)
    slots = initial(case, w)
    for _ in range(5):
        parameter.grad = parameter.detach().conj() * 0.5
        grad = w.conj() * 0.5
        optimizer.step()
        FUSED[f"tfnb.{case.op}.default"]([(w, grad, *slots)], lr=0.1, **case.given)
    torch.testing.assert_close(w, parameter.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("op", sorted(op for op in FUSED if "_rows." not in op and "_product." not in op))
@pytest.mark.parametrize(
    ("grad", "error"), [(torch.ones(4), ValueError), (torch.ones(3, dtype=torch.float64), ValueError)]
)
def test_bad_gradient_is_refused_before_anything_is_written(op, grad, error):
    slots = {"tfnb.sgd.default": 0}.get(op, 2)
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
    count = 2 + ("momentum" in settings) + ("centered" in settings)
    row = tuple(torch.zeros(3, device="meta") for _ in range(2 + count))
    FUSED["tfnb.rmsprop.default"]([(*row, torch.tensor(0.1, device="meta"))], **settings)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}])
def test_a_rate_that_stays_a_tensor_moves_as_the_number_does(
    settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 + ("momentum" in settings) + ("centered" in settings)
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


def test_a_kernel_with_temporaries_goes_through_large_variables_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "PIECE", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    case = CASES["adadelta decays"]
    parameters, optimizer = reference(case, torch.float64, 4, 0.1)
    ws = values(case, torch.float64, 0)
    slots = [initial(case, w) for w in ws]
    for step in range(4):
        grads = values(case, torch.float64, step + 1)
        rows = [(w, grad, *mine) for w, grad, mine in zip(ws, grads, slots, strict=True)]
        FUSED["tfnb.adadelta.default"](rows, lr=0.1, **case.given)
    for w, mine, parameter in zip(ws, slots, parameters, strict=True):
        torch.testing.assert_close(w, parameter.detach(), rtol=1e-12, atol=1e-14)
        for value, name in zip(mine, case.slots, strict=True):
            torch.testing.assert_close(value, optimizer.state[parameter][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in CASES if "sparse" not in name])
def test_the_numbers_of_a_vector_count_in_place_of_the_settings(name: str) -> None:
    case = CASES[name]
    settings = {key: value for key, value in case.given.items() if key != "initial_accumulator_value"}
    numbers = NUMBERS[case.op]
    for dtype in (torch.float32, torch.float64):
        ws, grads = values(case, dtype, 0), values(case, dtype, 1)
        rows = [(w, grad, *initial(case, w)) for w, grad in zip(ws, grads, strict=True)]
        others = [tuple(x.clone() for x in row) for row in rows]
        moved = {key: settings[key] * 0.75 for key in numbers if settings.get(key)}
        defaults = {a.name: a.default_value for a in getattr(torch.ops.tfnb, case.op).default._schema.arguments}
        vector = [0.1, *(moved.get(key, settings.get(key, defaults[key])) for key in numbers)]
        FUSED[f"tfnb.{case.op}.default"](rows, lr=0.1, **settings | moved)
        rate = torch.tensor(vector, dtype=torch.float64)
        FUSED[f"tfnb.{case.op}.default"]([(*row, rate) for row in others], **settings)
        for row, other in zip(rows, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@pytest.mark.parametrize("name", ["adadelta", "adam", "sgd momentum", "rmsprop"])
def test_variables_of_several_dtypes_are_updated_each_in_its_own(name: str) -> None:
    case = CASES[name]._replace(shapes=[(3, 2), (5,)])  # one without elements is taken another way
    rows, wanted = [], []
    for dtype in (torch.float32, torch.float64):
        parameters, optimizer = reference(case, dtype, 1, 0.1)
        for w, grad, parameter in zip(values(case, dtype, 0), values(case, dtype, 1), parameters, strict=True):
            rows.append((w, grad, *initial(case, w)))
            wanted.append((parameter.detach(), [optimizer.state[parameter].get(slot) for slot in case.slots]))
    FUSED[f"tfnb.{case.op}.default"](rows, lr=0.1, **case.given)
    for (w, _, *slots), (parameter, states) in zip(rows, wanted, strict=True):
        torch.testing.assert_close(w, parameter, rtol=2e-6 if w.dtype is torch.float32 else 1e-13, atol=1e-14)
        for slot, state in zip(slots, states, strict=True):
            if state is not None:
                tolerance = 2e-6 if w.dtype is torch.float32 else 1e-13
                torch.testing.assert_close(slot, state, rtol=tolerance, atol=1e-14, check_dtype=False)
