"""Every rule of the papers, a schedule and moving averages on parameter servers: the values of the local run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tfnb
from tfnb import train

RULES = {
    "Momentum": train.Momentum, "Nesterov": train.Nesterov, "Adagrad": train.Adagrad, "Adadelta": train.Adadelta,
    "RMSProp": train.RMSProp, "Adam": train.Adam, "Ftrl": train.Ftrl,
    "LBFGS": lambda lr: train.LBFGS(lr, history_size=3),
    "schedule": lambda lr: train.Momentum(train.warmup(3, train.exponential_decay(lr, 2, 0.5))),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "run"])
def test_every_rule_takes_the_local_steps_on_two_servers(connect, mode):
    torch.manual_seed(0)
    models = {name: nn.Linear(3, 2).double() for name in RULES}
    data = torch.randn(24, 3, dtype=torch.float64)
    means = train.ExponentialMovingAverage(0.5)
    with tfnb.record("papers"):
        x = tfnb.placeholder(data[:4], name="x")
        steps = [RULES[n](0.1).minimize((torch.tanh(m(x)) - 1).square().mean()) for n, m in models.items()]
        step = tfnb.group(*steps, means.apply([models["Adam"].weight]))
    variables = [*step.graph.variables]
    start = {v: v.value() for v in variables}

    def trained() -> dict[str, torch.Tensor]:
        if mode == "sync":
            assert tfnb.fit(step, {x: data}, epochs=2, batch_size=6).steps == 8
        else:
            for i in range(8):
                tfnb.run(step, {x: data[3 * i : 3 * i + 3]})
        return {v.name: v.value() for v in variables}

    expected = trained()
    for v in variables:
        v.assign(start[v])
    cluster = connect(2)
    found = trained()
    cluster.close()
    assert not torch.equal(expected["Momentum/steps"], torch.tensor(0))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")
