"""A lookup table on parameter servers: what runs insert there is found there, and comes home."""

from __future__ import annotations

import torch

import tfnb


def test_a_table_lives_where_variables_live(connect):
    table = tfnb.MutableHashTable(8, default=-1, name="there")
    with tfnb.record("tables"):
        k = tfnb.placeholder(torch.tensor([1, 2]), name="k")
        put = table.insert(k, k * 10)
        found = table.lookup(k + 1)
    table.insert([100], [1000])
    cluster = connect(2)
    tfnb.run(put, {k: torch.tensor([4, 5])})
    assert tfnb.run(found, {k: torch.tensor([3, 4])}).tolist() == [40, 50]
    cluster.close()
    assert [t.tolist() for t in table.export()] == [[3, 4, 5, 100], [30, 40, 50, 1000]]
