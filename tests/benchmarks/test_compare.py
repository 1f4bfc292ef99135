"""The comparison with other libraries: its networks are the published ones, and a small run writes both files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from tests.benchmarks import compare
from tests.benchmarks.peers import tfnb_off, torch_eager
from tests.benchmarks.peers.nets import LAYERS, shapes
from tests.benchmarks.peers.programs import parameters
from tests.benchmarks.peers.serve import until_final
from tests.benchmarks.report import verdict
from tests.benchmarks.rows import ROWS, Result, Target

PUBLISHED = {
    "alexnet": [23296, 307392, 663936, 884992, 590080, 37752832, 16781312, 4097000],
    "overfeat": [34944, 614656, 1180160, 4719616, 9438208, 113249280, 12587008, 4097000],
    "vgg": [1792, 73856, 295168, 590080, 1180160, 2359808, 2359808, 2359808, 102764544, 16781312, 4097000],
    "googlenet": [
        9472, 4160, 110784, 163696, 388736, 376176, 449160, 510104, 605376, 868352, 1043456, 1444080, 1025000,
    ],
}  # fmt: skip
TOTALS = {"alexnet": 61_100_840, "overfeat": 145_920_872, "vgg": 132_863_336, "googlenet": 6_998_552}


@pytest.mark.parametrize("net", LAYERS)
def test_networks_have_the_published_parameters(net: str) -> None:
    assert [sum(map(prod, layer)) for layer in shapes(net) if layer] == PUBLISHED[net]
    assert parameters(net) == sum(PUBLISHED[net]) == TOTALS[net]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_small_run_compares_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    libraries = ["torch_eager", "tfnb_off", "tf_v1", "jax_jit"]
    options = ["--quick", "--rows", "mlp-1", "--libraries", *libraries, "--out", str(tmp_path)]
    compare.main(options)
    found = json.loads((tmp_path / "compare.json").read_text())["rows"]["mlp-1"]
    table = (tmp_path / "compare.md").read_text()
    assert set(found) == set(libraries) and "| mlp-1 | tfnb_off |" in table and "load at the end" in table
    for library, result in found.items():
        if library in ("torch_eager", "tfnb_off") or "TFNB_PEERS" in os.environ:
            assert len(result["samples"]) == 5 and min(result["samples"]) > 0, result["absent"]
        elif not result["samples"]:
            assert "make bench-peers" in result["absent"] and "not timed: no " in table


@pytest.mark.slow
def test_a_row_that_misses_is_shown_with_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = tuple(Target(what, 1e-9, "torch_eager") for what in ("time", "first", "peak"))
    monkeypatch.setitem(ROWS, "mlp-1", replace(ROWS["mlp-1"], targets=never))
    compare.main(["--quick", "--rows", "mlp-1", "--libraries", "torch_eager", "tfnb_off", "--out", str(tmp_path)])
    lines = [line for line in (tmp_path / "compare.md").read_text().splitlines() if line.startswith("- mlp-1")]
    assert len(lines) == 3 and all("tfnb_off" in line for line in lines)
    step, first, made = lines
    assert "outside of torch's ops" in step and "aten::addmm" in step and "in 2 calls" in step
    assert "tfnb/recording" in first and "aten::" in made and "MiB" in made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["--device", "cuda", "--out", str(tmp_path / "found")])
    assert capsys.readouterr().out == "nothing is compared: no cuda device on this machine\n"
    assert not (tmp_path / "found").exists()


def test_full_batches_are_for_devices_and_small_ones_of_the_same_nets_for_the_cpu() -> None:
    full = {name for name, row in ROWS.items() if row.full}
    assert full == {f"{net}-full-{mode}" for net in LAYERS for mode in ("forward", "gradients", "step")}
    assert {ROWS[f"{net}-full-step"].sizes["batch"] for net in ("alexnet", "overfeat", "googlenet")} == {128}
    assert ROWS["vgg-full-step"].sizes["batch"] == 64
    assert full.isdisjoint(name for name, row in ROWS.items() if row.runs_on("cpu"))
    assert {"alexnet-step", "cold-alexnet"}.isdisjoint(name for name, row in ROWS.items() if row.runs_on("cuda"))


def test_a_library_that_computes_something_else_is_not_timed() -> None:
    wanted = {"losses": [1.0, 0.5], "moved": [[2.0, 0.3, 4]]}
    assert compare.difference({"losses": [1.0, 0.5001], "moved": [[2.0, 0.3, 4]]}, wanted, 1e-3) == ""
    assert "loss 0.6" in compare.difference({"losses": [1.0, 0.6], "moved": [[2.0, 0.3, 4]]}, wanted, 1e-3)
    assert "weight 0" in compare.difference({"losses": [1.0, 0.5], "moved": [[2.1, 0.3, 4]]}, wanted, 1e-3)
    assert "loss nan" in compare.difference({"losses": [float("nan"), 0.5], "moved": [[2.0, 0.3, 4]]}, wanted, 1e-3)


def test_verdicts_say_what_was_asked_and_found() -> None:
    results = {
        "torch_eager": Result(samples=[2.0], first=1.0), "jax_jit": Result(samples=[1.0]),
        "tfnb_off": Result(samples=[1.2], first=0.5), "tfnb_now": Result(samples=[0.1]),
    }  # fmt: skip
    ours = results["tfnb_off"]
    assert verdict(Target("time", 0.85, "fastest peer"), ours, results).endswith("fastest peer: 1.20 MISS")
    assert verdict(Target("time", 0.62, "torch_eager"), ours, results).endswith("0.60 pass")
    assert verdict(Target("first", 1.2, "torch_eager"), ours, results).endswith("0.50 pass")
    assert verdict(Target("time", 0.2, "tf_v1"), ours, results).endswith("not measured")


def test_every_row_names_libraries_that_exist() -> None:
    there = {path.stem for path in (Path(compare.__file__).parent / "peers").glob("*.py")}
    there |= {*tfnb_off.VARIANTS, *torch_eager.VARIANTS}
    assert {library for row in ROWS.values() for library in row.libraries} <= there


def test_the_final_rate_is_reached_with_the_last_change_of_code_and_not_with_a_stumble() -> None:
    quick = [0.5] * 40
    assert until_final(quick) == 0.0
    assert until_final([4.0, *quick]) == 4.0
    assert until_final([4.0, *[1.0] * 20, *quick]) == 24.0
    assert until_final([4.0, *[1.0] * 20, *quick[:20], 30.0, *quick]) == 24.0
    assert until_final([4.0, *[0.55] * 20, *quick]) == 4.0  # within nine tenths
    assert until_final(quick[:4]) is None
