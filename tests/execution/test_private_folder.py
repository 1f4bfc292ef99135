"""Code is loaded only from folders that nobody but this user and root can fill: the whole path is checked."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfnb.execution.compiling import private_folder
from tfnb.execution.compiling.package_cache import PackageCache
from tfnb.execution.compiling.private_folder import refusal

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
STRANGER, MINE, TEAM = 12345, 4321, 100  # uid, and gids


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    made = tmp_path / "parent"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[str]]], None]:
    """Replaces the users and groups of the machine: this user, a stranger, and these members of groups."""

    def replace(members: dict[int, list[str]]) -> None:
        def group(number: int) -> SimpleNamespace:
            if number not in members:
                raise KeyError(number)
            return SimpleNamespace(gr_name=f"g{number}", gr_mem=members[number])

        me = SimpleNamespace(pw_name="me", pw_uid=os.getuid(), pw_gid=MINE)
        other = SimpleNamespace(pw_name="other", pw_uid=STRANGER, pw_gid=STRANGER)
        monkeypatch.setattr(grp, "getgrgid", group)
        monkeypatch.setattr(pwd, "getpwall", lambda: [me, other])
        monkeypatch.setattr(private_folder, "is_shared", private_folder.is_shared.__wrapped__)

    return replace


# -- parents of others --------------------------------------------------------------------------------------


@as_root
def test_a_parent_of_another_user_is_refused(parent: Path) -> None:
    (parent / "deep").mkdir(mode=0o755)
    os.chown(parent, STRANGER, STRANGER)
    assert f"{parent} belongs to another user (uid {STRANGER})" in str(refusal(parent / "deep" / "packages"))
    assert not (parent / "deep" / "packages").exists()


@as_root
def test_a_sticky_parent_of_another_user_is_refused(parent: Path) -> None:
    os.chown(parent, STRANGER, STRANGER)
    parent.chmod(0o1777)
    assert "belongs to another user" in str(refusal(parent / "packages"))


def test_a_sticky_parent_of_ours_is_taken_and_one_without_the_bit_is_not(parent: Path) -> None:
    parent.chmod(0o1777)
    assert refusal(parent / "packages") is None
    parent.chmod(0o777)
    assert f"others may replace what lies in {parent}" in str(refusal(parent / "packages"))


@as_root
def test_what_others_put_into_a_sticky_folder_is_refused(parent: Path) -> None:
    parent.chmod(0o1777)
    (parent / "packages").mkdir(mode=0o700)
    os.chown(parent / "packages", STRANGER, STRANGER)
    assert "belongs to another user" in str(refusal(parent / "packages"))


# -- groups -------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize(
    ("mode", "gid", "members", "is_taken"),
    [
        (0o775, MINE, {MINE: []}, True),  # umask 002, a group for each user
        (0o775, MINE, {MINE: ["me"]}, True),
        (0o2775, TEAM, {TEAM: []}, True),  # docker-stacks: the home is of the group "users", in which nobody else is
        (0o2775, TEAM, {TEAM: ["me", "other"]}, False),  # the scratch folder of a project
        (0o775, STRANGER, {STRANGER: []}, False),  # the first group of another user
        (0o775, 777, {MINE: []}, False),  # a group that is not known here
        (0o755, STRANGER, {STRANGER: ["other"]}, True),  # may read
        (0o3775, TEAM, {TEAM: ["other"]}, True),  # sticky, and ours
    ],
)
def test_a_group_may_write_a_parent_if_nobody_else_is_in_it(
    parent: Path, groups: Callable[[dict[int, list[str]]], None], mode: int, gid: int, members: dict[int, list[str]],
    is_taken: bool,
) -> None:  # fmt: skip
    groups(members)
    os.chown(parent, -1, gid)
    parent.chmod(mode)
    found = refusal(parent / "packages")
    assert (found is None) == is_taken, found
    assert is_taken or f"a group of others (gid {gid})" in str(found)


def test_a_list_of_writers_beside_the_mode_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent.chmod(0o775)
    assert refusal(parent / "packages") is None
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"] if path == parent else [])
    assert "a group of others" in str(refusal(parent / "packages"))


def test_what_is_made_is_private_whatever_the_umask(parent: Path) -> None:
    before = os.umask(0o002)
    try:
        assert refusal(parent / "a" / "b" / "packages") is None
    finally:
        os.umask(before)
    for made in ("a", "a/b", "a/b/packages"):
        assert (parent / made).stat().st_mode & 0o777 == 0o700


# -- links --------------------------------------------------------------------------------------------------


def test_links_are_followed_and_what_they_lead_through_is_checked(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(parent / ".." / "mine")
    (tmp_path / "again").symlink_to("link")
    assert refusal(tmp_path / "again" / "packages") is None
    assert (tmp_path / "mine" / "packages").is_dir()
    (parent / "open").mkdir()
    (parent / "open").chmod(0o777)
    (parent / "open" / "mine").symlink_to(tmp_path / "mine")
    (tmp_path / "through").symlink_to(parent / "open" / "mine")
    assert "others may replace what lies in" in str(refusal(tmp_path / "through" / "packages"))


@as_root
def test_a_link_of_another_user_is_refused_in_a_sticky_folder(parent: Path, tmp_path: Path) -> None:
    parent.chmod(0o1777)
    (parent / "link").symlink_to(tmp_path)
    assert refusal(parent / "link" / "packages") is None
    os.lchown(parent / "link", STRANGER, STRANGER)
    assert f"{parent / 'link'} belongs to another user" in str(refusal(parent / "link" / "packages"))


def test_links_in_a_circle_and_files_are_no_folders(parent: Path) -> None:
    (parent / "a").symlink_to("b")
    (parent / "b").symlink_to("a")
    assert "symbolic links" in str(refusal(parent / "a" / "packages"))
    (parent / "file").write_text("")
    assert "Not a directory" in str(refusal(parent / "file" / "packages"))
    assert "Not a directory" in str(refusal(parent / "file"))


# -- containers ---------------------------------------------------------------------------------------------


@as_root
def test_owners_outside_of_the_user_namespace_are_trusted(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(parent, 65534, 65534)
    assert "belongs to another user" in str(refusal(parent / "packages"))  # here it is the user nobody
    monkeypatch.setattr(private_folder, "unmapped", lambda: frozenset({65534}))
    assert refusal(parent / "packages") is None
    os.chown(parent / "packages", 65534, 65534)
    assert "belongs to another user" in str(refusal(parent / "packages"))  # not the folder itself
    parent.chmod(0o1777)
    assert "others may replace" in str(refusal(parent / "packages"))  # sticky: root's or ours


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ("         0          0 4294967295\n", frozenset()),
        ("         0       1000          1\n", frozenset({65534})),
        ("         0       1000          1\n         1     100000      65536\n", frozenset()),  # "nobody" has a number
    ],
)
def test_a_namespace_says_whether_a_user_has_a_number_there(
    monkeypatch: pytest.MonkeyPatch, ranges: str, found: frozenset[int]
) -> None:
    texts = {"/proc/self/uid_map": ranges, "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert private_folder.unmapped.__wrapped__() == found


# -- the cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temp folder, of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp").chmod(0o1777)
    return tmp_path / "temp"


def kept(cache: PackageCache) -> Path:
    draft = cache.draft()
    (draft / "step.so").write_bytes(b"code")
    return cache.keep("a1", draft, {})


def test_a_folder_that_is_opened_later_is_left_with_one_note(parent: Path, spare: Path) -> None:
    cache = PackageCache(parent / "packages")
    assert kept(cache) == parent / "packages" / "a1"
    parent.chmod(0o777)
    with pytest.warns(UserWarning, match=r"others may replace what lies in .* kept in .*Set TFNB_CACHE_DIR") as notes:
        assert cache.find("a1") is None
        assert kept(cache) == cache.find("a1") == spare / f"tfnb-{os.getuid()}" / "packages" / "a1"
    assert len(notes) == 1
    assert "others may replace" in repr(cache)


def test_the_folder_of_the_session_comes_first(parent: Path, spare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spare.parent / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(spare.parent / "run"))
    parent.chmod(0o777)
    with pytest.warns(UserWarning, match="TFNB_CACHE_DIR"):
        assert PackageCache(parent / "packages").folder == spare.parent / "run" / "tfnb" / "packages"


@as_root
def test_a_spare_folder_of_another_user_is_not_used(parent: Path, spare: Path) -> None:
    (spare / "tfnb-0").mkdir(mode=0o700)
    os.chown(spare / "tfnb-0", STRANGER, STRANGER)
    parent.chmod(0o777)
    with pytest.warns(UserWarning, match="no other folder was found that lasts longer than this process"):
        assert PackageCache(parent / "packages").folder.parent == spare


def test_where_no_folder_is_private_nothing_is_kept(parent: Path, spare: Path) -> None:
    parent.chmod(0o777)
    spare.chmod(0o777)
    cache = PackageCache(parent / "packages")
    assert cache.find("a1") is None
    with pytest.raises(PermissionError, match="set TFNB_CACHE_DIR"):
        cache.draft()
