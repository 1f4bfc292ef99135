"""The process that compiles: gone when it should be, started again once, never waited for without end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfnb.execution.compiling import compiled_packages, compiler_process
from tfnb.execution.compiling.compiled_packages import REQUEST, PackageFolder, cached, compiled
from tfnb.execution.compiling.compiler_process import NOBODY, CompilerProcess, OverBudget
from tfnb.execution.compiling.package_cache import PackageCache, packages

pytestmark = pytest.mark.usefixtures("own_packages")

BUILDS = """
import os, signal, subprocess, sys, time
from pathlib import Path

def quick(folder):
    (folder / "code").write_text((folder / "request" / "text").read_text() if (folder / "request").exists() else "x")
    print("noise on its standard output", flush=True)
    return {"quality": 7}

def long(folder):
    compiler = subprocess.Popen(["sleep", "100"])
    (folder / "pids").write_text(f"{os.getpid()} {compiler.pid}")
    time.sleep(100)

def dies_once(folder):
    if not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    quick(folder)

def dies(folder):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(folder):
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(3)

def fails(folder):
    raise ValueError("no way\\nat all")

def busy(folder):
    while True:
        try:
            sum(range(10_000))
        except Exception:
            pass

def starts_busy(folder):
    for _ in range(1000):
        subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"])

def scratch(folder):
    Path("here").touch()

def private(folder):
    group = Path("/proc/self/autogroup")
    (folder / "group").write_text(group.read_text() if group.exists() else "")
    where = [Path(os.environ[name]) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")]
    (folder / "code").write_text(f"{os.nice(0)} {[str(path) for path in (Path.cwd(), *where)]}")
"""


class Owner:
    """Who waits for the compiler."""


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of the builds, as the process can import it."""
    (tmp_path / "builds_of_test.py").write_text(BUILDS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return "builds_of_test"


@pytest.fixture
def compiler(builds: str) -> Iterator[CompilerProcess]:
    """One of its own, which leaves nothing."""
    before = set(packages().folder.iterdir())
    made = CompilerProcess()
    yield made
    pid = made.pid
    made.close()
    assert pid is None or is_gone(pid)
    left = set(packages().folder.iterdir()) - before
    assert {path for path in left if path.name.startswith(".draft-") and (path / "log.txt").exists()} == set()


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or nothing but its entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def within(seconds: float, what: Callable[[], object]) -> object:
    """The first true answer; the last one after a time."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def in_thread(
    compiler: CompilerProcess, call: str, folder: Path, owner: Owner
) -> tuple[threading.Thread, list[object]]:
    """A build that goes on in a thread, and where its answer will be."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(compiler.build(call, folder, owner)))
    thread.start()
    return thread, answers


def pids(folder: Path) -> list[int]:
    """Of the process that builds and of the one that it started."""
    found = within(60, lambda: (folder / "pids").exists() and (folder / "pids").read_text())
    return [int(pid) for pid in str(found).split()]


def test_it_builds_says_why_not_and_goes_on(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    owner = Owner()
    assert compiler.pid is None
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    pid = compiler.pid
    assert compiler.build(f"{builds}:fails", tmp_path, owner) == "ValueError: no way"
    assert "no attribute 'nothing'" in str(compiler.build(f"{builds}:nothing", tmp_path, owner))
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    assert pid is not None and compiler.pid == pid
    compiler.release(owner)
    assert compiler.pid is None and is_gone(pid)
    assert compiler.build(f"{builds}:dies_once", tmp_path, owner) is not NOBODY  # who asks again is an owner again


def test_it_is_nice_and_writes_into_its_own_folder(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    owner = Owner()
    assert isinstance(compiler.build(f"{builds}:private", tmp_path, owner), dict)
    text = (tmp_path / "code").read_text()
    assert int(text.split()[0]) == min(os.nice(0) + compiler_process.NICE, 19)
    group = (tmp_path / "group").read_text().split()  # a session of its own, which is nice as a whole
    assert not group or group[-1] == text.split()[0]
    assert text.count(str(packages().folder)) == 3
    assert (tmp_path / "code").stat().st_mode & 0o777 == 0o600


def test_it_is_as_quick_as_this_process_where_steps_wait(
    compiler: CompilerProcess, builds: str, tmp_path: Path
) -> None:
    assert isinstance(compiler.build(f"{builds}:private", tmp_path, Owner(), urgent=True), dict)
    assert int((tmp_path / "code").read_text().split()[0]) == os.nice(0)


def test_a_process_that_is_killed_is_started_once_more(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    owner = Owner()
    assert isinstance(compiler.build(f"{builds}:dies_once", tmp_path, owner), dict)
    assert compiler.build(f"{builds}:dies", tmp_path, owner) == "the compiler's process was killed (SIGKILL)"
    assert compiler.build(f"{builds}:leaves", tmp_path, owner) == "the compiler's process ended (3): out of luck"
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)


def test_what_it_started_is_killed_at_the_deadline(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, Owner()), dict)
    compiler.behind = 1.0
    answer = compiler.build(f"{builds}:long", tmp_path, Owner())
    assert answer == "the compiler's process did not compile the step within 1 s"
    assert within(60, lambda: all(map(is_gone, pids(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize("build", ["busy", "starts_busy"])
def test_a_build_has_a_budget_of_processor_seconds(builds: str, build: str, tmp_path: Path) -> None:
    compiler, owner = CompilerProcess(budget=1.0), Owner()
    try:
        with pytest.raises(OverBudget, match=r"^it takes more than 1 s of a processor$"):
            compiler.build(f"{builds}:{build}", tmp_path, owner)
        assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    finally:
        compiler.close()


def test_who_is_released_waits_no_more(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    mine, other = Owner(), Owner()
    thread, answers = in_thread(compiler, f"{builds}:long", tmp_path, mine)
    running = pids(tmp_path)
    second, more = in_thread(compiler, f"{builds}:quick", tmp_path, other)
    compiler.release(mine)
    thread.join(60)
    assert answers == [NOBODY] and within(60, lambda: all(map(is_gone, running)))
    second.join(60)
    assert isinstance(more[0], dict), more


def test_a_process_that_is_idle_ends_and_comes_back(builds: str, tmp_path: Path) -> None:
    compiler, owner = CompilerProcess(idle=0.5), Owner()
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    assert within(60, lambda: compiler.pid is None)
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    compiler.close()


def test_a_forked_process_leaves_the_compiler_alone(compiler: CompilerProcess, builds: str, tmp_path: Path) -> None:
    owner = Owner()
    assert isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)
    pid = compiler.pid
    child = os.fork()
    if child == 0:
        found = compiler.pid
        compiler.close()
        os._exit(0 if found is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert compiler.pid == pid and isinstance(compiler.build(f"{builds}:quick", tmp_path, owner), dict)


PARENT = """
import sys
from pathlib import Path
from tfnb.execution.compiling.compiler_process import COMPILER
class Owner: pass
owner = Owner()
print(COMPILER.build("builds_of_test:quick", Path(sys.argv[1]), owner)["seconds"], flush=True)
if sys.argv[2] == "ends":
    sys.exit()
COMPILER.build("builds_of_test:long", Path(sys.argv[1]), owner)
"""


def parent(folder: Path, cache: Path, how: str) -> subprocess.Popen[str]:
    """A process with a compiler of its own, and packages of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), how], text=True, stdout=subprocess.PIPE,
        env={**os.environ, "TFNB_CACHE_DIR": str(cache)}, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.usefixtures("builds")
def test_it_is_gone_when_its_parent_was_killed(tmp_path: Path, signal_: signal.Signals) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    with parent(draft, tmp_path / "cache", "waits") as process:
        running = pids(draft)
        process.send_signal(signal_)
        process.wait(60)
    assert within(60, lambda: all(map(is_gone, running))), running
    assert not draft.exists()  # what was to be tried is as large as the Variables
    assert within(60, lambda: not list((tmp_path / "cache" / "packages").glob(".draft-*")))


@pytest.mark.slow
@pytest.mark.usefixtures("builds")
def test_it_is_gone_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    with parent(tmp_path, tmp_path / "cache", "ends") as process:
        out, _ = process.communicate(timeout=200)
        assert float(out) >= 0 and process.returncode == 0
    assert list((tmp_path / "cache" / "packages").iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("builds")
def test_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    """A terminal and Jupyter send SIGINT to the whole group of processes."""
    with parent(tmp_path, tmp_path / "cache", "waits") as process:
        running = pids(tmp_path)
        assert {os.getpgid(pid) for pid in running} == {running[0]} != {os.getpgid(process.pid)}
        os.kill(running[0], signal.SIGINT)  # and if it did
        time.sleep(0.3)
        assert not any(map(is_gone, running))
        process.kill()
        process.wait(60)
    assert within(60, lambda: all(map(is_gone, running)))


ENDING = """
import time, torch, tfnb
from tfnb.execution.tiers import tiered
tiered.WORTH_COMPILING, tiered.worth = 0.0, lambda *_, **__: "now"
model = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(40)])
sample = torch.randn(4, 30)
with tfnb.record() as graph:
    x = tfnb.placeholder(sample)
    train = tfnb.train.Adam(0.01).minimize(model(x).square().mean())
session = tfnb.Session(graph)
for _ in range(tiered.PROFILED + 1):
    session.run(train, {x: sample})
assert "compiling" in session.status()[0]
time.sleep(DELAY)
"""


def test_a_cache_that_is_removed_is_made_again(
    builds: str, compiler: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = PackageCache(tmp_path / "packages")
    monkeypatch.setattr(compiler_process, "packages", lambda: alone)
    assert isinstance(compiler.build(f"{builds}:scratch", tmp_path, owner := Owner()), dict)
    shutil.rmtree(alone.folder)
    assert isinstance(compiler.build(f"{builds}:scratch", tmp_path, owner), dict)


@pytest.mark.slow
def test_a_script_that_ends_while_it_compiles_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TFNB_CACHE_DIR": str(tmp_path), "TFNB_COMPILE": "auto"}
    for delay in (0.0, 0.02, 1.0):
        ended = subprocess.run(
            [sys.executable, "-c", f"DELAY = {delay}\n{ENDING}"], capture_output=True, text=True, timeout=120,
            env=environment,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
    assert list((tmp_path / "packages").iterdir()) == []


# -- requests -------------------------------------------------------------------------------------------------


def ask(text: str, build: str, owner: Owner) -> PackageFolder | str:
    return compiled(text, lambda folder: (folder / "text").write_text(text) and None, build, owner)


def test_a_request_is_built_once_and_then_found(builds: str) -> None:
    owner = Owner()
    assert cached("one step") is None
    made = ask("one step", f"{builds}:quick", owner)
    assert isinstance(made, PackageFolder) and not made.is_cached and made.cost.endswith(" s to compile")
    assert (made.folder / "code").read_text() == "one step" and not (made.folder / REQUEST).exists()
    assert made.facts["quality"] == 7
    made.note(us=12)
    found = ask("one step", f"{builds}:dies", owner)
    assert isinstance(found, PackageFolder) and found.is_cached and found.cost == "from the cache"
    assert found.folder == made.folder and (found.facts["us"], found.facts["quality"]) == (12, 7)
    found.drop()
    assert cached("one step") is None


def test_a_request_over_its_budget_is_not_tried_again(builds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_packages, "COMPILER", CompilerProcess(budget=0.5))
    owner = Owner()
    with pytest.raises(OverBudget):
        ask("too much", f"{builds}:busy", owner)
    with pytest.raises(OverBudget, match=r"it takes more than 0\.5 s"):
        ask("too much", f"{builds}:quick", owner)
    compiled_packages.COMPILER.close()


def test_a_request_that_fails_leaves_nothing(builds: str) -> None:
    def entries() -> list[Path]:
        return [path for path in packages().folder.iterdir() if not (path / "log.txt").exists()]

    owner, before = Owner(), entries()
    assert ask("another", f"{builds}:fails", owner) == "ValueError: no way"
    with pytest.raises(ZeroDivisionError):
        compiled("another", lambda folder: 1 / 0, f"{builds}:quick", owner)  # type: ignore[func-returns-value, arg-type]
    found = compiled("another", lambda folder: Path("/dev/full").write_text("x") and None, f"{builds}:quick", owner)
    assert "No space left on device: make room there, or set TFNB_CACHE_DIR" in str(found)
    assert entries() == before


def test_without_a_compiler_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert ask("a third", "no.such.module:build", Owner()) == "no C++ compiler: install g++, or set CXX to one"


@pytest.mark.slow
@pytest.mark.usefixtures("builds")
def test_two_processes_that_ask_for_the_same_build_it_once(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from tfnb.execution.compiling.compiled_packages import compiled
        class Owner: pass
        owner = Owner()
        sys.stdin.readline()
        found = compiled("same", lambda folder: (folder / "text").write_text("same"), "builds_of_test:quick", owner)
        print((found.folder / "code").read_text(), found.folder.name[:6], found.is_cached)
    """)
    environment = {**os.environ, "TFNB_CACHE_DIR": str(tmp_path / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", program], text=True, stdin=-1, stdout=-1, env=environment)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    (_, *one, made), (_, *other, found) = sorted(process.communicate(timeout=200)[0].split() for process in both)
    assert one == other and (made, found) == ("False", "True")
    assert len(list((tmp_path / "cache" / "packages").iterdir())) == 1
