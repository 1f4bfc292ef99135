"""The benchmark of packs at a small size: counters of what was carried out are those of the plan."""

from __future__ import annotations

import json

import pytest
import torch

from tests.benchmarks.bench_packs import FIRST, LAST, ORDERS, GptTraining, main


def test_packs_of_a_small_gpt_move_less_and_last_less_than_lru(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        found = main(["--layers", "6", "--width", "32", "--steps", "1"])
    finally:
        torch.set_num_threads(threads)
    rows = found["rows"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"].keys() == rows.keys() == ORDERS.keys()
    first, last = rows[FIRST], rows[LAST]
    assert last["MB"] < first["MB"] / 3 and last["gradient"] == 0.0 and last["weight"] < 3
    assert first["gradient"] == pytest.approx(16) and first["weight"] > 20
    assert all(one >= 1 for one in first["times the last"])


def test_every_order_is_carried_out_with_the_bytes_of_its_plan() -> None:
    made = GptTraining(layers=4, width=32)
    made.budget = max(made.step(order).least for order, _ in ORDERS.values())
    done = {name: made.ran(name) for name in ORDERS}
    assert len({run.loaded + run.stored for run in done.values()}) > 4
    losses = [next(iter(run.fetched.values())) for run in done.values()]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
