"""The choice of slow tests: the base commit, rooms of changed files, shares of the others, time, and the deadline."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.durations import known, long, measured, merged
from tests.selection import (
    ABOUT,
    ABOVE,
    CHANGED,
    DEADLINE,
    NO_TIME,
    NOT_BEGUN,
    OTHER_SHARE,
    ROOM,
    SECONDS,
    SHARE,
    SHARES,
    Change,
    Reasons,
    Selection,
    change,
    folder_of_tests,
    left_out,
    room_of_source,
    rooms_of_test,
    summary,
)
from tests.test_layers import BELOW

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent


class Repository:
    """A git repository with a branch ``main``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *args: str) -> str:
        settings = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *settings, *args], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, path: str) -> str:
        """A commit that adds a file."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(path)
        self.git("add", path)
        self.git("commit", "--quiet", "-m", path)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def since(*files: str, commit: str = "0" * 40) -> Reasons:
    """The reasons of a commit that changed these files."""
    return Reasons(Change(commit, "base", frozenset(files)))


def test_base_is_where_the_branch_left_main(repository: Repository) -> None:
    fork = repository.commit("a.py")
    repository.git("update-ref", "refs/remotes/origin/main", fork)
    head = repository.commit("tfnb/b.py")
    found = change(repository.root)
    assert found == Change(head, f"{fork[:12]} (merge-base with origin/main)", frozenset({"tfnb/b.py"}))


def test_base_on_main_itself_is_some_commits_back(repository: Repository) -> None:
    commits = [repository.commit(f"{n}.py") for n in range(23)]
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD")
    found = change(repository.root)
    assert found.base == f"{commits[2][:12]} (HEAD~20)"
    assert found.files == {f"{n}.py" for n in range(3, 23)}


def test_base_can_be_given(repository: Repository) -> None:
    first = repository.commit("a.py")
    repository.commit("b.py")
    assert change(repository.root, first) == change(repository.root, first[:8])
    assert change(repository.root, first).files == {"b.py"}
    assert change(repository.root, "HEAD").files == frozenset()


def test_base_that_the_clone_lacks_gives_way_to_the_next(repository: Repository) -> None:
    fork = repository.commit("a.py")
    repository.git("update-ref", "refs/remotes/origin/main", fork)
    repository.commit("b.py")
    assert change(repository.root, "f" * 40).base == f"{fork[:12]} (merge-base with origin/main)"


def test_short_history_counts_every_file_as_changed(repository: Repository, tmp_path: Path) -> None:
    head = repository.commit("a.py")
    assert change(repository.root) == Change(head, "none: the history has fewer than 20 commits", None)


def test_shallow_clone_counts_every_file_as_changed(repository: Repository, tmp_path_factory) -> None:
    for n in range(22):
        head = repository.commit(f"{n}.py")
    shallow = tmp_path_factory.mktemp("clone")
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    subprocess.run(["git", "remote", "remove", "origin"], cwd=shallow, check=True)
    assert change(shallow) == Change(head, "none: the history has fewer than 20 commits", None)


def test_no_git_counts_every_file_as_changed(tmp_path: Path) -> None:
    found = change(tmp_path)
    assert found.files is None and "not a git checkout" in found.base
    assert change(Path(__file__).parent) == found, "a folder inside of a checkout is none"
    assert Reasons(found).ranks(["tests/view/test_text.py::test_a"]) == {"tests/view/test_text.py::test_a": ROOM}


def test_moved_file_changes_both_rooms(repository: Repository) -> None:
    first = repository.commit("tfnb/passes/a.py")
    (repository.root / "tfnb/view").mkdir()
    repository.git("mv", "tfnb/passes/a.py", "tfnb/view/a.py")
    repository.git("commit", "--quiet", "-m", "move")
    assert Reasons(change(repository.root, first)).rooms == {"passes", "view"}


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("tfnb/cluster/wire/streams.py", "cluster"),
        ("tfnb/execution/tiers/native/step.c", "execution"),
        ("tfnb/errors.py", "errors"),
        ("tfnb/__init__.py", "__init__"),
        ("kernels/optim.py", "kernels"),
        ("widgets/graph.js", "widgets"),
        ("README.md", None),
        ("tests/cluster/test_wire.py", None),
        ("notebooks/gan.ipynb", None),
    ],
)
def test_room_of_a_source_file(path: str, room: str | None) -> None:
    assert room_of_source(path) == room


def test_every_test_is_about_rooms_of_the_table() -> None:
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert all(rooms_of_test(str(path)) <= set(BELOW) for path in tests)
    assert set(ABOUT) - {"notebooks"} == {folder_of_tests(str(path)) for path in tests} - set(BELOW)


def test_tests_rank_by_the_distance_to_what_changed() -> None:
    files = [
        "tests/placement/test_a.py",
        "tests/cluster/test_b.py",
        "tests/session/test_c.py",
        "tests/passes/test_d.py",
    ]
    reasons = since("tfnb/placement/cut.py", "tests/passes/test_d.py")
    ranks = reasons.ranks(f"{path}::test" for path in files)
    assert list(ranks.values()) == [ROOM, ABOVE, ABOVE, CHANGED]
    assert "placement" in reasons.text() and "directly above: cluster session" in reasons.text()


def test_helper_of_tests_changes_its_folder() -> None:
    ranks = since("tests/cluster/conftest.py").ranks(["tests/cluster/test_a.py::test", "tests/test_step.py::test"])
    assert ranks["tests/cluster/test_a.py::test"] == ROOM
    assert ranks["tests/test_step.py::test"] in (SHARE, None)


def test_documents_change_no_room() -> None:
    assert since("README.md", "Makefile", "tests/conftest.py", "tests/durations.json", ".ci/run").rooms == set()
    assert since("README.md", "tests/conftest.py").helped == set()


def test_each_commit_has_one_share_and_all_commits_have_everything() -> None:
    tests = [f"tests/view/test_a.py::test[{n}]" for n in range(300)]
    shares = []
    for n in range(SHARES):
        ranks = since(commit=f"{n:08x}" + "0" * 32).ranks(tests)
        shares.append({test for test in tests if ranks[test] == SHARE})
    assert set.union(*shares) == set(tests)
    assert sum(map(len, shares)) == len(tests) and min(map(len, shares)) > 50


def test_all_fits_where_there_is_time() -> None:
    assert left_out(["tests/view/test_a.py::test"], since("tfnb/view/a.py"), {}, 10, 1) == {}


def test_what_changed_is_served_before_the_rest() -> None:
    durations = {"tests/view/test_a.py::test": 6.0, "tests/passes/test_b.py::test": 6.0}
    reasons = since("tests/view/test_a.py", "tfnb/passes/b.py")
    assert left_out(list(durations), reasons, durations, 6.0, 1) == {"tests/passes/test_b.py::test": NO_TIME}
    assert left_out(list(durations), reasons, durations, 6.0, 2) == {}


def test_one_scope_is_no_longer_than_the_wall_time() -> None:
    tests = [f"tests/view/test_a.py::test[{n}]" for n in range(10)]
    durations = {"tests/view/test_a.py::test": 1.0}
    out = left_out(tests, since("tfnb/view/a.py"), durations, 6.0, 2)
    assert len(out) == 4, "the other process cannot take half of a file"


def test_unknown_test_takes_the_median() -> None:
    known = {f"tests/view/test_a.py::test_{n}": seconds for n, seconds in enumerate([1.0, 4.0, 90.0])}
    reasons = since("tfnb/view/a.py")
    assert left_out(["tests/view/test_b.py::test"], reasons, known, 4.0, 1) == {}
    assert len(left_out(["tests/view/test_b.py::test"], reasons, known, 3.9, 1)) == 1


def test_cut_differs_by_commit_and_not_by_order() -> None:
    tests = [f"tests/view/test_a.py::test[{n}]" for n in range(100)]
    outs = [left_out(tests, since("tfnb/view/a.py", commit=f"{n:040x}"), {}, 50.0, 1) for n in range(2)]
    assert [len(out) for out in outs] == [50, 50] and outs[0] != outs[1]
    assert left_out(tests[::-1], since("tfnb/view/a.py", commit=f"{0:040x}"), {}, 50.0, 1) == outs[0]


def test_notebook_is_chosen_whole() -> None:
    cells = [f"notebooks/gan.ipynb::Cell {n}" for n in range(4)]
    for n in range(SHARES):
        assert len(left_out(cells, since(commit=f"{n:08x}"), {}, 100.0, 1)) in (0, 4)
    durations = {"notebooks/gan.ipynb": 2.0}
    assert len(left_out(cells, since("magics/magics.py"), durations, 7.9, 1)) == 4
    assert left_out(cells, since("magics/magics.py"), durations, 8.0, 1) == {}


def test_summary_counts_by_file_and_reason() -> None:
    out = {"tests/a/test_a.py::test_1": NO_TIME, "tests/a/test_a.py::test_2": OTHER_SHARE}
    assert summary([*out, "tests/a/test_a.py::test_3"], out) == [
        f"1 of 3 slow tests chosen; left out: 1 ({OTHER_SHARE}), 1 ({NO_TIME})",
        f"tests/a/test_a.py: 1 ({OTHER_SHARE}), 1 ({NO_TIME})",
    ]


def test_durations_come_from_a_report(tmp_path: Path) -> None:
    for path in ("tests/a/test_a.py", "tests/a/test_b.py", "notebooks/c.ipynb"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("def test(): ...")
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite>'
        '<testcase classname="tests.a.test_a" name="test[x[0]]" time="1.0"/>'
        '<testcase classname="tests.a.test_a" name="test[y]" time="2.0"/>'
        '<testcase classname="tests.a.test_a.TestIt" name="test" time="0.5"/>'
        '<testcase classname="tests.a.test_a.TestIt" name="test_short" time="0.05"/>'
        '<testcase classname="tests.a.test_a" name="test_skipped" time="0.0"><skipped/></testcase>'
        '<testcase classname="notebooks.c.ipynb" name="Cell 0" time="3.0"/>'
        '<testcase classname="notebooks.c.ipynb" name="Cell 1" time="4.0"/>'
        "</testsuite></testsuites>"
    )  # fmt: skip
    new = measured(report, tmp_path)
    of_class = {"tests/a/test_a.py::TestIt::test": 0.5}
    assert new == {"tests/a/test_a.py::test": 1.5, **of_class, "tests/a/test_a.py::TestIt::test_short": 0.05,
                   "notebooks/c.ipynb": 3.5}  # fmt: skip
    (tmp_path / "tests/a/test_b.py").write_text("def test(): ...\nTestShard = Shard.TestCase")  # as of hypothesis
    of_class |= {"tests/a/test_b.py::TestShard::runTest": 4.0}
    old = {
        "tests/a/test_b.py::TestShard::runTest": 4.0,
        "tests/a/test_b.py::TestGone::runTest": 4.0,
        "tests/a/test_a.py::gone": 9.0,
        "tests/a/test_b.py::test": 8.0,
        "tests/a/test_gone.py::test": 7.0,
    }
    assert merged(old, new, tmp_path) == {"notebooks/c.ipynb": 3.5, "tests/a/test_a.py::test": 1.5,
                                          **of_class, "tests/a/test_b.py::test": 8.0}  # fmt: skip


def test_committed_durations_are_of_tests_that_exist() -> None:
    assert [name for name in known() if not (ROOT / name.partition("::")[0]).exists()] == []


SLOW = """
    import pytest

    @pytest.mark.slow
    def test_slow():
        pass

    def test_quick():
        pass
"""


def run(pytester: pytest.Pytester, environment: dict[str, str], source: str, *args: str) -> pytest.RunResult:
    """Run tests with the plugin in this process."""
    pytester.makeini("[pytest]\nmarkers = slow")
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess(*args, "-p", "no:randomly", "-rs", plugins=[Selection(environment)])


def test_after_the_deadline_no_slow_test_is_begun(pytester: pytest.Pytester) -> None:
    result = run(pytester, {DEADLINE: "1"}, SLOW)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["1 chosen tests were not begun: the time was over", f"SKIPPED*{NOT_BEGUN}"])
    run(pytester, {DEADLINE: "inf"}, SLOW).assert_outcomes(passed=2)


def test_failure_before_the_deadline_is_no_skip_after_it(pytester: pytest.Pytester) -> None:
    source = """
        import pytest, time
        @pytest.mark.slow
        def test_slow():
            time.sleep(1.1)
            assert False
    """
    result = run(pytester, {DEADLINE: str(time.time() + 1)}, source, "--reruns", "1")
    assert result.parseoutcomes() == {"failed": 1, "rerun": 1}


def test_tests_without_time_are_left_out_and_counted(pytester: pytest.Pytester) -> None:
    result = run(pytester, {SECONDS: "0"}, SLOW)
    assert result.parseoutcomes() == {"passed": 1, "deselected": 1}
    result.stdout.fnmatch_lines(["slow tests: base: *", "0 of 1 slow tests chosen; left out: 1 (*)"])


def test_of_long_tests_quick_runs_take_one_and_of_longer_ones_none() -> None:
    nodeids = ["a.py::t[1]", "a.py::t[2]", "a.py::u[1]", "a.py::u[2]", "a.py::v[1]", "n.ipynb::Cell 0", "a.py::new"]
    durations = {"a.py::t": 0.5, "a.py::u": 0.1, "a.py::v": 9.0, "n.ipynb": 9.0}
    assert long(nodeids, durations) == {"a.py::t[2]", "a.py::v[1]"}
