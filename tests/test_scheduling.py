"""Scopes of tests that one process runs, and their order."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.scheduling import ALONE, CLUSTER, FAULTS, REST, WITH_ANOTHER, WITH_FAULTS, place, scope

ROOT = Path(__file__).parent.parent


def test_a_scope_is_a_file_or_a_group_that_shares_a_cluster() -> None:
    assert scope("tests/view/test_text.py::test_a[1::2]") == "tests/view/test_text.py"
    assert scope("tests/cluster/test_faults.py::test_a") == scope("tests/cluster/test_members.py::test_b") == FAULTS
    assert scope("tests/cluster/test_cuts.py::test_a") == scope("tests/cluster/test_cluster.py::test_b") == REST
    assert scope("tests/cluster/alone/test_core.py::test_a") == "tests/cluster/alone/test_core.py"
    assert scope("tests/recording/test_strides.py::test_a") == scope("tests/coverage/test_opinfo.py::test_b[add]")


def test_both_clusters_come_first() -> None:
    files = ["tests/cluster/alone/test_core.py", "tests/coverage/test_opinfo.py", "tests/cluster/test_cuts.py",
             "tests/cluster/test_faults.py"]  # fmt: skip
    assert sorted(files, key=place) == files[::-1]


def test_files_of_the_groups_exist() -> None:
    assert [name for name in WITH_FAULTS if not (ROOT / CLUSTER / f"test_{name}.py").exists()] == []
    assert [path for pair in WITH_ANOTHER.items() for path in pair if not (ROOT / path).exists()] == []


def test_tests_in_the_folder_alone_name_no_dask() -> None:
    for path in sorted((ROOT / ALONE).glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        arguments = {arg.arg for node in nodes if isinstance(node, ast.FunctionDef) for arg in node.args.args}
        modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not arguments & {"dask", "connect"}, path
        assert not {module.split(".")[0] for module in modules} & {"dask", "distributed"}, path
        assert not [m for m in modules if m.startswith("tests.cluster.") and not m.startswith("tests.cluster.alone.")]
