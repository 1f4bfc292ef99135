"""tfnb side by side with PyTorch, TensorFlow and JAX: `python -m tests.benchmarks.compare [--quick] [--rows NAME ...]`.

Each library runs in a process of its own on the same processors, from the same weights and data. The losses and what
the weights moved are compared first; a library that differs is not timed. Then the libraries take turns, block by
block. TFNB_PEERS names the interpreter that has TensorFlow and JAX (`make bench-peers` makes one); what is absent is
named with the reason. A row of ours that misses a target is profiled after it was timed. The first table is `rows.py`;
results go to compare.json and compare.md.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import report
from tests.benchmarks.rows import COMPILERS, QUICK, ROWS, Result, Row, write

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 540.0  # seconds for one answer
MOST_STEPS = 2000  # in a block
BEGUN = 4  # steps whose times tell when a library is warm
COLD_ROUNDS = 5  # processes of each library in a row of first steps
SETTLING = 180.0  # seconds that steps are run until their code no longer changes


@dataclass(frozen=True)
class How:
    """Timed blocks of each library, their length, threads of each library, and "wall" or "cpu" time."""

    rounds: int
    seconds: float
    threads: int
    clock: str
    device: str = "cpu"


class Failed(Exception):
    """A library cannot take part; the message says why."""


def absent(device: str) -> str:
    """Why nothing can run on this device; empty where it can."""
    kind = torch.device(device).type
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if kind == "cpu" or (here is not None and here.type == kind) else f"no {kind} device on this machine"


def interpreter(library: str, device: str = "cpu") -> str:
    """The Python that has the library; raises Failed where there is none, or not for this device."""
    if library.startswith(("torch", "tfnb")):
        if absent(device):
            raise Failed(absent(device))
        return sys.executable
    if device != "cpu":
        raise Failed("installed for the CPU")
    found = os.environ.get("TFNB_PEERS") or str(ROOT / ".venv-peers" / "bin" / "python")
    if not Path(found).exists():
        raise Failed(f"no {found}: `make bench-peers`, or TFNB_PEERS")
    return found


class Peer:
    """The process of one library, on as many processors as threads are asked for."""

    def __init__(self, library: str, how: How) -> None:
        command = [interpreter(library, how.device), "-W", "ignore", "-m", "tests.benchmarks.peers.serve", library]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(how.threads)}
        processors = sorted(os.sched_getaffinity(0))[: how.threads]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, cwd=ROOT, env=os.environ | quiet,
            preexec_fn=lambda: os.sched_setaffinity(0, processors),
        )  # fmt: skip
        self.imported = self._answer()["import"]

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise Failed(f"no answer in {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            last = (self.log.read().decode(errors="replace").strip().splitlines() or ["nothing said"])[-1]
            raise Failed(f"ended with {self.process.wait()}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


def begun(peer: Peer, row: Row, file: Path, how: How, result: Result) -> dict[str, Any]:
    """The first steps: losses, and the moves after as many steps as are compared."""
    answer = peer.ask(
        "start", program=row.program, sizes=row.sizes, mode=row.mode, entry=row.entry, rate=row.rate,
        threads=how.threads, clock=how.clock, device=how.device, file=str(file),
    )  # fmt: skip
    result.first, result.imported, result.version = answer["first"], peer.imported, answer["version"]
    more = peer.ask("advance", steps=row.checked - 1)
    found = {"losses": [answer["loss"], *more["losses"]], "moved": peer.ask("state")["moved"]}
    later = peer.ask("advance", steps=max(BEGUN - row.checked, 0))
    result.begun = [answer["first"], *more["seconds"], *later["seconds"]]
    return found


def difference(got: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> str:
    """What differs, in words; empty where nothing does."""
    for place, (a, b) in enumerate(zip(got["losses"], wanted["losses"], strict=True)):
        if not abs(a - b) <= tolerance * max(abs(b), 1e-3):
            return f"loss {a:.6g} instead of {b:.6g} at step {place + 1}"
    largest = max((length for length, *_ in wanted["moved"]), default=0.0)
    for place, ((a, total, _), (b, wanted_total, size)) in enumerate(zip(got["moved"], wanted["moved"], strict=True)):
        room = tolerance * max(b, 1e-3 * largest)
        if not abs(a - b) <= room or not abs(total - wanted_total) <= room * size**0.5:
            return f"weight {place} moved {a:.6g} (sum {total:.6g}) instead of {b:.6g} (sum {wanted_total:.6g})"
    return ""


def compare(row: Row, libraries: tuple[str, ...], how: How) -> dict[str, Result]:
    """One row: start everybody, compare, take turns."""
    results = {library: Result() for library in row.libraries if library in libraries}
    peers: dict[str, Peer] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.npz"
        write(row, file)
        wanted: dict[str, Any] | None = None
        try:
            for library, result in results.items():
                try:
                    peers[library] = Peer(library, how)
                    got = begun(peers[library], row, file, how, result)
                    wanted = wanted or got
                    different = difference(got, wanted, row.tolerance)
                    if different:
                        raise Failed(different)
                except Failed as error:
                    result.absent = str(error)
                    if library in peers:
                        peers.pop(library).close()
            if row.cold:
                colds(row, peers, results, file, how)
            else:
                take_turns(peers, results, how)
            explain(row, peers, results)
        finally:
            for peer in peers.values():
                peer.close()
    return results


def colds(row: Row, peers: dict[str, Peer], results: dict[str, Result], file: Path, how: How) -> None:
    """First steps of fresh processes, one library after the other."""
    for turn in range(min(how.rounds, COLD_ROUNDS)):
        for library in list(peers):
            if turn and library in COMPILERS:  # once is long enough
                continue
            peers[library].close()
            peers[library] = Peer(library, how)
            begun(peers[library], row, file, how, results[library])
            results[library].samples.append(results[library].first)
            if not turn:
                answer = peers[library].ask("settle", seconds=SETTLING)
                later, results[library].reached = answer["seconds"], answer["reached"]
                results[library].note = peers[library].ask("peak")["note"]
                if later:
                    results[library].settled = sum(results[library].begun) + later


def take_turns(peers: dict[str, Peer], results: dict[str, Result], how: How) -> None:
    """Blocks of about so many seconds, A B A B; the first of each is not counted."""
    steps = {}
    for library, peer in peers.items():
        one = peer.ask("block", steps=1)["seconds"]
        if one < how.seconds:
            one = min(peer.ask("block", steps=1)["seconds"] for _ in range(3))
        steps[library] = min(max(round(how.seconds / max(one, 1e-7)), 1), MOST_STEPS)
    for turn in range(how.rounds + 1):
        for library, peer in peers.items():
            took = peer.ask("block", steps=steps[library])["seconds"] / steps[library]
            if turn:
                results[library].samples.append(took)
    for library, peer in peers.items():
        answer = peer.ask("peak")
        results[library].peak, results[library].note = answer["peak"], answer["note"]


def explain(row: Row, peers: dict[str, Peer], results: dict[str, Result]) -> None:
    """Profiles of our own where a target was missed."""
    for library, peer in peers.items():
        of = report.missed(row, library, results)
        if of:
            results[library].profile = peer.ask("profile", of=of)["lines"]


def main(argv: list[str]) -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two rows without compilers, in less than a minute")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="rows whose names start so")
    parser.add_argument("--libraries", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=20, help="timed blocks of each library")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a block")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--device", default="auto", help="cpu, or cuda for torch and tfnb; auto: cuda where there is one"
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: of all threads, for ratios on a machine that is busy with something else; with --threads 1",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args(argv)
    device = ("cpu" if absent("cuda") else "cuda") if options.device == "auto" else options.device
    if absent(device):
        print(f"nothing is compared: {absent(device)}")
        return
    chosen = [row for row in ROWS.values() if row.name.startswith(tuple(options.rows)) and row.runs_on(device)]
    if not chosen:
        print(f"nothing is compared: no row of {', '.join(options.rows)} runs on {device}")
        return
    how = How(options.rounds, options.seconds, options.threads, options.clock, device)
    if options.quick:
        chosen = [row for row in chosen if row.name in QUICK] or chosen
        how = replace(how, rounds=5, seconds=0.05)
    every = dict.fromkeys(library for row in chosen for library in row.libraries)
    libraries = tuple(options.libraries or [name for name in every if not (options.quick and name in COMPILERS)])
    for folder in ("tfnb", "kernels", "tests/benchmarks", "tests/models"):  # as pip does with those of the peers
        compileall.compile_dir(ROOT / folder, quiet=2)
    facts = report.machine(device) | asdict(how)
    table: dict[str, dict[str, Result]] = {}
    for row in chosen:
        table[row.name] = compare(row, libraries, how)
        report.write(facts | {"load at the end": os.getloadavg()}, table, options.out)  # each row is kept at once
        print(report.markdown_rows(row, table[row.name]), flush=True)
    print(f"written: {options.out / 'compare.md'}, compare.json")


if __name__ == "__main__":
    main(sys.argv[1:])
