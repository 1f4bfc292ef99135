"""The house: what is installed, how quickly it loads, that its documents and commands are true."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import tfnb
from tests import raises
from tests.benchmarks import prose
from tests.syntax import parsed

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> list[str]:
    """Every module by its installed name, but the one that runs when imported."""
    found = []
    for top in ("tfnb", "kernels", "magics", "widgets"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append(name if top == "tfnb" else f"tfnb.{name}")
    return [name for name in found if name != "tfnb.__main__"]


MODULES = modules()


def python(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of this environment."""
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, cwd=cwd, env={**os.environ, **environment}
    )


def folders() -> set[str]:
    """Every folder with an ``__init__.py``, by its installed name."""
    found = set()
    for top in ("tfnb", "kernels", "magics", "widgets"):
        for init in (ROOT / top).rglob("__init__.py"):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(name if top == "tfnb" else f"tfnb.{name}")
    return found


def test_a_module_name_says_one_thing() -> None:
    """A family's kernels and its gradient rules have one name; guides do not count."""
    families = {Path("kernels"), Path("tfnb/gradients/rules")}
    homes: dict[str, set[Path]] = {}
    for top in ("tfnb", "kernels", "magics", "widgets"):
        for path in (ROOT / top).rglob("*.py"):
            if not path.stem.startswith("__"):
                homes.setdefault(path.stem, set()).add(path.parent.relative_to(ROOT))
    assert not {name for name, found in homes.items() if len(found) > 1 and not found <= families}


def test_a_class_name_says_one_thing() -> None:
    assert prose.ambiguous() == {}


def test_a_class_has_a_noun_for_its_name() -> None:
    assert prose.participles() == []


def test_docstrings_name_their_nouns() -> None:
    """Of each room at most a tenth of the first lines leans on a pronoun."""
    rooms: dict[str, list[tuple[int, int]]] = {}
    for folder, counts in prose.shares().items():
        rooms.setdefault("/".join(folder.split("/")[:2]), []).append(counts)
    leaning = {room: sum(n for n, _ in of) / sum(n for _, n in of) for room, of in rooms.items()}
    assert {room for room, share in leaning.items() if share > 0.1} == set()


def test_names_and_files_in_docstrings_exist() -> None:
    assert list(prose.unknown_names()) == []


def test_dotted_names_in_docstrings_exist() -> None:
    def exists(name: str) -> bool:
        module = name
        while module not in MODULES and "." in module:
            module = module.rpartition(".")[0]
        found = importlib.import_module(module)
        for part in name.removeprefix(module).split(".")[1:]:
            found = getattr(found, part, None)
        return found is not None

    named = dict((name, at) for at, name in prose.modules_named())
    assert "tfnb.cluster.modes.leases" in named, "nothing was found"
    assert {at: name for name, at in named.items() if not exists(name)} == {}


def test_every_package_is_in_the_wheel() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == {*folders(), "tfnb.notebooks"}


def test_every_requirement_has_a_tested_version() -> None:
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in wanted} <= pinned


def test_import_loads_nothing_heavy() -> None:
    program = "import sys, tfnb; print({'torch', 'distributed', 'IPython', 'numpy', 'dask'} & set(sys.modules))"
    assert python("-c", program).stdout.strip() == "set()"


def test_public_names_exist_and_are_described() -> None:
    assert [name for name in tfnb.__all__ if not getattr(tfnb, name).__doc__] == []


def test_public_functions_show_an_example() -> None:
    functions = {name: getattr(tfnb, name) for name in tfnb.__all__ if inspect.isfunction(getattr(tfnb, name))}
    bare = {name for name, function in functions.items() if ">>>" not in (function.__doc__ or "")}
    assert bare == {"connect", "doctor"}  # a cluster, and what is found on a machine


# Public name -> errors that its code raises and its docstring leaves out, with the reason.
UNSAID = {
    "Cluster.batches": {"InvalidArgument"},  # the other end of `Session.train`, no user calls it
    "MutableHashTable.remove": {"ResourceExhausted"},  # of `insert`, which shares the code: removing takes no room
    "connect": {"Unimplemented"},  # of `name`, which it does not describe either
}


def test_public_names_say_which_errors_they_raise() -> None:
    assert {name: set(errors) for name, errors in raises.undocumented().items()} == UNSAID


def test_errors_of_a_callee_and_of_a_base_class_are_found() -> None:
    assert "InvalidArgument" in raises.raised(tfnb.compare)  # itself
    assert "ShapeError" in raises.raised(inspect.unwrap(tfnb.placeholder))  # by a function of its module
    assert "NotFound" in raises.raised(tfnb.Snapshots.restore)  # by a method of its class
    assert sum(1 for _ in raises.public()) > 300


@pytest.mark.slow
def test_rooms_do_not_hide_public_functions() -> None:
    program = "import tfnb.graph.spec, tfnb.gradients.rules; print(tfnb.graph, tfnb.gradients, tfnb.doctor)"
    assert python("-c", program).stdout.count("<function") == 3


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grahp'"):
        tfnb.grahp  # noqa: B018


def test_checkout_that_is_not_installed_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tfnb").mkdir()
    shutil.copy(ROOT / "tfnb" / "__init__.py", tmp_path / "tfnb")
    done = python("-S", "-c", "import tfnb", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this checkout of tfnb") and "`make demo` or `pip install -e .`" in last


@pytest.mark.slow
def test_no_file_is_loaded_under_two_names() -> None:
    """In a process of its own: other packages look for optional ones of the names of our outer folders."""
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "print(*(f for m in list(sys.modules.values()) if (f := getattr(m, '__file__', None)) is not None), sep='\\n')"
    )
    loaded = Counter(python("-c", program).stdout.splitlines())
    ours = {file: count for file, count in loaded.items() if file.startswith(str(ROOT))}
    assert any(file.endswith("kernels/optim.py") for file in ours), "nothing was loaded"
    assert not {file: count for file, count in ours.items() if count > 1 and f"{os.sep}.venv{os.sep}" not in file}


@pytest.mark.parametrize("package", sorted({".".join(name.split(".")[:2]) for name in MODULES}))
def test_modules_say_what_they_are_and_their_examples_run(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "_", None, raising=False)  # doctest leaves its last result there
    for name in MODULES:
        if f"{name}.".startswith(f"{package}.") and (package != "tfnb" or name == package):
            module = importlib.import_module(name)
            assert module.__doc__, f"{name} has no docstring"
            assert doctest.testmod(module).failed == 0, name


def test_make_lists_every_target() -> None:
    if not shutil.which("make"):
        pytest.skip("no make here")
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets and all(f"make {target} " in listed for target in targets)


def test_readme_starts_with_the_two_commands() -> None:
    first = re.search(r"```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].strip().splitlines()] == ["make demo", "make test"]


PAGES = ["README.md", *sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_paths_named_in_documents_exist(page: str) -> None:
    named = re.findall(r"`([\w./]+/[\w./]*|[\w./]+\.(?:py|md|toml|txt|ipynb))`", (ROOT / page).read_text())
    assert named or page != "CONTRIBUTING.md"
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_to_files(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", text)
    assert [link for pair in links for link in pair if link and not (path.parent / link).exists()] == []


def test_errors_of_the_page_have_the_words_that_it_quotes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "notebooks/errors.md").read_text(), re.MULTILINE)
    strings = {node.value for path in prose.sources("tfnb") for node in ast.walk(parsed(path)) if _is_text(node)}
    assert len(rows) > 10
    for name, words in rows:
        assert issubclass(getattr(tfnb.errors, name), tfnb.errors.TfnbError)
        assert any(words in text for text in strings), words


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    done = python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("tfnb-*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    program = (
        "import tfnb, tfnb.magics, tfnb.kernels, tfnb.widgets, torch\n"
        "with tfnb.record('wheel') as g:\n"
        "    x = tfnb.placeholder(torch.ones(2, 3))\n"
        "    y = (x @ torch.ones(3, 1)).sum()\n"
        "print(tfnb.run(y, {x: torch.ones(4, 3)}).item(), '<svg' in g._repr_html_(), tfnb.__file__)\n"
    )
    ran = python("-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert ran.stdout.split()[:2] == ["12.0", "True"], ran.stderr
    assert str(tmp_path) in ran.stdout


def test_the_outer_folders_are_mapped_and_not_linked() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    links = [line.rpartition("\t")[2] for line in listed.splitlines() if line.startswith("120000")]
    assert not links, "a wheel would have these folders twice"
