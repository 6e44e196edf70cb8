"""The folder where compiled kernels are kept between processes, one file per kernel.

    folder = open_folder(key)                # ~/.cache/anyep/KEY, or raises Unusable
    folder.write("notify.post_notify", identity, machine_code)
    folder.read("notify.post_notify", identity)

The files hold code that will be run, so the folder must belong to this user, and no other user may be able to
write to it. There is no fallback: if the folder cannot be used, nothing is kept.

The key is a hash of the sources that kernels are made of, not a version or a date: sources in a checkout
change while its version stays the same. `identity` holds the rest, such as the processor. A file whose
checksum does not match its identity and content counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from anyep.settings import CACHE_DIR

VARIABLE: Final = CACHE_DIR.name
NUM_KEPT: Final = 8
"""The number of keys that stay in the folder; older ones are removed unless a process uses them."""
POLL_S: Final = 0.05
LONG_WAIT_S: Final = 10.0
"""After this long a process reports what it waits for."""
OLD_S: Final = 3600.0
"""A temporary file older than this was left by a process that was killed."""
GIVE_UP_S: Final = 300.0
"""After this long a process stops waiting: the process that holds the lock may be suspended."""
_OTHERS_CAN_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_CHECKSUM_BYTES: Final = hashlib.sha256().digest_size


class Unusable(Exception):
    """The folder cannot be used; the message says why."""


def hash_of_files(paths: Iterable[Path]) -> str:
    """A hash of the names and contents of some files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def base_folder() -> Path:
    """The folder of this user's compiled kernels: ANYEP_CACHE_DIR, else anyep in the user's cache folder."""
    if named := CACHE_DIR.choose().value:
        return Path(named).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():  # the XDG specification says to ignore relative paths
        return cache / "anyep"
    try:
        return Path.home() / ".cache" / "anyep"
    except RuntimeError as error:
        raise Unusable("this user has no home folder") from error


def open_folder(key: str) -> Folder:
    """The folder for kernels compiled from these sources; it is created if it does not exist."""
    base = base_folder()
    _make_private(base, base / key)
    return Folder(base / key)


def private_base_folder() -> Path:
    """The base folder; it is created if it does not exist."""
    base = base_folder()
    _make_private(base)
    return base


def _make_private(*folders: Path) -> None:
    """Create folders that do not exist, and refuse one that another user could have written to."""
    try:
        for folder in (*reversed(folders[0].parents), *folders):
            with contextlib.suppress(FileExistsError):
                if not folder.exists():
                    folder.mkdir(mode=0o700)
        for folder in folders:
            check_private(folder)
    except OSError as error:
        raise Unusable(f"{error.filename} cannot be used: {error.strerror}") from error


def check_private(folder: Path) -> None:
    """Refuse a folder that another user could have written to."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{folder} is not a folder")
    _check_only_mine(folder, status)


def _check_only_mine(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise Unusable(
            f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
        )
    if status.st_mode & _OTHERS_CAN_WRITE:
        raise Unusable(f"other users can write {path} (to change that: chmod go-w {path})")


def read_private(path: Path) -> bytes:
    """The content of a file; raises OSError, and Unusable if another user could have written it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        _check_only_mine(path, os.fstat(descriptor))
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically: readers find all of it or nothing. Raises Unusable if it cannot."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Unusable(f"{path.parent} cannot be written: {error.strerror}") from error


class Folder:
    """The kernels compiled from one version of the sources, and the lock for compiling them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # `prune` keeps the newest keys, and any older key while a process holds this shared lock on it.
        with contextlib.suppress(OSError):
            os.utime(path)
        with contextlib.suppress(OSError):
            self._in_use = os.open(path / "in-use", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def has(self, name: str) -> bool:
        """Whether the file exists; its contents are not checked."""
        return (self.path / name).exists()

    def read(self, name: str, identity: str) -> bytes | None:
        """What was written under this name and identity, or None if it is missing or damaged."""
        try:
            content = read_private(self.path / name)
        except (OSError, Unusable):
            return None
        checksum, payload = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        return payload if checksum == _checksum(identity, payload) else None

    def write(self, name: str, identity: str, payload: bytes) -> None:
        """Write a file atomically: readers find all of it or nothing. Raises Unusable if it cannot."""
        write_private(self.path / name, _checksum(identity, payload) + payload)

    def remove(self, name: str) -> None:
        """Remove a file if possible."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    @contextlib.contextmanager
    def locked(
        self, on_long_wait: Callable[[int], None], name: str = "lock", give_up_s: float | None = None
    ) -> Iterator[None]:
        """Exclude other processes that use the lock of this name: those of this machine, or of all machines
        that share the folder.

        The kernel releases the lock of a process that dies. If locks are not supported, or the folder cannot
        be written, no process waits. `on_long_wait` is called with the id of the process that holds the lock,
        unless it is a sibling of this one: a rank of the same job, which reports its own progress.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path / name, flags, 0o600)
        except OSError:
            yield
            return
        try:
            _wait_for_lock(descriptor, on_long_wait, GIVE_UP_S if give_up_s is None else give_up_s)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {os.getppid()}".encode(), 0)
            yield
        finally:
            # Unlock explicitly: close() does not if a process forked meanwhile has this descriptor, too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def prune(self) -> None:
        """Remove old keys, and files that a killed process left. Call it with the lock held."""
        for leftover in self.path.glob("*.tmp"):
            with contextlib.suppress(OSError):
                # A newer one may belong to a process that writes without the lock.
                if time.time() - leftover.stat().st_mtime > OLD_S:
                    leftover.unlink()
        by_age: list[tuple[float, Path]] = []
        for path in self.path.parent.iterdir():
            with contextlib.suppress(OSError):
                if re.fullmatch("[0-9a-f]{32}", path.name) and path != self.path:
                    by_age.append((path.stat().st_mtime, path))
        for _, path in sorted(by_age, reverse=True)[NUM_KEPT - 1 :]:
            if not _is_in_use(path):
                shutil.rmtree(path, ignore_errors=True)


def _checksum(identity: str, payload: bytes) -> bytes:
    return hashlib.sha256(identity.encode() + b"\0" + payload).digest()


def _wait_for_lock(descriptor: int, on_long_wait: Callable[[int], None], give_up_s: float) -> None:
    started = time.monotonic()
    has_waited_long = False
    while time.monotonic() - started < give_up_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return
        if not has_waited_long and time.monotonic() - started >= LONG_WAIT_S:
            has_waited_long = True
            holder, _, parent = os.pread(descriptor, 64, 0).partition(b" ")
            if holder.isdigit() and parent != str(os.getppid()).encode():
                on_long_wait(int(holder))
        time.sleep(POLL_S)


def _is_in_use(path: Path) -> bool:
    """Whether a process uses this folder; True if that cannot be determined."""
    try:
        descriptor = os.open(path / "in-use", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
