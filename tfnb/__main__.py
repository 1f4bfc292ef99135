"""The command line: ``tfnb lab``, ``run``, ``doctor``, ``cache`` and ``demo``. Its output is the terminal."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

COPIES = Path("tfnb-notebooks")  # in the working folder: where an installed package brings its notebooks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser("tfnb", description="Dataflow graphs in a notebook, on PyTorch and Dask.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lab = commands.add_parser(
        "lab", help=f"open JupyterLab on the quickstart, with {COPIES}/ made here; takes its options too"
    )
    lab.set_defaults(run=_lab)
    run = commands.add_parser("run", help="run a notebook here, cell by cell, and keep its outputs")
    run.add_argument("notebook", type=Path)
    run.add_argument("--cluster", metavar="ADDRESS", help="connect to it first; 4: to so many tasks in processes here")
    run.add_argument(
        "-p", nargs=2, action="append", default=[], dest="parameters", metavar=("NAME", "VALUE"),
        help="a value for a name of the cell tagged parameters",
    )  # fmt: skip
    run._negative_number_matcher = re.compile(r"-\.?\d")  # `-p lr -1e-3`: argparse takes it for an option before 3.14
    run.add_argument("-o", type=Path, dest="out", metavar="OUT.ipynb", help="the executed notebook (NAME.run.ipynb)")
    run.add_argument("--timeout", type=float, metavar="S", help="seconds that a cell may take")
    run.set_defaults(run=_run)
    doctor = commands.add_parser("doctor", help="say what works here, within 10 seconds")
    doctor.add_argument("address", nargs="?", help="of a Dask scheduler to ask; else a cluster is started here")
    doctor.add_argument("--seconds", type=float, default=9.0, help="time for all checks (9)")
    doctor.set_defaults(run=_doctor)
    cache = commands.add_parser("cache", help="the steps that were compiled, as they are kept on disk")
    cache.add_argument("--clear", action="store_true", help="remove them")
    cache.set_defaults(run=_cache)
    demo = commands.add_parser("demo", help="the main job on real data, here and on a cluster in processes")
    demo.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the report")
    demo.set_defaults(run=_demo)
    options, further = parser.parse_known_args(arguments)
    if further and options.run is not _lab:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    options.further = further
    return options.run(options)


def _lab(options: argparse.Namespace) -> int:
    try:
        start = import_module("jupyterlab.labapp").main
    except ImportError:
        print("JupyterLab is not installed: pip install 'tfnb[lab]'", file=sys.stderr)
        return 1
    notebook = import_module("tfnb.tutorials").opened(COPIES)
    print(f"opening {notebook}")
    return start([str(notebook), *options.further]) or 0


def _run(options: argparse.Namespace) -> int:
    runs = import_module("tfnb.notebook_run")
    try:
        parameters = {name: runs.parameter(value) for name, value in options.parameters}
        run = runs.NotebookRun(
            options.notebook, options.out, cluster=options.cluster, parameters=parameters, timeout=options.timeout
        )
    except (runs.InvalidArgument, runs.Unavailable) as error:
        print(error, file=sys.stderr)
        return runs.NOT_BEGUN
    return run.run()


def _doctor(options: argparse.Namespace) -> int:
    checks = import_module("tfnb.doctor")
    found = []
    try:
        for finding in checks.findings(options.address, seconds=options.seconds, waits=_waits):
            found.append(finding)
            print(finding, flush=True)
    except checks.InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    status = 0 if checks.DoctorReport(tuple(found)).ok else 1
    if any(finding.state == "?" for finding in found):
        os._exit(status)  # what did not answer in time does not keep the process, either
    return status


def _waits(line: str) -> None:
    print(f"       waiting for {line}", file=sys.stderr, flush=True)


def _cache(options: argparse.Namespace) -> int:
    packages = import_module("tfnb.execution.compiling.package_cache").packages()
    if options.clear:
        print(f"{packages.clear()} packages removed")
    print(packages)
    return 0


def _demo(options: argparse.Namespace) -> int:
    return import_module("tfnb.demo").demo(options.out)


if __name__ == "__main__":
    sys.exit(main())
