"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from distributed import LocalCluster

from tfnb import doctor
from tfnb.__main__ import main
from tfnb.doctor import findings
from tfnb.errors import InvalidArgument
from tfnb.execution.compiling.package_cache import packages

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("own_packages")


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("lab", "run", "doctor", "cache", "demo"))


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctr"])
    assert ended.value.code == 2 and "doctr" in capsys.readouterr().err


def test_lab_without_jupyterlab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", None)
    assert main(["lab"]) == 1
    assert "pip install 'tfnb[lab]'" in capsys.readouterr().err


def test_lab_opens_the_notebooks(monkeypatch):
    opened = []
    fake = type(sys)("jupyterlab.labapp")
    fake.main = lambda arguments: opened.extend(arguments)
    monkeypatch.setitem(sys.modules, "jupyterlab.labapp", fake)
    assert main(["lab", "--no-browser"]) == 0
    assert Path(opened[0]) == ROOT / "notebooks" / "quickstart.ipynb" and opened[1:] == ["--no-browser"]


def test_lab_of_an_installed_wheel_copies_the_notebooks_and_opens_the_quickstart(tmp_path):
    source, wheels, installed, home = (tmp_path / name for name in ("source", "wheels", "installed", "home"))
    ignored = shutil.ignore_patterns("__pycache__", "tests", "build", "dist", ".*", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels]
    subprocess.run([*pip, source], check=True, timeout=240)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(installed)
    fake = installed / "jupyterlab"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "labapp.py").write_text("def main(arguments):\n    print(arguments)\n")
    (home / "tfnb-notebooks").mkdir(parents=True)
    (home / "tfnb-notebooks" / "gan.ipynb").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "tfnb", "lab"], cwd=home, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == str([str(Path("tfnb-notebooks", "quickstart.ipynb"))]), done.stderr
    shipped = {path.name for path in (ROOT / "notebooks").iterdir() if path.suffix in (".ipynb", ".md")}
    assert {path.name for path in (home / "tfnb-notebooks").iterdir()} == {*shipped, "pictures"}
    pictures = [sorted((at / "pictures").iterdir()) for at in (home / "tfnb-notebooks", ROOT / "notebooks")]
    assert [path.read_bytes() for path in pictures[0]] == [path.read_bytes() for path in pictures[1]] != []
    assert (home / "tfnb-notebooks" / "gan.ipynb").read_text() == "mine"
    assert (home / "tfnb-notebooks" / "quickstart.ipynb").read_bytes() == (
        ROOT / "notebooks" / "quickstart.ipynb"
    ).read_bytes()


def test_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--verbos"])
    assert "unrecognized arguments: --verbos" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_finds_everything_here():
    report = doctor(seconds=120)
    assert report.ok, report
    assert {"python", "torch", "compiler", "packages", "drawing", "cluster"} <= {
        finding.what for finding in report.findings
    }
    assert all(finding.found in report._repr_html_() for finding in report.findings if "'" not in finding.found)


def test_doctor_reports_what_fails_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("tfnb.view.graph_html", lambda graph: 1 / 0)
    monkeypatch.setattr("tfnb.connect", lambda *_, **__: 1 / 0, raising=False)
    assert main(["doctor", "--seconds", "60"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILS") == 2 and "ZeroDivisionError" in printed


@pytest.fixture
def silent():
    """The address of a socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_doctor_answers_while_a_cluster_does_not(silent, monkeypatch):
    monkeypatch.setattr(sys.modules["tfnb.doctor"], "_here", list)  # what else it looks at may take longer here
    said = []
    *others, cluster = findings(silent, seconds=4, waits=said.append)
    assert len(others) > 10 and all(finding.state in ("ok", "-") for finding in others), others
    assert cluster.what == "cluster" and cluster.state in ("FAILS", "?") and silent in cluster.found
    assert said and all(silent in line and "s are left" in line for line in said)


def test_doctor_of_a_fresh_process_answers_in_time_and_says_what_it_waits_for(silent):
    done = subprocess.run(
        [sys.executable, "-m", "tfnb", "doctor", silent, "--seconds", "2.5"], capture_output=True, text=True, timeout=60
    )
    assert "waiting for " in done.stderr and "s are left" in done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["python"].startswith("   ok") and list(lines)[-1] == "cluster"
    assert silent in lines["cluster"] or "no answer in time" in lines["cluster"]
    assert done.returncode == ("FAILS" in done.stdout)


def test_doctor_names_an_address_where_nobody_listens():
    port = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
    port.close()
    *_, cluster = findings(address, seconds=30)
    assert cluster.state == "FAILS" and f"nobody listens at {address}" in cluster.found


def test_doctor_gives_up_a_check_that_hangs(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(sys.modules["tfnb.doctor"], "_devices", lambda: str(ended.wait(30)))
    monkeypatch.setattr("tfnb.connect", lambda *_, **__: 1 / 0, raising=False)
    found = {finding.what: finding for finding in findings(seconds=2)}
    ended.set()
    assert [found[what].state for what in ("devices", "drawing", "cluster")] == ["?", "?", "FAILS"]
    assert "torch is loaded" in found["devices"].found and "--seconds" in found["devices"].found


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"seconds": "1"}, {"seconds": float("nan")}, {"address": 8786}])
def test_doctor_refuses_what_is_no_time_and_no_address(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        doctor(**wrong)


def test_the_command_of_the_doctor_refuses_no_time(capsys):
    assert main(["doctor", "--seconds", "-1"]) == 2
    assert "seconds=-1.0" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_asks_the_workers_at_an_address_for_their_versions():
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        *_, found = findings(cluster.scheduler_address, seconds=60)
        assert found.state == "ok" and "1 worker with the versions of this process" in found.found
        assert not cluster.scheduler.tasks


def test_cache_is_shown_and_cleared(capsys):
    cache = packages()
    draft = cache.draft()
    (draft / "step.so").write_bytes(b"x" * 3_000_000)
    cache.keep("a1", draft, {})
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(cache.folder) in shown and "MiB" in shown and not shown.startswith("0 packages")
    assert main(["cache", "--clear"]) == 0
    assert "\n0 packages, 0.0 of" in capsys.readouterr().out
    assert cache.find("a1") is None


@pytest.mark.slow
def test_demo_ends_with_one_line_of_json(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfnb", "demo", "--out", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert set(summary) == {
        "demo", "nodes", "test_accuracy_local", "test_accuracy_cluster", "record_seconds", "report",
    }  # fmt: skip
    assert summary["demo"] == "digits" and summary["nodes"] > 80
    assert summary["test_accuracy_local"] >= 0.97 and summary["test_accuracy_cluster"] >= 0.97
    assert "<svg" in Path(summary["report"]).read_text()
