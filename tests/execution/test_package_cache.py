"""Packages on disk are whole or absent, for one user, and no more than fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfnb.errors import InvalidArgument
from tfnb.execution.compiling import package_cache
from tfnb.execution.compiling.package_cache import PackageCache, machine, packages, surroundings


def kept(cache: PackageCache, key: str, size: int = 100) -> Path:
    draft = cache.draft()
    (draft / "step.so").write_bytes(b"\x7f" * size)
    (draft / "kernels").mkdir()
    (draft / "kernels" / "one.so").write_bytes(b"x")
    return cache.keep(key, draft, {"seconds": 1.5})


@pytest.fixture
def cache(tmp_path: Path) -> PackageCache:
    return PackageCache(tmp_path / "deep" / "packages")


@pytest.mark.slow
def test_a_package_is_found_by_another_process(cache: PackageCache) -> None:
    at = kept(cache, "a1")
    program = (
        "import sys; from pathlib import Path; from tfnb.execution.compiling.package_cache import PackageCache\n"
        f"cache = PackageCache(Path({str(cache.folder)!r}))\n"
        "print(cache.find('a1'), cache.find('b2'), cache.facts('a1'))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert ended.stdout.split("\n")[0] == f"{at} None {{'seconds': 1.5}}", ended.stderr


def test_files_are_private_to_the_user(cache: PackageCache) -> None:
    kept(cache, "a1")
    cache.note("a1", {"us": 12})
    modes = {path.name: path.stat().st_mode & 0o777 for path in (cache.folder, *cache.folder.glob("**/*"))}
    assert modes["packages"] == modes["a1"] == 0o700
    assert modes["entry.json"] == 0o600


@pytest.mark.parametrize("name", ["step.so", "kernels/one.so", "entry.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "longer", "absent"])
def test_damage_is_a_miss_and_the_entry_goes(cache: PackageCache, name: str, how: str) -> None:
    path = kept(cache, "a1") / name
    data = path.read_bytes()
    if how == "absent":
        path.unlink()
    else:
        new = {"flipped": bytes([data[0] ^ 1, *data[1:]]), "truncated": data[:-1], "longer": data + b" "}[how]
        path.write_bytes(new)
    assert cache.find("a1") is None
    assert not (cache.folder / "a1").exists()
    assert kept(cache, "a1") == cache.find("a1")


def test_a_killed_writer_leaves_no_entry(cache: PackageCache) -> None:
    draft = cache.draft()
    (draft / "step.so").write_bytes(b"half")
    os.utime(draft, (time.time() - 2 * package_cache.FORGOTTEN,) * 2)
    kept(cache, "a1")
    assert not draft.exists() and cache.find("a1") is not None


def test_the_second_of_two_writers_gets_what_the_first_wrote(cache: PackageCache) -> None:
    first = kept(cache, "a1")
    assert kept(cache, "a1", size=7) == first
    assert (first / "step.so").stat().st_size == 100
    assert [path.name for path in cache.folder.iterdir()] == ["a1"]


def test_the_entry_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages", limit=300_000)
    for age, key in enumerate("abc"):
        os.utime(kept(cache, key, size=80_000), (1e9 + age, 1e9 + age))
    assert cache.find("a") is not None  # used now
    kept(cache, "d", size=100_000)
    assert {key for key in "abcd" if cache.find(key)} == {"a", "c", "d"}


def test_a_package_beyond_the_limit_is_given_and_not_kept(tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages", limit=1000)
    small, large = kept(cache, "a", size=10), kept(cache, "b", size=5000)
    assert (large / "step.so").stat().st_size == 5000
    assert cache.find("a") == small and cache.find("b") is None


def test_facts_are_added(cache: PackageCache) -> None:
    kept(cache, "a1")
    cache.note("a1", {"us": 12})
    cache.note("nothing", {"us": 12})
    assert cache.facts("a1") == {"seconds": 1.5, "us": 12} and cache.facts("nothing") == {}
    assert cache.find("a1") is not None


def test_clearing_leaves_nothing(cache: PackageCache) -> None:
    kept(cache, "a1"), kept(cache, "b2")
    assert cache.clear() == 2
    assert list(cache.folder.iterdir()) == []


def test_a_folder_that_others_can_use_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    folder = tmp_path / "packages"
    folder.mkdir(mode=0o700)
    assert PackageCache(folder).folder == folder
    folder.chmod(0o770)
    cache = PackageCache(folder)
    with pytest.warns(UserWarning, match="others may use .*packages: chmod 700: they are kept in .*run/tfnb/packages"):
        at = kept(cache, "a1")
    assert cache.find("a1") == at and at.is_relative_to(tmp_path / "run")
    assert list(folder.iterdir()) == []
    assert "others may use" in repr(cache)


def test_folder_and_limit_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TFNB_CACHE_MB", "3")
    found = packages.__wrapped__()
    assert (found.folder, found.limit) == (tmp_path / "packages", 3 << 20)
    monkeypatch.setenv("TFNB_CACHE_MB", "3G")
    with pytest.raises(InvalidArgument, match="TFNB_CACHE_MB is a number of MiB, not '3G'"):
        packages.__wrapped__()


@pytest.mark.slow
def test_a_package_is_of_the_sources_that_shape_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    bare = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "tfnb", tmp_path / "tfnb", ignore=bare)
    shutil.copytree(root / "kernels", tmp_path / "tfnb" / "kernels", ignore=bare)
    program = (
        f"import os, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tfnb.execution.compiling.package_cache import surroundings\n"
        "before = surroundings()\n"
        "for path in sys.argv[1:]:\n"
        f"    os.utime(os.path.join({str(tmp_path / 'tfnb')!r}, path), ns=(0, 0))\n"
        "    now = surroundings.__wrapped__()\n"
        "    print(path, before != now)\n"
        "    before = now\n"
    )
    shaping = ["kernels/formulas.py", "errors.py", "graph/op_facts.py", "execution/lowering/lower.py",
               "execution/tiers/native/call.h", "recording/values/views.py"]  # fmt: skip
    others = [
        "session/session.py",
        "cluster/server/core.py",
        "gradients/walker.py",
        "view/dot.py",
        "recording/cells/block.py",
    ]
    ended = subprocess.run([sys.executable, "-P", "-c", program, *shaping, *others], capture_output=True, text=True,
                           timeout=200, cwd=tmp_path)  # fmt: skip
    wanted = [f"{path} {path in shaping}" for path in (*shaping, *others)]
    assert ended.stdout.splitlines() == wanted, ended.stderr


def test_a_package_is_of_this_code_and_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> tuple[str, str]:
        machine.cache_clear()
        return machine(), surroundings.__wrapped__()

    found = {digests()}
    assert found == {digests()}
    try:
        with monkeypatch.context() as other:
            other.setenv("CXX", "/bin/true")
            found.add(digests())
            other.setattr(package_cache, "_processor", lambda: "flags: none")
            found.add(digests())
            other.setattr("torch.__version__", "1.0")
            found.add(digests())
    finally:
        machine.cache_clear()
    assert [len(set(each)) for each in zip(*found, strict=True)] == [4, 4]
    assert json.dumps(sorted(found)).isascii()


def test_who_makes_an_entry_is_waited_for_as_long_as_it_is_wanted(cache: PackageCache) -> None:
    shutil.rmtree(cache.folder)
    looks = iter([True, True, False])
    with cache.alone("a1", 60):
        assert cache.folder.stat().st_mode & 0o777 == 0o700
        begin = time.monotonic()
        with cache.alone("b2", 60), cache.alone("a1", 60, lambda: next(looks)):  # of another object, as of a process
            assert next(looks, None) is None
        assert time.monotonic() - begin < 30
    assert list(cache.folder.iterdir()) == []
