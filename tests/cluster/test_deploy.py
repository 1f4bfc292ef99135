"""Starting a cluster of processes: scripts that are not run again, and what is said while it takes long."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask
import distributed.comm.tcp
import pytest
import torch
from distributed import LocalCluster, Worker, WorkerPlugin

import tfnb
from tfnb.cluster.members import connection, deploy
from tfnb.errors import InvalidArgument
from tfnb.magics.magics import TfnbMagics

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SCRIPT = """
import os, signal, time, torch, tfnb
print("begin")
cluster = tfnb.connect(1)
with tfnb.record():
    y = tfnb.placeholder(torch.ones(2), name="x") * 3
print("got", tfnb.run(y, {"x": torch.ones(3)}).tolist())
pids = cluster.client.run(os.getpid)
os.kill(next(iter(pids.values())), signal.SIGKILL)
end = time.monotonic() + 100
while not set(cluster.client.run(os.getpid, on_error="ignore").values()) - set(pids.values()):
    assert time.monotonic() < end
    time.sleep(0.2)
print("another worker is there")
cluster.close()
"""


def ran(folder: Path, *command: str) -> str:
    """What a command printed; it ends well."""
    found = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once_also_when_a_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT", "1s")  # as on a machine that is 15 times slower
    (tmp_path / "script.py").write_text(SCRIPT)
    out = ran(tmp_path, "script.py")
    assert out.count("begin") == 1 and "got [3.0, 3.0, 3.0]" in out and "another worker is there" in out


@pytest.mark.slow
def test_the_quickstart_runs_as_a_script(tmp_path: Path) -> None:
    ran(NOTEBOOKS, "-m", "nbconvert", "--to", "script", "quickstart.ipynb", "--output-dir", str(tmp_path))
    assert ran(tmp_path, "-m", "IPython", "quickstart.py").count("of the held-out digits are right") == 2


def test_a_main_module_that_reset_emptied_starts_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__spec__")
    with deploy._light_start():
        assert main.__spec__ is not None and main.__spec__.name == "__main__"
    assert not hasattr(main, "__spec__")


def test_the_main_module_is_as_before_whatever_happens() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__
    with pytest.raises(KeyboardInterrupt), deploy._light_start():
        assert main.__spec__ is not None and main.__spec__.name.endswith("__main__")
        raise KeyboardInterrupt
    assert main.__spec__ is before


def test_progress_is_said_once_each_and_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = connection.ConnectProgress()
    progress.found("workers", ["0"], 3)
    progress.say()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(connection, "SAID_AFTER", 0.0)
    for up in ["0"], ["0"], ["0", "2"]:
        progress.found("workers", up, 3)
        progress.say()
    assert capsys.readouterr().out == "connect: 1 of 3 workers are up: 0\nconnect: 2 of 3 workers are up: 0, 2\n"


def test_the_default_deadline_is_for_busy_machines() -> None:
    assert inspect.signature(tfnb.connect).parameters["timeout"].default == 120
    assert TfnbMagics.tfcluster.parser.parse_args([]).timeout == 120


def _looks(server: Any) -> tuple[float, ...]:
    """Milliseconds between two looks of a worker's or a nanny's monitors: of its process, and of its memory."""
    return tuple(server.periodic_callbacks[name].callback_time for name in ("monitor", "memory_monitor"))


def _settings() -> tuple[object, ...]:
    """What a worker does of what costs: a profile of Dask's tasks, and putting large messages together again."""
    profile = dask.config.get("distributed.worker.profile.enabled")
    return profile, distributed.comm.utils.OFFLOAD_THRESHOLD, distributed.comm.tcp.TCP.max_shard_size


def _said(text: str) -> None:
    try:
        raise OSError("Stream is closed")
    except OSError:
        logging.getLogger("distributed.worker").exception(text)


class SaysAtItsEnd(WorkerPlugin):
    """Logs an error in each worker that closes, as a heartbeat does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, worker: Worker) -> None:
        _said("Failed to communicate with scheduler during heartbeat.")
        (self.folder / str(os.getpid())).touch()


@pytest.mark.slow
def test_errors_of_workers_are_shown_but_not_those_while_the_cluster_closes(
    started_afresh: None, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with tfnb.connect(1) as cluster:
        cluster.client.run(_said, "An error that counts.")
        cluster.client.register_plugin(SaysAtItsEnd(tmp_path))
    out = "".join(capfd.readouterr())
    assert len(list(tmp_path.iterdir())) == 2, "one task and one server"
    assert out.count("An error that counts.") == 2 and "heartbeat" not in out


@pytest.mark.slow
def test_workers_that_connect_starts_have_the_threads_and_the_memory_that_were_asked_for(started_afresh: None) -> None:
    has_bokeh = find_spec("bokeh") is not None
    with tfnb.connect(1, threads=2, memory="900MB", dashboard=has_bokeh) as cluster:
        workers = cluster.client.scheduler_info(n_workers=-1)["workers"].values()
        assert [(w["nthreads"], w["memory_limit"]) for w in workers] == [(2, 900_000_000)] * 2
        assert set(cluster.client.run(torch.get_num_threads).values()) == {2}
        assert set(cluster.client.run(_settings).values()) == {(False, False, 512 << 20)}
        looks = [*map(_looks, cluster.client.cluster.workers.values())]  # of the nannies, in this process
        looks += cluster.client.run(lambda dask_worker: _looks(dask_worker)).values()
        assert looks == [(2000, 500)] * 4
        assert cluster.dashboard_link.startswith("http") == has_bokeh
        with pytest.raises(InvalidArgument, match=r"threads=2: this cluster runs already"):
            tfnb.connect(cluster.client, threads=2)


def _process() -> tuple[int, object]:
    return os.getpid(), (_settings(), dask.config.get("distributed"))


@pytest.mark.slow
def test_workers_that_come_later_have_the_settings_of_the_first_ones(started_afresh: None) -> None:
    with tfnb.connect(1) as cluster:
        client = cluster.client
        first = dict(client.run(_process).values())
        os.kill(next(iter(first)), signal.SIGKILL)
        client.cluster.scale(3)
        end = time.monotonic() + 100
        while len(later := dict(client.run(_process, on_error="ignore").values()).keys() - first.keys()) < 2:
            assert time.monotonic() < end, later
            time.sleep(0.2)
        found = dict(client.run(_process).values())
        assert {pid: found[pid] for pid in later} == dict.fromkeys(later, first.popitem()[1])


def test_a_process_that_does_not_end_in_time_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = tfnb.Variable(torch.zeros(2))
    with tfnb.record():
        step = weight.assign_add(torch.ones(2))
    close = LocalCluster.close

    def late(self: LocalCluster, timeout: float | None = None) -> None:
        close(self, timeout)
        raise TimeoutError

    monkeypatch.setattr(LocalCluster, "close", late)
    cluster = tfnb.connect(1, ps=1)
    tfnb.run(step)
    with pytest.warns(UserWarning, match="did not end within Dask's deadline"):
        cluster.close()
    assert weight.value().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("asked", [{"threads": 0}, {"threads": True}, {"memory": "lots"}, {"memory": "2XB"}])
def test_bad_options_of_workers_are_refused_before_anything_starts(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(asked))):
        tfnb.connect(1, **asked)
