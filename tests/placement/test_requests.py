"""What nodes ask for: device strings, and errors that name the constraint where no place meets it."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.graph.device_request import DeviceRequest, parse
from tfnb.placement.placement import Piece
from tfnb.placement.requests import asked, idle_tasks, shards_asked
from tfnb.placement.shards import pack


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/job:w/replica:0/task:2/device:CPU:0", DeviceRequest("w", 0, 2, "cpu", 0)),
        ("/task:1", DeviceRequest(task=1)),
        ("task:1/cpu", DeviceRequest(task=1, kind="cpu")),
        ("cuda:3", DeviceRequest(kind="cuda", number=3)),
        ("/device:GPU:1", DeviceRequest(kind="cuda", number=1)),
        ("ps:1", DeviceRequest("ps", None, 1)),
    ],
)
def test_parts_of_a_device_string(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["nonsense", "", "/", "task:x", "task:-1", "device:TPU:0", "cpu:", "job:", "cpu:0/cuda", 3]
)
def test_what_is_no_device_is_an_error_that_names_it(text):
    with tfnb.record(), pytest.raises(InvalidArgument, match=f"device {text!r}"), tfnb.device(text):
        pass


def asking(text):
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        with tfnb.device(text):
            y = (x + 1).exp()
    return x, y


@pytest.mark.parametrize("text", ["task:99", "cuda:0", "/job:nobody/task:0", "replica:1", "meta"])
def test_a_run_names_the_constraint_that_it_cannot_meet(text):
    x, y = asking(text)
    feed = {x: torch.ones(3)}
    for run in (
        lambda: tfnb.run(y, feed),
        lambda: tfnb.Session(y.graph).make_callable(y, [x])(torch.ones(3)),
        lambda: tfnb.Session(y.graph).run(y, feed, trace=True),
        lambda: tfnb.Session(y.graph).step([y], [x]),
    ):
        with pytest.raises(InvalidArgument, match=f"explicit device specification '{text}' of node add") as caught:
            run()
        assert "recorded at" in str(caught.value)
    assert tfnb.run(x, feed).tolist() == [1, 1, 1], "what asks for nothing runs"


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:3", "/device:CPU:0", "task:0", "/job:localhost/replica:0/task:0/device:CPU:0"]
)
def test_what_is_here_is_met(text):
    x, y = asking(text)
    assert torch.equal(tfnb.run(y, {x: torch.zeros(3)}), torch.ones(3).exp())


def test_there_are_no_servers_here():
    x, y = asking("ps:0")
    with pytest.raises(InvalidArgument, match="'ps:0' of node add: there are this process: connect with ps=1"):
        tfnb.run(y, {x: torch.ones(3)})
    x, y = asking("ps:0/soft")
    assert torch.equal(tfnb.run(y, {x: torch.zeros(3)}), torch.ones(3).exp())


def test_where_a_variable_is_to_lie_on_a_cluster_means_nothing_here():
    with tfnb.record(), tfnb.device("ps:3"):
        v = tfnb.Variable(torch.ones(3), name="v")
        new = v.assign(v.read())
    assert v.request == "ps:3" and tfnb.run(new).tolist() == [1, 1, 1]


def updates(*texts):
    """A Variable for each device, read and written under it."""
    variables = [tfnb.Variable(torch.ones(3), name=f"v{place}") for place in range(len(texts))]
    with tfnb.record() as graph:
        for variable, text in zip(variables, texts, strict=True):
            with tfnb.device(text):
                variable.assign_add(torch.ones(3))
    return graph, variables


def test_variables_lie_on_the_servers_that_they_ask_for():
    graph, (a, b, c) = updates("ps:1", "ps:0", "cpu")
    groups = [(a,), (b,), (c,)]
    asked = shards_asked(graph.nodes, groups, {}, 2)
    assert asked == {a: 1, b: 0}
    homes = pack(groups, {}, [0, 0], graph, asked)
    assert [homes[v.key][0].shard for v in (a, b)] == [1, 0]


def test_what_is_updated_together_lies_together_or_both_lines_are_named():
    graph, (a, b) = updates("ps:1", "cpu")
    assert shards_asked(graph.nodes, [(a, b)], {}, 2) == {a: 1, b: 1}
    graph, (a, b) = updates("ps:1", "ps:0")
    with pytest.raises(InvalidArgument, match=r"(?s)v0, v1: .*'ps:1' at .*test_requests.py.*'ps:0' at .*test_requests"):
        shards_asked(graph.nodes, [(a, b)], {}, 2)
    with pytest.raises(InvalidArgument, match=r"v0: .*'ps:1' at .*, and v0 lies on ps:0 already"):
        shards_asked(graph.nodes, [(a,)], {a.key: (Piece(0, a.key),)}, 2)


def test_a_server_that_is_not_there_is_named_or_not_asked_for():
    graph, (a,) = updates("ps:2")
    with pytest.raises(InvalidArgument, match=r"v0 cannot lie on ps:2: .* there are ps:0, ps:1; connect with ps=3"):
        shards_asked(graph.nodes, [(a,)], {}, 2)
    graph, (a,) = updates("ps:2/soft")
    assert shards_asked(graph.nodes, [(a,)], {}, 2) == {}


def inside(x, kind):
    """``x + 2``, with a request for a task inside of a loop, a branch, a loop in a branch, or a function."""

    def more(v):
        with tfnb.device("task:99"):
            return v + 1

    def repeated(v):
        return tfnb.while_loop(lambda i, w: i < 2, lambda i, w: (i + 1, more(w)), (0, v))[1]

    match kind:
        case "loop":
            return repeated(x)
        case "branch":
            return tfnb.cond(x.sum() > 0, lambda: more(x) + 1, lambda: x + 2)
        case "loop in a branch":
            return tfnb.cond(x.sum() > 0, lambda: repeated(x), lambda: x + 2)
        case "function":
            return tfnb.function(lambda v: more(v) + 1)(x)
        case "scan":
            return tfnb.map_fn(lambda v: more(v) + 1, x)


@pytest.mark.parametrize("kind", ["loop", "branch", "loop in a branch", "function", "scan"])
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_what_is_asked_for_inside_is_refused_as_it_is_outside(kind, executor):
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = inside(x, kind)
    with pytest.raises(InvalidArgument, match=r"device specification 'task:99' of node .*: there are"):
        tfnb.Session(y.graph, executor=executor).run(y, {x: torch.ones(3)})


@pytest.mark.parametrize(
    ("tasks", "replicas", "told"),
    [
        (2, 1, ""),
        (3, 1, "task:2 has no stage of this pipeline and is idle: 3 tasks, 2 stages"),
        (5, 1, "task:2, task:3, task:4 have no stage of this pipeline and are idle: 5 tasks, 2 stages; "
               "replicas=2 gives 4 of them work"),
        (5, 2, "task:4 has no stage of this pipeline and is idle: 5 tasks, 4 stages"),
    ],
)  # fmt: skip
def test_tasks_without_a_stage_are_told_with_the_replicas_that_would_use_them(tasks, replicas, told):
    with tfnb.record() as graph:
        for stage in range(2 * replicas):
            with tfnb.device(f"task:{stage}"):
                tfnb.placeholder(torch.ones(2)).sin()
    assert idle_tasks(asked(graph.nodes), [f"task:{number}" for number in range(tasks)], replicas) == told
