"""Updates that are torch.optim's own functions: over many variables at once, against the optimizer they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfnb.kernels.borrowed import BORROWED
from tfnb.kernels.optim import FUSED
from tfnb.train.update_rules import Rule, settings_of

SHAPES = [(5, 7), (3,), (), (2, 0), (4, 3, 2)]
MATRICES = [(5, 7), (3, 3), (2, 8)]

# op: torch's class, its slots, arguments, shapes
CASES: dict[str, tuple[Any, str, dict[str, Any], list[tuple[int, ...]]]] = {
    "adadelta": (torch.optim.Adadelta, "square_avg acc_delta step", {"weight_decay": 0.1}, SHAPES),
    "adafactor": (torch.optim.Adafactor, "row_var col_var step", {"weight_decay": 0.1}, MATRICES),
    "adafactor_vector": (torch.optim.Adafactor, "variance step", {"maximize": True}, [(3,), (9,)]),
    "adamax": (torch.optim.Adamax, "exp_avg exp_inf step", {"betas": (0.5, 0.9)}, SHAPES),
    "asgd": (torch.optim.ASGD, "ax mu eta step", {"t0": 2, "lambd": 0.01}, SHAPES),
    "muon": (torch.optim.Muon, "momentum_buffer", {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, MATRICES),
    "nadam": (torch.optim.NAdam, "exp_avg exp_avg_sq mu_product step", {"decoupled_weight_decay": True}, SHAPES),
    "radam": (torch.optim.RAdam, "exp_avg exp_avg_sq step", {"weight_decay": 0.1, "betas": (0.5, 0.9)}, SHAPES),
    "rprop": (torch.optim.Rprop, "prev step_size step", {"etas": (0.4, 1.5)}, SHAPES),
    "sparse_adam": (torch.optim.SparseAdam, "exp_avg exp_avg_sq step", {"eps": 1e-3}, MATRICES),
}


def values(op: str, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in CASES[op][3]]


def rule(op: str) -> Rule:
    kind, _, arguments, _ = CASES[op]
    group = kind([torch.nn.Parameter(torch.zeros(2, 2))], **arguments).param_groups[0]
    made = Rule(kind.__name__, 0.01, **settings_of(kind.__name__, group))
    if op.startswith("adafactor"):
        made.settings["eps1"] = 1e-4
    return made


def trained(op: str, dtype: torch.dtype, steps: int, **rate: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Variables and slots after steps of the in-place twin."""
    made, ws = rule(op), values(op, dtype, 0)
    slots = [list(made.initial(w).values()) for w in ws]
    tail = (rate["rate"],) if "rate" in rate else ()
    for step in range(steps):
        rows = [(w, grad, *s, *tail) for w, grad, s in zip(ws, values(op, dtype, step + 1), slots, strict=True)]
        FUSED[f"tfnb.{op}.default"](rows, lr=rate.get("lr"), **made.settings)
    return ws, slots


def by_torch(op: str, dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[Any]]:
    kind, names, arguments, _ = CASES[op]
    parameters = [torch.nn.Parameter(w) for w in values(op, dtype, 0)]
    more = {"eps": (1e-4, 1e-3)} if op.startswith("adafactor") else {}
    optimizer = kind(parameters, lr=0.01, **arguments, **more)
    for step in range(steps):
        for parameter, grad in zip(parameters, values(op, dtype, step + 1), strict=True):
            parameter.grad = grad.to_sparse(1) if op == "sparse_adam" else grad
        optimizer.step()
    state = [[torch.as_tensor(optimizer.state[p][name]) for name in names.split()] for p in parameters]
    return [p.detach() for p in parameters], state


def test_every_borrowed_rule_is_compared() -> None:
    assert CASES.keys() == BORROWED.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", CASES)
def test_thirty_steps_are_torchs(op: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    for mine, theirs in zip(trained(op, dtype, 30, lr=0.01), by_torch(op, dtype, 30), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("op", CASES)
def test_a_rate_may_be_a_tensor(op: str) -> None:
    for a, b in zip(
        trained(op, torch.float64, 4, lr=0.125), trained(op, torch.float64, 4, rate=torch.tensor(0.125)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("op", CASES)
def test_the_op_is_the_in_place_twin_and_writes_nothing(op: str) -> None:
    made, w, grad = rule(op), values(op, torch.float32, 0)[0], values(op, torch.float32, 1)[0]
    slots = list(made.initial(w).values())
    before = [x.clone() for x in (w, grad, *slots)]
    outputs = getattr(torch.ops.tfnb, op)(w, grad, slots, lr=0.1, **made.settings)
    assert all(map(torch.equal, (w, grad, *slots), before))
    FUSED[f"tfnb.{op}.default"]([(w, grad, *slots)], lr=0.1, **made.settings)
    assert all(map(torch.equal, outputs, (w, *slots)))
    assert torch.equal(grad, before[1])
    overload = getattr(torch.ops.tfnb, op).default
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(overload, (w, grad, slots), {"lr": 0.1, **made.settings}, test_utils=tests)


@pytest.mark.parametrize("op", sorted(CASES.keys() - {"muon", "sparse_adam"}))
def test_a_step_that_fails_half_way_has_written_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, w, grad = rule(op), values(op, torch.float32, 0)[0], values(op, torch.float32, 1)[0]
    row = (w, grad, *made.initial(w).values())
    before = [x.clone() for x in row]

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    for name in ("_foreach_addcmul_", "_foreach_add_", "_foreach_addcdiv_", "_foreach_copy_"):
        monkeypatch.setattr(torch, name, fail)
    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(MemoryError):
        FUSED[f"tfnb.{op}.default"]([row], lr=0.1, **made.settings)
    assert all(map(torch.equal, row, before))
