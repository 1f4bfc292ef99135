"""Colocation of nodes: groups against brute force, programs in parts, files, edited cells, and requests of no sense."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tfnb
from tests.control_flow.random_programs import program
from tests.execution.test_cut_programs import assert_same_cut
from tests.over_tasks import MODELS, Model, on
from tests.recording.test_cells import Notebook
from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound, StaleNode, Unimplemented
from tfnb.graph import Graph, Node
from tfnb.graph.colocation_groups import colocated
from tfnb.graph.device_request import DeviceRequest, parse, with_group
from tfnb.graph.subgraph import map_nodes, with_inner
from tfnb.passes import step_graph
from tfnb.passes.flow import frames
from tfnb.passes.flow.places import Place, homes, requested
from tfnb.passes.flow.step_flow import in_parts
from tfnb.placement.groups import grouped
from tfnb.placement.requests import shards_asked

PLACES = 3
FIELDS = st.builds(
    DeviceRequest,
    job=st.none(),
    replica=st.none(),
    task=st.none() | st.integers(0, PLACES - 1),
    kind=st.none() | st.just("cpu"),
    number=st.none(),
    soft=st.booleans(),
    groups=st.just(()),
)
LINKS = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.none() | FIELDS, min_size=n, max_size=n),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=n),
    )
)


def linked(requests: list[DeviceRequest | None], links: list[tuple[int, int]]) -> tuple[Graph, list[Node]]:
    """Side by side one node for each request; of each link the later node asks to be with the earlier one."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2), name="x")
        made = [(x + number).node for number in range(len(requests))]
    asks = [request or DeviceRequest() for request in requests]
    for pair in links:
        one, other = sorted(pair)
        group = parse(with_group(made[one].name, made[one].id))
        asks[other] = asks[other].within(group)
    ids = {node.id: str(request) or None for node, request in zip(made, asks, strict=True)}
    nodes = (replace(node, device=ids.get(node.id)) for node in graph.nodes)
    return graph.derive(replace(graph.contents, nodes=tuple(nodes))), made


def brute_force(count: int, links: list[tuple[int, int]]) -> list[set[int]]:
    """The group of each number, by closing over links until nothing changes."""
    groups = [{number} for number in range(count)]
    for _ in range(count):
        for one, other in links:
            both = groups[one] | groups[other]
            for number in both:
                groups[number] = groups[number] | both
    return groups


@given(LINKS)
def test_groups_and_their_feasible_places_are_those_of_brute_force(drawn: Any) -> None:
    requests, links = drawn
    graph, made = linked(requests, links)
    groups = brute_force(len(requests), links)
    hard = [
        {r.task for number in group if (r := requests[number]) and not r.soft and r.task is not None}
        for group in groups
    ]
    is_member = [len(group) > 1 or (number, number) in links for number, group in enumerate(groups)]
    if any(len(asked) > 1 for asked, member in zip(hard, is_member, strict=True) if member):
        with pytest.raises(InvalidArgument, match="members of one colocation group ask for different places"):
            colocated(graph)
        return
    found = colocated(graph)
    for number, group in enumerate(groups):
        request = parse(found.contents.by_id[made[number].id].device or "/soft")
        assert bool(request.groups) == is_member[number]
        for other in range(len(requests)):
            keys = parse(found.contents.by_id[made[other].id].device or "/soft").groups
            assert (request.groups == keys and bool(keys)) == (other in group and is_member[number])
    places = grouped(step_graph(graph, [node.value() for node in made], graph.contents.names["x"][:0]), PLACES)
    for number, group in enumerate(groups):
        of_group = places.groups[places.group_of[made[number].id]].places
        every = range(PLACES)
        if hard[number]:
            wanted = [task for task in every if hard[number] == {task}]
        else:  # the first soft request counts
            soft = [r.task for at in sorted(group) if (r := requests[at]) and r.task is not None]
            wanted = soft[:1] or [*every]
        assert [place.number for place in of_group] == wanted
    again = colocated(found)
    assert [node.device for node in again.nodes] == [node.device for node in found.nodes], "merged is merged"


def with_random_groups(graph: Graph, seed: int) -> None:
    """Random nodes, inside of loops and branches too, ask to be with random others; some for a task, softly."""
    rng = random.Random(seed)
    names = {node.id: node.name for node in with_inner(graph.nodes) if node.op != "tfnb.placeholder"}
    targets = rng.sample(sorted(names), min(len(names), 4))

    def asking(node: Node) -> Node:
        if node.id not in names:
            return node
        device = f"/task:{rng.randrange(PLACES)}/soft" if rng.random() < 0.3 else ""
        if rng.random() < 0.4 and node.id not in targets:
            target = rng.choice(targets)
            device += with_group(names[target], target)
        return replace(node, device=device or None)

    nodes = tuple(map_nodes(asking, node) for node in graph.nodes)
    graph.commit(replace(graph.contents, nodes=nodes))


def assert_together(graph: Graph, fetches: list[Any], feeds: list[Any]) -> int:
    """All members of a group that are ops with a home have one home; how many groups have several members."""
    step = in_parts(step_graph(graph, [each.value for each in fetches], [each.value for each in feeds]))
    found: dict[str, set[Place]] = {}
    members: dict[str, int] = {}
    for op, home in zip(step.flow.ops, homes(step.flow, requested(step.graph.nodes)), strict=True):
        if op.kind == frames.NODE and op.node is not None and op.node.device and home.place is not None:
            for key in parse(op.node.device).keys:
                found.setdefault(key, set()).add(home.place)
                members[key] = members.get(key, 0) + 1
    assert all(len(places) == 1 for places in found.values()), found
    return sum(count > 1 for count in members.values())


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_with_random_groups_give_the_bits_of_one_part(seed: int) -> None:
    assert check_random_groups(seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3, 43, 10))
def test_many_random_programs_with_random_groups(first: int) -> None:
    assert sum(map(check_random_groups, range(first, first + 10))) > 10


def check_random_groups(seed: int) -> int:
    """A random program, with gradients, in parts and in one; how many of its groups have several members."""
    gen = torch.Generator().manual_seed(seed)
    with tfnb.record() as graph:
        xs = [tfnb.placeholder(torch.rand(2, dtype=torch.float64, generator=gen), shape=(2,)) for _ in range(3)]
        outs = program(seed)(list(xs), tfnb.while_loop, tfnb.cond)
        outs = [*outs, *(d for d in tfnb.gradients(sum(y.sum() for y in outs), xs) if d is not None)]
    with_random_groups(graph, seed)
    fed = dict(zip(xs, torch.rand(3, 2, dtype=torch.float64, generator=gen) * 4 - 2, strict=True))
    assert_same_cut(graph, outs, [fed], seed)
    return assert_together(graph, outs, xs)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_over_three_tasks_colocated_with_a_variable_of_one(model: Model) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        w = tfnb.Variable(torch.linspace(0.5, 1, 8), name="w")
        with on(2):
            h = x * w
        y = model(h)
        with tfnb.colocate_with(w):
            loss = (y * 2).sum()
        (dw,) = tfnb.gradients(loss, [w])
    fed = [{x: sign * torch.linspace(0.1, 1, rows * 8).reshape(rows, 8)} for sign in (1, -1) for rows in (5, 9)]
    assert graph.why(loss).place == Place(2) and "with:w" in str(graph.why(loss).request)
    assert_same_cut(graph, [loss, dw], fed, 0)


# -- scopes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def net() -> Any:
    """A value at task 1, one that asks for nothing, and one at task 0."""
    return three_values(soft=False)


def three_values(soft: bool) -> Any:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        with tfnb.device("task:1", soft=soft):
            h = x.exp()
        k = x * 2
        with tfnb.device("task:0", soft=soft):
            m = x.tanh()
    return graph, x, h, k, m


def test_a_value_a_node_and_a_name_mean_the_same_group(net: Any) -> None:
    graph, _, h, k, m = net
    with tfnb.record(graph):
        made = []
        for target in (h, h.node, "h"):
            with tfnb.colocate_with(target):
                made.append(m + k)
    assert {graph.why(each).place for each in made} == {Place(1)}
    assert {each.node.device for each in made} == {f"/with:h#{h.node.id}"}
    assert "colocated with h, which asks for task:1" in repr(graph.why(made[0]))


def test_none_leaves_groups_and_keeps_the_device_and_the_other_way_round(net: Any) -> None:
    graph, _, h, _, m = net
    with tfnb.record(graph), tfnb.device("cpu"), tfnb.colocate_with(h):
        both = m + 1
        with tfnb.colocate_with(None):
            alone = m + 2
        with tfnb.device(None):
            bare = m + 3
    group = f"/with:h#{h.node.id}"
    assert (both.node.device, alone.node.device, bare.node.device) == (f"/device:CPU{group}", "/device:CPU", group)


def test_fields_of_a_group_merge_whoever_says_them_and_whenever(net: Any) -> None:
    graph, _, _, k, m = net
    with tfnb.record(graph):
        with tfnb.colocate_with(k):
            first = m + 1
            with tfnb.device("/job:worker"):
                second = m + 2
        with tfnb.device("/task:2"), tfnb.colocate_with(first):
            third = m + 3
    by_id = colocated(graph).contents.by_id
    assert {by_id[each.node.id].device for each in (k, first, second, third)} == {
        f"/job:worker/task:2/with:k#{k.node.id}_0"
    }
    assert {graph.why(each).place for each in (k, first, second, third)} == {Place(2)}


def test_nested_scopes_and_a_function_of_the_node(net: Any) -> None:
    graph, _, h, k, m = net
    with tfnb.record(graph):
        with tfnb.colocate_with(h), tfnb.colocate_with(k):
            both = m + 1
        with tfnb.device(lambda node: "task:1" if "mul" in node.op else None), tfnb.colocate_with(k):
            made = (m * 2, m + 2)
    assert graph.why(k).place == graph.why(both).place == Place(1)
    assert {graph.why(each).place for each in made} == {Place(1)}


def test_a_group_that_asks_for_nothing_goes_as_one(net: Any) -> None:
    graph, x, h, _, m = net
    with tfnb.record(graph), tfnb.colocate_with(h * 2):
        free = (x + 1, m + 1)
    assert {graph.why(each).place for each in free} == {Place(1)}
    assert "no node of that group asks for a place" in repr(graph.why(free[1]))


def test_a_loop_body_colocated_with_the_variable_of_another_task() -> None:
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        with on(1):
            h = x * w

        def body(i: Any, c: torch.Tensor) -> Any:
            with tfnb.colocate_with(w):
                c = torch.tanh(c)
            with on(0):
                return i + 1, c * 0.5

        with on(0):
            c = x + 1
        _, c = tfnb.while_loop(lambda i, c: i < 3, body, (0, c))
        y = tfnb.cond(c.sum() > 0, lambda: beside(h, c), lambda: c)
        more = w.assign_add(y.sum(0))
    loop, branch = (next(node for node in graph.nodes if node.op == op) for op in ("tfnb.while", "tfnb.cond"))
    whole = tfnb.place([y])
    ops = {op.node.op: home.place for op, home in zip(whole._step.flow.ops, whole._homes, strict=True) if op.node}
    assert ops["aten.tanh.default"] == Place(1) and ops["aten.mul.Tensor"] in (Place(0), Place(1))
    assert "task:0, task:1" in whole.why(loop).rule and whole.why(branch).place == Place(1)
    assert_same_cut(graph, [y, more], [{x: torch.ones(2, 3)}, {x: -torch.ones(4, 3)}], 1)


def beside(h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    with tfnb.colocate_with(h):
        return c.exp()


def test_gradients_go_with_their_forward_nodes_also_of_a_member_that_asks_for_nothing() -> None:
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        h = torch.tanh(x * w)
        with on(2), tfnb.colocate_with(h):
            k = h * 3
        with on(0):
            loss = k.exp().sum()
        (dw,) = tfnb.gradients(loss, [w])
    backward = [node for node in graph.nodes if node.forward in (h.node.id, k.node.id)]
    assert len(backward) >= 2 and {graph.why(node).place for node in backward} == {Place(2)}
    assert_same_cut(graph, [loss, dw], [{x: torch.rand(4, 3)}], 2)


def factorial(scope: Any) -> Any:
    """A function that calls itself, whose nodes are recorded in a scope."""

    @tfnb.function
    def fact(n: torch.Tensor) -> torch.Tensor:
        with scope():
            return tfnb.cond(n <= 1, lambda: n * 1, lambda: n * fact(n - 1))

    return fact


@pytest.mark.parametrize("is_group", [False, True])
def test_a_recursive_function_is_done_where_its_inside_asks_for(is_group: bool) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(3.0), name="x")
        with on(1):
            h = x.exp()
        with on(0):
            z = x + 1
        y = factorial(lambda: tfnb.colocate_with(h) if is_group else on(1))(z)
    assert graph.why(y).place == Place(1)
    assert_same_cut(graph, [y, h], [{x: torch.tensor(5.0)}], 6)
    with tfnb.record(graph):
        lost = factorial(lambda: tfnb.device("task:7"))(z)
    with pytest.raises(InvalidArgument, match=r"'task:7' of node fact(.|\n)*line"):
        tfnb.run(lost, {x: torch.tensor(5.0)})


def test_a_recursive_function_is_not_divided() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(3.0), name="x")
        with tfnb.device("task:1"):
            h = x.exp()
            y = factorial(lambda: tfnb.device("task:0"))(x)
        z = factorial(lambda: tfnb.colocate_with(h))(x)
    with pytest.raises(Unimplemented, match=r"y asks for task:1 .*line(.|\n)*fact/le for task:0 .*line"):
        tfnb.place(y)
    assert tfnb.place(z).why(z).place == Place(1)


# -- searches, stages and passes -----------------------------------------------------------------------------------


def test_a_search_places_a_group_as_one_and_keeps_its_requests() -> None:
    graph, x, h, k, m = three_values(soft=True)
    with tfnb.record(graph):
        with tfnb.colocate_with(k):
            far = (m @ h.mT).relu()
        y = far.sum() + k.sum()
    found = tfnb.place(y, "auto", tasks=3, soft=True)
    assert found.why(k).place == found.why(far).place
    assert found._grouped.group_of[k.node.id] == found._grouped.group_of[far.node.id]
    assert found.why(h).place == Place(1) and found.why(m).place == Place(0)
    assert_same_cut(graph, [y], [{x: torch.rand(2, 3)}], 3)
    with tfnb.record(graph), tfnb.colocate_with(h):
        pinned = far + 1
    again = tfnb.place(pinned, "auto", tasks=3, soft=True)
    assert again.why(pinned).place == Place(1)


def test_stages_do_not_separate_a_group() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    with tfnb.record() as graph:
        h = x = tfnb.placeholder(torch.ones(3, 4), name="x")
        outs = []
        for number, layer in enumerate(layers):
            with tfnb.colocate_with(outs[0] if number == 2 else None):
                h = layer(h)
            outs.append(h)
        loss = h.sum()
    staged = tfnb.place(loss, stages=2, soft=True)
    assert {staged.why(each).place for each in outs[:3]} == {Place(0)} and staged.why(outs[3]).place == Place(1)
    with pytest.raises(InvalidArgument, match="are colocated: a stage would be empty"):
        tfnb.place(loss, stages=3)
    assert_same_cut(graph, [loss], [{x: torch.rand(2, 4)}], 4)


def test_passes_move_no_node_of_a_group_away() -> None:
    graph, x, h, _, m = three_values(soft=True)
    with tfnb.record(graph):
        with tfnb.colocate_with(h):
            one = m.sin() + torch.ones(3).exp()
        with tfnb.colocate_with(m):
            two = m.sin() * 2
        y = one + two
    step = in_parts(step_graph(graph, [y.value], [x.value]))
    made = dict(zip(step.flow.ops, homes(step.flow, requested(step.graph.nodes)), strict=False))
    sines = [home.place for op, home in made.items() if op.node is not None and op.node.op == "aten.sin.default"]
    assert sorted(sines) == [Place(0), Place(1)], "the two are not one"
    assert_same_cut(graph, [y], [{x: torch.rand(4, 3)}], 5)


def test_a_target_that_the_step_does_without_still_says_where() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2), name="x")
        with tfnb.device("task:1"):
            unused = x.exp()
        with tfnb.colocate_with(unused):
            link = x.sin()
        with tfnb.colocate_with(link):
            y = x.cos()
        with tfnb.device("task:0"):
            z = x.tanh()
    assert tfnb.place([y, z]).why(y).place == Place(1)
    assert "colocated with unused, which asks for task:1" in repr(tfnb.place([y, z]).why(y))


def test_soft_requests_yield_to_hard_ones_of_the_group_and_to_what_is_not_there(net: Any) -> None:
    graph, x, h, k, m = net
    with tfnb.record(graph):
        with tfnb.device("task:0", soft=True), tfnb.colocate_with(h):
            y = m + 1
        with tfnb.device("task:7", soft=True), tfnb.colocate_with(k):
            z = m + 2
    assert graph.why(y).place == graph.why(h).place == Place(1)
    merged = colocated(graph).contents.by_id
    assert not parse(merged[y.node.id].device).soft and parse(merged[k.node.id].device).soft
    assert tfnb.run([k, z], {x: torch.ones(2, 3)})[1].shape == (2, 3), "one process drops it"


# -- Variables ---------------------------------------------------------------------------------------------------


def test_where_a_variable_was_made_and_where_it_is_read_count_for_its_group() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:1"):
            made, read = tfnb.Variable(torch.ones(3), name="made"), tfnb.Variable(torch.ones(3), name="read")
            h = x * read
        with tfnb.device("task:0"):
            m = x + 1
        found = []
        for target in (made, read, read.read(), read.assign_add(h), "read"):
            with tfnb.colocate_with(target):
                found.append(m * 2)
    assert [parse(each.node.device or "").keys for each in found] == [(made.key,), *[(read.key,)] * 4]
    assert {graph.why(each).place for each in found} == {Place(1)} and graph.why(h).place == Place(1)


def test_a_parameter_is_its_variable() -> None:
    layer = torch.nn.Linear(3, 3)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        with tfnb.device("task:1"):
            h = layer(x)
        with tfnb.device("task:0"):
            m = x + 1
        with tfnb.colocate_with(layer.weight):
            y = m * 2
    assert graph.why(y).place == graph.why(h).place == Place(1) and "with:weight" in str(graph.why(y).request)


def test_a_variable_made_beside_another_lies_on_its_server() -> None:
    from tfnb.placement.shards import pack, together

    with tfnb.record() as graph:
        big = [tfnb.Variable(torch.zeros(size), name=f"v{size}") for size in (100, 90, 80)]
        with tfnb.colocate_with(big[1]):
            slot = tfnb.Variable(torch.zeros(70), name="slot")
        for variable in (*big, slot):
            variable.assign(variable + 1)
    groups = together(graph)
    assert (big[1], slot) in groups and len(groups) == 3
    lies = pack(groups, {}, [0, 0, 0], graph)
    assert lies[slot.key][0].shard == lies[big[1].key][0].shard


def test_the_server_that_a_group_with_a_variable_asks_for_is_where_that_lies() -> None:
    with tfnb.record() as graph:
        w, other = (tfnb.Variable(torch.ones(3), name=name) for name in ("w", "other"))
        with tfnb.colocate_with(w), tfnb.device("ps:1"):
            step = w.assign_add(other * 2)
    step_nodes = step_graph(graph, [step.value], []).graph.nodes
    assert shards_asked(step_nodes, [(w,), (other,)], {}, 2) == {w: 1, other: 1}, "other is read in that group"


def test_a_read_may_leave_a_merged_group() -> None:
    """A task that hosts a Variable reads it, wherever the group of the Variable is."""
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:1"), tfnb.colocate_with(w):
            y = x * w
        z = x * w
    merged = colocated(graph)
    nodes = [replace(node, device="task:0") if node.op == "tfnb.read" else node for node in merged.nodes]
    moved = merged.derive(replace(merged.contents, nodes=tuple(nodes)))
    again = colocated(moved)
    assert [node.device for node in again.nodes] == [node.device for node in moved.nodes]
    assert again.contents.by_id[y.node.id].device == f"/task:1/with:w#{w.key}_0" and z.node.device is None


# -- files and cells -----------------------------------------------------------------------------------------------


def test_a_saved_graph_has_its_groups(tmp_path: Path, net: Any) -> None:
    graph, x, h, k, m = net
    w = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record(graph):
        with tfnb.colocate_with(k):
            z = x * w
        y = tfnb.cond(m.sum() > 0, lambda: beside(h, m), lambda: beside(k, m))
        with tfnb.colocate_with(w):
            u = (y + z).sum()
    graph.save(tmp_path / "g")
    loaded = Graph.load(tmp_path / "g")
    assert loaded.text() == graph.text()
    for name in ("h", "k", "y", "z", "u", "m"):
        assert repr(loaded.why(name)) == repr(graph.why(name))
    again = tmp_path / "again"
    loaded.save(again)
    assert Graph.load(again).text() == graph.text()
    assert loaded.variables[0].name == "w"
    with tfnb.record(loaded), tfnb.colocate_with("w"):
        late = torch.rand(3)
    assert loaded.why(late).place == loaded.why("u").place


H = "with tfnb.device('task:1'):\n    h = x.exp(){more}\nwith tfnb.device('task:0'):\n    m = x + 1"


def test_a_target_that_was_recorded_again_is_the_target(request: Any) -> None:
    notebook = Notebook(request.node.name)
    notebook.run("1", "x = tfnb.placeholder(torch.ones(2, 3), name='x')")
    notebook.run("2", H.format(more=""))
    notebook.run(
        "3", "with tfnb.colocate_with(h):\n    y = tfnb.cond(m.sum() > 0, lambda: m * 2, lambda: m)\n    z = m * 3"
    )
    for more in ("", " * 2"):
        graph = notebook.run("2", H.format(more=more).replace("task:1", "task:2" if more else "task:1"))
        at = Place(2 if more else 1)
        assert graph.why(graph["z"]).place == graph.why(graph["y"]).place == at
        inner = [node for node in with_inner([graph["y"]]) if node.op == "aten.mul.Tensor"]
        assert [node.device for node in inner] == [f"/with:h#{graph['h'].id}"]


def test_a_cell_whose_target_is_gone_is_stale_and_says_so(request: Any) -> None:
    notebook = Notebook(request.node.name)
    notebook.run("1", "x = tfnb.placeholder(torch.ones(2, 3), name='x')")
    notebook.run("2", H.format(more=""))
    notebook.run("3", "with tfnb.colocate_with(h):\n    y = x * 2")
    y = notebook.names["y"]
    notebook.run("2", H.format(more="").replace("h = x.exp()", "other = x.sin()"))
    with pytest.raises(StaleNode, match=r"y of In\[3\] was dropped because it is colocated with h of In\[2\]"):
        tfnb.run(y, {"x": torch.ones(2, 3)})
    with pytest.raises(StaleNode, match="a tensor used"):
        notebook.run("3", "with tfnb.colocate_with(h):\n    y = x * 2")


# -- requests of no sense ------------------------------------------------------------------------------------------


def test_a_contradiction_names_members_requests_and_lines(net: Any) -> None:
    graph, x, h, k, m = net
    with tfnb.record(graph):
        with tfnb.colocate_with(h):
            link = x.sin()
        with tfnb.colocate_with(m), tfnb.colocate_with(link):
            y = x.cos()
    for ask in (lambda: tfnb.run(y, {x: torch.ones(2, 3)}), lambda: graph.why(y), lambda: tfnb.place(y)):
        with pytest.raises(InvalidArgument) as error:
            ask()
        text = str(error.value)
        for part in (
            "h asks for 'task:1' (test_colocation.py line",
            "m asks for 'task:0' (",
            "y asks to be with m, link",
        ):
            assert part in text, text
        assert "with tfnb.colocate_with" not in text and "link asks to be with h" in text
    assert graph._repr_html_(), "it is drawn"
    assert tfnb.run(k, {x: torch.ones(2, 3)}).tolist() == [[2.0] * 3] * 2, "a step without that group runs"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_variables_pinned_to_different_tasks(order: tuple[int, int]) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        made = []
        for task in range(2):
            with tfnb.device(f"task:{task}"):
                made.append(tfnb.Variable(torch.ones(3), name=f"w{task}"))
        first, second = (made[number] for number in order)
        with (
            tfnb.colocate_with(first),
            pytest.raises(
                InvalidArgument, match=rf"variable {second.name} was made under 'task:{order[1]}'(.|\n)*line"
            ),
            tfnb.colocate_with(second),
        ):
            pass
        with tfnb.colocate_with(first), tfnb.device(f"task:{order[1]}"):
            y = x * first
    with pytest.raises(InvalidArgument, match=rf"variable {first.name} was made under 'task:{order[0]}'"):
        tfnb.run(y, {x: torch.ones(3)})


def test_what_is_no_target_is_refused_and_the_recording_goes_on(net: Any) -> None:
    h, plain = net[2], torch.ones(2)
    with tfnb.record() as other:
        x = tfnb.placeholder(torch.ones(2), name="x")
        hidden = x.exp()
        for target, error, words in (
            (h, InvalidArgument, "colocate_with: h is of graph"),
            (h.node, InvalidArgument, "node h: it is not in graph"),
            (3, InvalidArgument, "not 3"),
            ([x], InvalidArgument, "takes a recorded tensor"),
            (plain, InvalidArgument, "takes a recorded tensor"),
            ("hiden", NotFound, "has no node 'hiden'"),
            ("", NotFound, "has no node ''"),
        ):
            with pytest.raises(error, match=words), tfnb.colocate_with(target):
                pass
        assert other is not None and hidden.node.device is None
        y = x * 2
    assert y.node.device is None and tfnb.run(y, {x: torch.ones(2)}).tolist() == [2, 2]
    with pytest.raises(FailedPrecondition, match="colocate_with works inside a recording"), tfnb.colocate_with(None):
        pass


def test_a_value_of_inside_a_loop_is_no_target_outside() -> None:
    kept = []

    def body(i: Any) -> Any:
        kept.append(i * 2)
        return i + kept[-1]

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        tfnb.while_loop(lambda i: i.sum() < 9, body, x)
        with pytest.raises(InvalidArgument, match="inside of"), tfnb.colocate_with(kept[-1]):
            pass


@pytest.mark.parametrize("options", [{}, {"microbatches": 4}, {"mode": "pipeline", "microbatches": 4, "replicas": 2}])
def test_groups_train_over_microbatches_and_replicas_as_without_them(options: dict[str, Any]) -> None:
    found = []
    for is_joined in (False, True):
        torch.manual_seed(0)
        first, last = torch.nn.Linear(4, 8).double(), torch.nn.Linear(8, 2).double()
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.rand(8, 4).double(), name="x")
            with on(0):
                h = torch.relu(first(x))
            with on(1):
                out = last(h)
            with tfnb.colocate_with(last.weight if is_joined else None):
                loss = out.pow(2).mean()
            with tfnb.colocate_with(h if is_joined else None):
                train = tfnb.train.Adam(0.01).minimize(loss)
        data = {x: torch.linspace(-1, 1, 64).reshape(16, 4).double()}
        result = tfnb.fit(train, data, epochs=2, batch_size=8, watch=[loss], shuffle=False, **options)
        found.append([*(v.value() for v in graph.variables), torch.tensor([row["loss"] for row in result.history])])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
