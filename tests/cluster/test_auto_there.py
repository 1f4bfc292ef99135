"""A step placed by a search on a real cluster: the bits of one process, and the times of its places and links."""

from __future__ import annotations

import torch

import tfnb
from tests.cluster.test_parts_there import assert_nothing_left
from tests.placement.test_auto_placement import fed, take_long, tasks_asked, three_places, two_branches


def test_a_training_placed_over_two_tasks_gives_the_bits_of_one_process(connect, dask) -> None:
    net, twin = two_branches(), two_branches()
    for each in (net, twin):
        take_long(each.graph, lambda: 1.0, {"B": 4})
    tfnb.place([twin.loss, twin.train], "auto", tasks=2, soft=True)
    here = tfnb.Session(twin.graph, compile="off")
    wanted = [here.run([twin.loss, twin.train], fed(twin, rows))[0] for rows in (4, 6)]
    connect(2)
    placement = tfnb.place([net.loss, net.train], "auto")
    assert placement.tasks == 2 and tasks_asked(net.graph) == {0, 1}
    found = [tfnb.run([net.loss, net.train], fed(net, rows))[0] for rows in (4, 6)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    del net.graph.attached["times"]
    tfnb.run([net.loss, net.train], fed(net), trace=True)
    measured = placement.measured
    assert measured is not None and {event.thread for event in measured.events} >= {"task:0", "task:1"}
    assert "task:0 → task:1" in placement._repr_html_()
    times = net.graph.attached["times"]
    assert times.messages.keys() <= {("task:0", "task:1"), ("task:1", "task:0")} and times.messages
    assert times.margin.before > 0 and times.margin.after > 0
    again = tfnb.place([net.loss, net.train], "auto")
    assert again.timeline.seconds <= sum(event.seconds for event in measured.events), "what ran, one after the other"
    assert_nothing_left(dask)


def test_a_value_is_sent_when_its_own_task_has_used_it(connect, dask) -> None:
    step = three_places()
    connect(3)
    placement = tfnb.place([step.u, step.c], "auto")
    assert placement.timeline.late
    torch.testing.assert_close(tfnb.run([step.u, step.c], step.fed, trace=True), step.wanted)
    measured = placement.measured
    assert measured is not None
    used = next(event for event in measured.events if event.node is not None and event.node.name == "u")
    sent = next(each for each in measured.transmissions if each.name == "h" and each.to == "task:1")
    assert used.end <= sent.start + 1e-3, "of one host: the clocks agree"
    assert_nothing_left(dask)
