"""Small files in folders that other users may write to, or where a process died: reading, locking, replacing, appending.

What may lie there, and what happens:

- A FIFO, a device, a socket or a directory in the place of a file is an OSError at once: nothing waits, nothing is written.
- A symbolic link in the place of a file is followed by readers only (mounted configurations are links). Writers refuse it,
  and replacing puts a new file in the place of the link.
- A folder is opened once and all else happens relative to it, so that it cannot be exchanged meanwhile. A link to a folder
  must belong to this user, to root or to whom the folder belongs. Links further up are the kernel's (`protected_symlinks`).
- Locks are `flock`s, which end with the process that holds them. A lock file is never written to, emptied or removed. A
  process that holds its lock for ever costs a TimeoutError.
- New content is written beside the old file, which it then replaces as a whole. What killed writers left is removed later.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dmattn_ops.environment import warn_once

LEFTOVER_SECONDS = 3600.0  # age from which on a temporary file has no writer
_LONGEST_PAUSE = 0.05  # seconds between two attempts to get a lock
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # file systems without them
# Windows has none of these, and no kernels to tune; files are read there too
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _refuse_irregular(found: os.stat_result, name: str | Path) -> None:
    """Raise OSError for what is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}", str(name))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors tell the whole path of a file that is reached through its open folder."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def read(path: Path, limit: int) -> bytes:
    """Return the content of a regular file; OSError where there is none, or where it has more than `limit` bytes."""
    _refuse_irregular(os.stat(path), path)  # to open a device may already do something
    with os.fdopen(os.open(path, os.O_RDONLY | _AT_ONCE | _BINARY), "rb") as file:
        _refuse_irregular(os.fstat(file.fileno()), path)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def append(path: Path, line: str) -> None:
    """Append a line to a regular file, which is made where there is none; OSError where that cannot be.

    In a folder that everybody may write to, the file must be this user's.
    """
    with suppress(FileNotFoundError):
        _refuse_irregular(os.lstat(path), path)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _AT_ONCE | _NO_LINK | _BINARY, 0o666)
    try:
        found = os.fstat(handle)
        _refuse_irregular(found, path)
        if found.st_uid != _user() and os.stat(path.parent).st_mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM, "it belongs to another user, in a folder that everybody may write to", str(path)
            )
        os.write(handle, (line + "\n").encode())
    finally:
        os.close(handle)


class Folder(NamedTuple):
    """An open folder, and what others may do in it."""

    path: Path
    handle: int
    others: int  # the bits 0o066 of its mode, 0 where it is not shared

    def replace(self, name: str, content: bytes) -> None:
        """Put a file with this content in the place of `name`, be that missing, a file or a link."""
        temporary = f"{name}-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _AT_ONCE | _NO_LINK
        with _named(self.path / name):
            handle = os.open(temporary, flags, 0o600, dir_fd=self.handle)
            try:
                with os.fdopen(handle, "wb") as file:
                    os.fchmod(handle, 0o600 | self.others & 0o044)
                    file.write(content)
                os.replace(temporary, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self.handle)
                raise

    def set_aside(self, name: str, new_name: str) -> None:
        """Rename a file, over one that has the new name."""
        with _named(self.path / name):
            os.replace(name, new_name, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def remove_leftovers(self, name: str) -> None:
        """Remove the temporary files of writers of `name` that were killed, as far as they are this user's."""
        oldest = time.time() - LEFTOVER_SECONDS
        for each in os.listdir(self.handle):
            if each.startswith(f"{name}-") and each.endswith(".tmp"):
                with suppress(OSError):
                    found = os.stat(each, dir_fd=self.handle, follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and found.st_uid == _user() and found.st_mtime < oldest:
                        os.unlink(each, dir_fd=self.handle)

    @contextmanager
    def locked(self, name: str, seconds: float) -> Iterator[None]:
        """Hold the lock `name`; TimeoutError where another process keeps it for `seconds`."""
        with _named(self.path / name):
            handle = self._open_lock(name)
        try:
            _refuse_irregular(os.fstat(handle), self.path / name)
            _wait_for_lock(handle, self.path / name, seconds)
            yield
        finally:
            os.close(handle)

    def _open_lock(self, name: str) -> int:
        flags = os.O_RDWR | _AT_ONCE | _NO_LINK
        while True:
            try:
                _refuse_irregular(os.stat(name, dir_fd=self.handle, follow_symlinks=False), self.path / name)
                return os.open(name, flags, dir_fd=self.handle)
            except PermissionError:  # of another user: to have it open for reading is enough on most file systems
                return os.open(name, flags & ~os.O_RDWR | os.O_RDONLY, dir_fd=self.handle)
            except FileNotFoundError:
                with suppress(FileExistsError):  # another process made it meanwhile
                    handle = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.handle)
                    os.fchmod(handle, 0o600 | self.others)  # NFS gives locks only to who may write to the file
                    return handle


def _wait_for_lock(handle: int, path: Path, seconds: float) -> None:
    import fcntl  # not on Windows

    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warn_once(f"{path.parent} has no locks: what others write at the same time may be lost")
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held this lock for {seconds:g} s", str(path))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@contextmanager
def opened(path: Path, shared: bool) -> Iterator[Folder]:
    """Open a folder, which is made where there is none; OSError where it should not be written to.

    Files of a shared folder can be read by whoever may list it. One that is not shared is for this user: it is made with
    mode 0700, its files have 0600, and root does not write into the home of somebody else (as under `sudo`, which may keep
    HOME), who could not change what root leaves there.
    """
    if not shared and _user() == 0:
        existing = next((each for each in (path, *path.parents) if each.exists()), path)
        if existing.exists() and existing.stat().st_uid != 0:
            raise PermissionError(errno.EPERM, "it belongs to another user than root", str(existing))
    with suppress(FileExistsError):  # a file there is told of below
        path.mkdir(mode=0o777 if shared else 0o700, parents=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _AT_ONCE)
    try:
        folder, named = os.fstat(handle), os.lstat(path)
        if stat.S_ISLNK(named.st_mode) and named.st_uid not in (_user(), 0, folder.st_uid):
            raise PermissionError(errno.EPERM, "it is a symbolic link of another user", str(path))
        yield Folder(path, handle, folder.st_mode & 0o066 if shared else 0)
    finally:
        os.close(handle)
