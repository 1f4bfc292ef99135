"""The scheduler's registry of tfnb clusters: its table by random calls, and as real notebooks write it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from dask import config as dask_config
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tests.cluster.conftest import worker_processes
from tests.cluster.test_cuts import Counters
from tests.cluster.test_lost_scheduler import free_port
from tests.cluster.test_members import kill, member_of, until
from tfnb.cluster import connected
from tfnb.cluster.members.registry import ClusterTable
from tfnb.errors import Fenced, VersionMismatch

CALLS = st.tuples(
    st.sampled_from(["open", "write", "close", "leave"]), st.sampled_from("abc"), st.sampled_from(["me", "you"]),
    st.integers(-1, 1),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(CALLS, max_size=40))
def test_the_table_writes_for_who_read_the_last_revision_and_gives_no_epoch_twice(calls: list[Any]) -> None:
    table, model, epochs = ClusterTable(), dict[str, dict[str, Any]](), list[int]()
    for number, (call, cluster, client, behind) in enumerate(calls):
        match call:
            case "open":
                entry = table.open(cluster, client)
                if cluster not in model:
                    epochs.append(entry["epoch"])
                    model[cluster] = {
                        "client": client, "epoch": entry["epoch"], "revision": 0, "write": "", "tasks": {}, "copy": {},
                    }  # fmt: skip
            case "write":
                mine, tasks, copy = model.get(cluster), {f"task:{number % 3}": number}, {"id": str(number)}
                found = table.write(cluster, 0 if mine is None else mine["revision"] + behind, str(number), tasks, copy)
                if mine is not None and not behind:
                    mine |= {"revision": mine["revision"] + 1, "write": str(number), "copy": copy}
                    mine["tasks"] |= tasks
                facts = None if mine is None else {name: mine[name] for name in ("epoch", "revision")}
                assert found == (None if facts is None else {**facts, "is_written": not behind})
            case "close":
                table.close(cluster)
                model.pop(cluster, None)
            case "leave":
                assert table.leave(client) == [each for each in model if model[each]["client"] == client]
                model = {each: entry for each, entry in model.items() if entry["client"] != client}
        assert table.clusters == model
    assert epochs == sorted(set(epochs))


def asked(client: Client, method: str, **arguments: Any) -> Any:
    """What the registry of a client's scheduler answers."""
    return client.sync(client.scheduler.tfnb_registry, method=method, **arguments)


def entry(client: Client, cluster: Any) -> Any:
    return asked(client, "read", cluster=cluster._registered.cluster)["entry"]


def test_who_joins_and_who_leaves_is_in_the_registry_with_its_incarnation(dask: Client, connect: Any) -> None:
    cluster = connect(2)
    first = entry(dask, cluster)
    members = {m.name: m for m in (*cluster._engine.servers, *cluster._engine.tasks)}
    assert {name: task[2] for name, task in first["tasks"].items()} == {
        name: member.peer.incarnation for name, member in members.items()
    }
    assert {tuple(task[3]) for task in first["tasks"].values()} == {m.shards for m in members.values()}
    kill(member_of(cluster, "task:1"))
    until(lambda: "task:1" not in entry(dask, cluster)["tasks"])
    until(lambda: cluster.tasks == ("task:0", "task:1"))
    again = entry(dask, cluster)
    assert again["revision"] == first["revision"] + 2 and again["epoch"] == first["epoch"] == cluster._engine.epoch
    assert again["tasks"]["task:1"][2] == member_of(cluster, "task:1").peer.incarnation != first["tasks"]["task:1"][2]
    assert f"revision {again['revision']}" in str(cluster.status())


def test_each_connection_has_an_epoch_of_its_own_and_leaves_no_entry(dask: Client, connect: Any) -> None:
    before = connect(2)
    before.close()
    until(lambda: entry(dask, before) is None)
    after = connect(2)
    assert after._engine.epoch > before._engine.epoch
    pings = (after._link.call(m.peer, "ping", epoch=after._engine.epoch) for m in after._engine.tasks)
    assert {dask.sync(lambda call=call: call).meta["epoch"] for call in pings} == {after._engine.epoch}


def test_a_notebook_whose_entry_is_somebody_elses_goes_on_without_the_cluster(dask: Client, connect: Any) -> None:
    c = Counters()
    cluster = connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    asked(dask, "close", cluster=cluster._registered.cluster)
    kill(member_of(cluster, "task:1"))  # the next that is written
    until(lambda: connected.connected() is None)
    with pytest.raises(Fenced, match="connect again"):
        cluster.run(None, [])
    with pytest.warns(UserWarning, match="the cluster was lost: runs are here now"):
        tfnb.run(c.train, {c.x: torch.ones(4)})


def test_a_connection_that_fails_leaves_no_entry(dask: Client, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = connect(2)
    before = _clusters(cluster)
    cluster.close()
    monkeypatch.setattr("tfnb.cluster.members.deploy.versions", lambda: {"tfnb": "9.9"})
    with pytest.raises(VersionMismatch):
        tfnb.connect(dask)
    until(lambda: _clusters(cluster) == before - 1)


@pytest.mark.slow
def test_workers_that_come_together_are_all_in_the_registry() -> None:
    with (
        worker_processes(2) as client,
        tfnb.connect(client, ps=1) as cluster,
    ):
        client.cluster.scale(5)
        until(lambda: len(cluster.tasks) == 4)
        until(lambda: set(entry(client, cluster)["tasks"]) == {*cluster.tasks, *cluster.servers})
        client.cluster.scale(3)
        until(lambda: len(cluster.tasks) == 2)
        until(lambda: set(entry(client, cluster)["tasks"]) == {*cluster.tasks, *cluster.servers})


@pytest.mark.slow
def test_a_scheduler_that_takes_no_plugins_will_do() -> None:
    c = Counters()
    with (
        dask_config.set({"distributed.scheduler.blocked-handlers": ["register_scheduler_plugin"]}),
        worker_processes(2) as client,
        tfnb.connect(client, ps=1) as cluster,
    ):
        assert "keeps no registry" in str(cluster) and cluster._engine.epoch == 1
        old = member_of(cluster, "task:0").info["pid"]
        kill(member_of(cluster, "task:0"))
        until(lambda: cluster.tasks and member_of(cluster, "task:0").info["pid"] != old)
        tfnb.run(c.train, {c.x: torch.ones(4)})


OTHER = """
import sys, time, tfnb
cluster = tfnb.connect(sys.argv[1], ps=1)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_two_notebooks_share_a_scheduler_and_one_that_is_killed_leaves_no_entry() -> None:
    port = free_port()
    address, quiet = f"tcp://127.0.0.1:{port}", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nworkers", "2", "--nthreads", "2"]
    made: list[subprocess.Popen[Any]] = []

    def started(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        made.append(subprocess.Popen(command, **options))
        return made[-1]

    try:
        started([*scheduler, "--no-dashboard"], **quiet)
        started([*worker, "--no-dashboard"], **quiet)
        with tfnb.connect(address, ps=1) as cluster:
            assert "no registry" not in str(cluster) and "more tfnb" not in str(cluster)
            other = started([sys.executable, "-c", OTHER, address], stdout=subprocess.PIPE)
            assert other.stdout is not None and b"up\n" in iter(other.stdout.readline, b"")
            assert _clusters(cluster) == 2
            os.kill(other.pid, signal.SIGKILL)
            until(lambda: _clusters(cluster) == 1)
    finally:
        for process in reversed(made):
            process.terminate()
        for process in made:
            process.communicate(timeout=60)


def _clusters(cluster: Any) -> int:
    return int(asked(cluster.client, "read", cluster=cluster._registered.cluster)["clusters"])
