"""The picture of a cluster: boxes, edges, and what is left out, counted in its elements."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tfnb.cluster.notebook.card import CardRow
from tfnb.view import cluster_svg
from tfnb.view.cluster_picture import GLOW, MOST, SHOWN, WIDE, WIDEST

SVG = "{http://www.w3.org/2000/svg}"
HELD = tuple((f"layer{k}.weight", f"{9 - k} kB") for k in range(SHOWN + 2))


def member(name, state="alive", holds=(), traffic="", **more):
    return CardRow(name, "tcp://10.0.0.1:1", state, "", "", holds, traffic, **more)


@pytest.mark.parametrize(("tasks", "servers"), [(1, 1), (2, 3), (MOST + 5, 1), (3, MOST + 1), (2, 0)])
def test_each_box_is_drawn_or_counted_and_each_task_leads_to_each_server(tasks, servers):
    members = [member(f"task:{k}") for k in range(tasks)] + [member(f"ps:{k}", holds=HELD) for k in range(servers)]
    root = ElementTree.fromstring(cluster_svg(members))
    boxes, shown = root.findall(f"{SVG}g"), (min(tasks, MOST), min(servers, MOST))
    assert len(boxes) == sum(shown) and len(root.findall(f"{SVG}path")) == shown[0] * shown[1]
    left_out = re.findall(r"(\d+) more like it", " ".join(root.itertext()))
    assert sorted(map(int, left_out)) == sorted(count - MOST for count in (tasks, servers) if count > MOST)
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x")) >= 0 and float(rect.get("x")) + float(rect.get("width")) <= WIDE
        assert float(rect.get("y")) + float(rect.get("height")) <= float(root.get("height"))


def test_a_server_names_its_largest_variables_and_counts_the_others_and_a_member_that_is_silent_is_dashed():
    picture = cluster_svg([member("task:0", "silent"), member("ps:0", holds=HELD, traffic="1.5 MB/s")])
    root = ElementTree.fromstring(picture)
    silent, server = root.findall(f"{SVG}g")
    assert silent.find(f"{SVG}rect").get("stroke-dasharray") and not server.find(f"{SVG}rect").get("stroke-dasharray")
    texts = [text.text for text in server.findall(f"{SVG}text")]
    assert texts == ["ps:0", *(f"{name} {size}" for name, size in HELD[:SHOWN]), "and 2 more"]
    assert all(f"{name} {size}" in server.find(f"{SVG}title").text for name, size in HELD)
    assert "task:0, silent" in picture and "1.5 MB/s" in picture


def test_colours_are_one_for_each_task_and_server():
    root = ElementTree.fromstring(cluster_svg([member(f"task:{k}") for k in range(2)] + [member("ps:0")]))
    stripes = [box.findall(f"{SVG}rect")[1].get("fill") for box in root.findall(f"{SVG}g")]
    assert len({*stripes}) == 3
    assert [path.get("stroke") for path in root.findall(f"{SVG}path")] == stripes[:2]


def test_a_cluster_without_tasks_has_no_picture():
    assert cluster_svg([]) == cluster_svg([member("ps:0")]) == ""


def test_a_box_has_the_work_of_its_task_and_glows_by_the_share_of_its_computing():
    idle, busy = member("task:0", lines=("step 20 · 10.0/s",), busy=0.0), member("task:1", busy=0.5)
    root = ElementTree.fromstring(cluster_svg([idle, busy, member("ps:0")]))
    texts = [[text.text for text in box.findall(f"{SVG}text")] for box in root.findall(f"{SVG}g")]
    assert texts == [["task:0", "step 20 · 10.0/s"], ["task:1"], ["ps:0"]]
    frames = [box.find(f"{SVG}rect") for box in root.findall(f"{SVG}g")]
    assert [frame.get("fill-opacity") for frame in frames] == ["0.00", f"{GLOW / 2:.2f}", None]
    assert frames[2].get("fill") == "none"
    assert all(box.get("tabindex") == "0" for box in root.findall(f"{SVG}g"))


def test_an_edge_says_what_travels_between_its_two_ends_and_is_as_wide():
    links = (("ps:0", 4e6, "4.0 MB/s"), ("ps:1", 1e6, "1.0 MB/s"))
    members = [member("task:0", links=links), member("task:1"), member("ps:0"), member("ps:1")]
    edges = ElementTree.fromstring(cluster_svg(members)).findall(f"{SVG}path")
    assert [edge.find(f"{SVG}title").text for edge in edges] == [
        "task:0 and ps:0: 4.0 MB/s", "task:0 and ps:1: 1.0 MB/s",
        "task:1 and ps:0: nothing travels now", "task:1 and ps:1: nothing travels now",
    ]  # fmt: skip
    assert [float(edge.get("stroke-width")) for edge in edges] == [WIDEST, 1 + (WIDEST - 1) / 4, 1, 1]


def test_a_queue_has_a_bar_as_long_as_it_is_full():
    queues = (("half", 4, 8), ("full", 2, 2), ("endless", 7, None), ("fourth", 0, 1))
    root = ElementTree.fromstring(cluster_svg([member("task:0"), member("ps:0", holds=HELD[:1], queues=queues)]))
    box = root.findall(f"{SVG}g")[1]
    frame, _, half, full = box.findall(f"{SVG}rect")
    assert float(half.get("width")) == pytest.approx(float(full.get("width")) / 2, abs=0.1)
    _, _, *words, more = box.findall(f"{SVG}text")
    assert [word.text for word in words] == ["queue half 4 of 8", "queue full 2 of 2", "queue endless 7"]
    assert more.text == "and 1 more"
    for bar, word in ((half, words[0]), (full, words[1])):  # the bar lies behind its words
        assert float(bar.get("y")) < float(word.get("y")) < float(bar.get("y")) + float(bar.get("height"))
    bottom = float(frame.get("y")) + float(frame.get("height"))
    assert float(more.get("y")) < bottom and float(full.get("y")) + float(full.get("height")) < bottom


def test_an_edge_between_two_tasks_runs_below_their_boxes_and_inside_of_the_picture():
    tasks = [member("task:0", links=(("task:1", 4e6, "4.0 MB/s"),), lines=("step 1",)), member("task:1")]
    for members in (tasks, [*tasks, member("ps:0")]):
        root = ElementTree.fromstring(cluster_svg(members))
        edge = root.findall(f"{SVG}path")[-1]
        assert edge.find(f"{SVG}title").text == "task:0 and task:1: 4.0 MB/s"
        _, y0, _, y1, _, y2, _, y3 = map(float, re.findall(r"[\d.]+", edge.get("d")))
        tops = [box.find(f"{SVG}rect") for box in root.findall(f"{SVG}g")]
        bottoms = [float(rect.get("y")) + float(rect.get("height")) for rect in tops]
        assert [y0, y3] == bottoms[:2] and y1 == y2 > max(bottoms[:2])
        assert y1 < (float(tops[2].get("y")) if len(members) == 3 else float(root.get("height")))
