"""The picture of a cluster: boxes, edges, and what is left out, counted in its elements."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tfnb.cluster.notebook.card import CardRow
from tfnb.view import cluster_svg
from tfnb.view.cluster_picture import MOST, SHOWN, WIDE

SVG = "{http://www.w3.org/2000/svg}"
HELD = tuple((f"layer{k}.weight", f"{9 - k} kB") for k in range(SHOWN + 2))


def member(name, state="alive", holds=(), traffic=""):
    return CardRow(name, "tcp://10.0.0.1:1", state, "", "", holds, traffic)


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
