"""Training scripts as notebooks beside the same scripts in plain PyTorch: the time of their training loops.

Both forms of each script (`tests/models/scripts.py`, `tests/models/further_scripts.py`) stand in one process, in
float64. A round runs the whole loop of both in turns, loaders, tests and schedulers included, from the same weights,
states and seeds, and their losses are compared. Rounds before the first one that counts warm up. The last line is JSON:
of each script the medians of the rounds' ratios, of processor time and of wall time, and milliseconds of a loop.

    python -m tests.benchmarks.bench_scripts [--rounds 15] [--warm 10] [--only WORDS ...] [--save FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests.benchmarks.report import machine
from tests.models.further_scripts import FURTHER
from tests.models.script import IMPORTS, Script
from tests.models.scripts import SCRIPTS

TARGETS = {"median of all": 1.0, "each": 1.1}
_PLAIN = (bool, int, float, type(None))


class TrainingLoop:
    """The loop of one form of a script in its namespace, and the state from which each round begins."""

    def __init__(self, space: dict[str, Any], source: str) -> None:
        self.space, self.code = space, compile(source, "<loop>", "exec")
        self.numbers = {name: value for name, value in space.items() if isinstance(value, _PLAIN)}
        stateful = [value for value in space.values() if hasattr(value, "state_dict") and not isinstance(value, type)]
        self.states = [(value, copy.deepcopy(value.state_dict())) for value in stateful]
        seed()
        exec(self.code, space)  # from here on the optimizers have all of their slots
        for owner, state in self.states:
            if isinstance(owner, torch.optim.Optimizer):
                state["state"] = copy.deepcopy(owner.state_dict()["state"])
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def round(self) -> list[torch.Tensor]:
        """Run the loop once from the first state; its log."""
        self.space.update(self.numbers)
        self.space["log"].clear()
        for owner, state in self.states:
            restore(owner, state)
        seed()
        cpu, wall = time.process_time(), time.perf_counter()
        exec(self.code, self.space)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return [torch.as_tensor(value).detach().clone() for value in self.space["log"]]


def seed() -> None:
    """All generators that scripts draw from begin anew."""
    for begin in (torch.manual_seed, random.seed, np.random.seed):
        begin(1)


def restore(owner: Any, state: dict[str, Any]) -> None:
    """Load a state in place: `load_state_dict` of an optimizer would make new tensors in each round."""
    slots = owner.state_dict()["state"] if isinstance(owner, torch.optim.Optimizer) else {}
    if not slots or not all(isinstance(value, torch.Tensor) for row in slots.values() for value in row.values()):
        owner.load_state_dict(copy.deepcopy(state))
        return
    for key, row in slots.items():
        for name, value in row.items():
            value.copy_(state["state"][key][name])
    for group, kept in zip(owner.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in kept.items() if name != "params"})


def both(shell: InteractiveShell, script: Script) -> dict[str, TrainingLoop]:
    """The loops of the plain script and of the notebook."""
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS + script.shared, plain)
    *cells, loop = script.cells
    shell.user_ns.clear()
    shell.init_user_ns()
    for cell in ("%load_ext tfnb", "import tfnb", *cells):
        with capture_output():
            shell.run_cell(cell).raise_error()
    return {"torch": TrainingLoop(plain, script.plain), "tfnb": TrainingLoop(shell.user_ns, loop)}


def checked(name: str, logs: dict[str, list[torch.Tensor]]) -> None:
    """AssertionError where a loss of the notebook is not the one of the script."""
    assert len(logs["tfnb"]) == len(logs["torch"]), name
    for place, (here, there) in enumerate(zip(logs["tfnb"], logs["torch"], strict=True)):
        where = f"{name}, {place} of its log: "
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-8, msg=lambda text, where=where: where + text)


def measured(shell: InteractiveShell, name: str, script: Script, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds after the warm-up: ratios of the pairs, and milliseconds of both."""
    loops = both(shell, script)

    def turns(count: int) -> None:
        for turn in range(count):
            order = list(loops) if turn % 2 else list(reversed(loops))
            gc.collect()
            checked(name, {which: loops[which].round() for which in order})

    until = time.perf_counter() + options.warm
    turns(2)
    while time.perf_counter() < until:
        turns(2)
    for loop in loops.values():
        loop.cpu.clear()
        loop.wall.clear()
    turns(options.rounds)
    ours, theirs = loops["tfnb"], loops["torch"]
    return {
        "processor time": median_ratio(ours.cpu, theirs.cpu),
        "wall": median_ratio(ours.wall, theirs.wall),
        "tfnb ms": 1e3 * statistics.median(ours.cpu),
        "torch ms": 1e3 * statistics.median(theirs.cpu),
    }


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of loops that count")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds of rounds before those")
    parser.add_argument("--only", nargs="*", default=[], help="scripts whose names have one of these words")
    parser.add_argument("--save", type=Path, help="write the result there, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    rows = {}
    for name, script in (SCRIPTS | FURTHER).items():
        if not options.only or any(word in name for word in options.only):
            row = rows[name] = measured(shell, name, script, options)
            print(f"{name:55} " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    ratios = [row["processor time"] for row in rows.values()]
    summary = {"median of all": statistics.median(ratios), "largest": max(ratios), "targets": TARGETS}
    facts = {"machine": machine(), "torch": torch.__version__, "rounds": options.rounds, "warm s": options.warm}
    result = {**facts, **summary, "rows": rows}
    if options.save:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
