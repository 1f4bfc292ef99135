"""Folders writable by this user only: their files are loaded as code.

Whoever can write a folder above can put another one in its place, and whoever owns a link can lead it elsewhere. So
every step of a path is checked from the root on, also links and what they lead to. Root is trusted, as is a user who
has no number in this user namespace: an owner outside of the container.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows
    grp = pwd = None  # type: ignore[assignment]

LINKS = 40  # that a path leads through, as the system allows


def refusal(folder: Path) -> str | None:
    """The reason why a folder may not hold code of this user; None if safe. Missing folders are made private to the
    user.

    >>> with tempfile.TemporaryDirectory() as above:
    ...     refusal(Path(above) / "one" / "two") is None, (Path(above) / "one").stat().st_mode & 0o777 == 0o700
    (True, True)
    """
    try:
        if pwd is None:  # the folder lies in the user's profile
            folder.mkdir(parents=True, exist_ok=True)
            return None if os.access(folder, os.W_OK) else f"{folder} cannot be written"
        return _refusal(folder)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"


def spares() -> Iterator[Path]:
    """Folders for where the proper one may not be used: that of the user's session, one in the temp folder."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "tfnb"
    if pwd is not None:
        yield Path(tempfile.gettempdir()) / f"tfnb-{os.getuid()}"


def _refusal(folder: Path) -> str | None:
    at, found = Path("/"), Path("/").stat()
    left, links = [*reversed(folder.absolute().parts[1:])], 0
    while left:
        if (why := _writers(at, found)) is not None:
            return why
        part = left.pop()
        child = at.parent if part == ".." else at / part
        found = _made(child)
        if found.st_uid not in {0, os.getuid(), *unmapped()}:
            return f"{child} belongs to another user (uid {found.st_uid})"
        if not stat.S_ISLNK(found.st_mode):
            at = child
            continue
        links += 1
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = child.readlink()
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[target.is_absolute() :])
        found = at.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
    if found.st_uid != os.getuid():
        return f"{at} belongs to another user (uid {found.st_uid})"
    if found.st_mode & 0o077:
        return f"others may use {at}: chmod 700"
    return None if os.access(at, os.W_OK) else f"{at} cannot be written"


def _made(path: Path) -> os.stat_result:
    """The stat of a path; a missing path is made a folder."""
    try:
        return path.lstat()
    except FileNotFoundError:
        path.mkdir(mode=0o700, exist_ok=True)  # another process may have made it
        return path.lstat()


def _writers(folder: Path, found: os.stat_result) -> str | None:
    """The reason why other users could replace entries of a folder; None if they cannot."""
    mode = found.st_mode
    if mode & stat.S_ISVTX and found.st_uid in (0, os.getuid()):  # as /tmp: what is not theirs stays in its place
        return None
    if mode & 0o002:
        return f"others may replace what lies in {folder}"
    if mode & 0o020 and (_has_list(folder) or is_shared(found.st_gid)):
        return f"a group of others (gid {found.st_gid}) may replace what lies in {folder}"
    return None


def _has_list(folder: Path) -> bool:
    """Whether a folder has an access control list, of which the group mode is only the mask."""
    return hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(folder)


@cache
def is_shared(group: int) -> bool:
    """Whether somebody but this user and root is in a group, or nobody can tell."""
    me, users = os.getuid(), pwd.getpwall()
    try:
        found, name = grp.getgrgid(group), next((user.pw_name for user in users if user.pw_uid == me), None)
        if name is None and group != 0 and (name := pwd.getpwuid(me).pw_name) != found.gr_name:
            return True  # a directory service that does not list its users
    except KeyError:
        return True
    others = [user for user in users if user.pw_uid not in (0, me)]
    return bool(set(found.gr_mem) - {name, "root"}) or any(user.pw_gid == group for user in others)


@cache
def unmapped() -> frozenset[int]:
    """The overflow uid, standing for unmapped users in this user namespace, unless mapped to a user."""
    try:
        ranges = [[*map(int, line.split())] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset()
    return frozenset() if any(first <= nobody < first + count for first, _, count in ranges) else frozenset({nobody})
