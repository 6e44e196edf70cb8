"""Compiles the CPU's kernels: when a Buffer is made, or ahead by `anyep warmup`; never during a call.

    compile_kernels(Group.CONTROL, Group.NORMAL)

Kernels in the cache are loaded, which takes milliseconds per kernel. One process at a time compiles the rest,
which takes seconds, and prints its progress; the others wait, and load what it has compiled. If the cache
cannot be used, every process compiles for itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba

from anyep.backends.cache_folder import VARIABLE, Folder, Unusable, open_folder
from anyep.backends.cpu.compile_cache import source_key
from anyep.backends.cpu.kernels.compiler import KERNELS, PACKAGE, Group, Kernel
from anyep.errors import NotSupported
from anyep.progress import CompileProgress

log = logging.getLogger("anyep")
ShowProgress = Callable[[int, int], None]
"""Called with the number of kernels compiled so far, and the number of all kernels to compile."""
_lock = threading.Lock()
_numba_config: Any = numba.config


def _private_part(module: str, name: str) -> Any:
    """A private part of Numba; None if this release does not have it, and then nothing is cached."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


_CompileResult = _private_part("numba.core.compiler", "CompileResult")
_dumps = _private_part("numba.core.serialize", "dumps")


@dataclass(frozen=True)
class Compilation:
    """What one call of `compile_kernels` did."""

    num_kernels: int
    """How many were requested."""
    num_compiled: int
    """How many this process compiled; the others were compiled already, or loaded."""
    folder: Path | None
    """The cache folder, or None."""
    reason: str
    """Why nothing is cached, if `folder` is None."""


def compile_kernels(*groups: Group, show_progress: ShowProgress | None = None) -> Compilation:
    """Make the kernels of these groups callable; without groups, all kernels.

    `show_progress` replaces the progress line on stderr.
    """
    if _numba_config.DISABLE_JIT:
        raise NotSupported("NUMBA_DISABLE_JIT is set: AnyEP's kernels must be compiled; unset it")
    wanted = [kernel for kernel in KERNELS if not groups or kernel.group in groups]
    with _lock:
        # In the order of their definitions.
        missing = [kernel for kernel in wanted if not kernel.is_compiled]
        keeper = _keeper()
        num_compiled = keeper.compile(missing, show_progress or _progress.show) if missing else 0
        folder = None if keeper.folder is None else keeper.folder.path
        return Compilation(len(wanted), num_compiled, folder, keeper.reason)


def load_kernels() -> None:
    """Load all kernels in the cache, for processes that will be forked from this one.

    If the cache cannot be used, compile what every Buffer of normal mode needs: once, not in each process.
    """
    if _numba_config.DISABLE_JIT:
        return
    with _lock:
        keeper = _keeper()
        for kernel in KERNELS:
            if not kernel.is_compiled:
                keeper.load(kernel)
    if keeper.folder is None:
        compile_kernels(Group.CONTROL, Group.NORMAL)


def check_cache() -> None:
    """Raise NotSupported if compiled kernels cannot be cached."""
    if reason := _keeper().reason:
        raise NotSupported(
            f"compiled kernels cannot be kept: {reason}. Set {VARIABLE} to a folder that belongs to this user"
            f" and that nobody else can write."
        )


def show_progress_with(show: ShowProgress | None) -> None:
    """Report all compilations of this process to a function, instead of lines on stderr."""
    _progress.show_instead = show


class _Progress:
    """Shows a compilation on stderr, or with the function set by `show_progress_with`."""

    def __init__(self) -> None:
        self.show_instead: ShowProgress | None = None
        self._line: CompileProgress | None = None

    def show(self, num_done: int, num_kernels: int) -> None:
        if self.show_instead is not None:
            self.show_instead(num_done, num_kernels)
            return
        if self._line is None:
            self._line = CompileProgress(sys.stderr)
        self._line.show(num_done, num_kernels)
        if num_done == num_kernels:
            self._line.finish()
            self._line = None


_progress = _Progress()


class _Keeper:
    """Loads kernels from the cache, and compiles those that are not in it."""

    def __init__(self) -> None:
        self.folder: Folder | None = None
        self.reason = ""
        self._has_warned = False
        try:
            if not _knows_this_numba():
                raise Unusable(f"AnyEP does not know how to keep what Numba {numba.__version__} compiles")
            self.folder = open_folder(source_key())
        except Unusable as error:
            self.reason = str(error)

    def load(self, kernel: Kernel) -> bool:
        """Load a kernel if the cache has it."""
        if self.folder is None or not _can_be_kept(kernel):
            return False
        try:
            _compile(kernel, _CachedKernel(self, kernel, self.folder, load_only=True))
        except _NotKeptError:
            return False
        return True

    def compile(self, kernels: Sequence[Kernel], show: ShowProgress) -> int:
        """Load or compile these kernels; returns how many were compiled."""
        missing = [kernel for kernel in kernels if not self.load(kernel)]
        if self.folder is None or not missing:
            return self._compile_here(missing, show if _speaks() else _silent)
        with self.folder.locked(_say_who_is_waited_for):
            # The previous holder of the lock may have compiled them; loading them needs no lock.
            absent = [kernel for kernel in missing if not self._is_kept(kernel)]
            num_compiled = self._compile_here(absent, show, for_others=True)
            if absent and self.folder is not None:
                self.folder.prune()
        # Kernels whose files are damaged, or all if nothing could be written after all (a full disk).
        others = [kernel for kernel in missing if not kernel.is_compiled and not self.load(kernel)]
        return num_compiled + self._compile_here(others, show)

    def _compile_here(self, kernels: Sequence[Kernel], show: ShowProgress, for_others: bool = False) -> int:
        """Compile these kernels; returns how many. With `for_others`, stop once they cannot be cached."""
        if self.folder is None and kernels:
            self.warn()
        for num_done, kernel in enumerate(kernels):
            if for_others and self.folder is None:
                return num_done
            show(num_done, len(kernels))
            keep = self.folder is not None and _can_be_kept(kernel)
            _compile(kernel, _CachedKernel(self, kernel, self.folder) if keep and self.folder else None)
        if kernels:
            show(len(kernels), len(kernels))
        return len(kernels)

    def _is_kept(self, kernel: Kernel) -> bool:
        if self.folder is None or not _can_be_kept(kernel):
            return False
        return self.folder.has(_CachedKernel(self, kernel, self.folder).file_name)

    def give_up(self, reason: str) -> None:
        """Cache nothing from now on."""
        self.folder, self.reason = None, reason
        self.warn()

    def warn(self) -> None:
        """Warn once that nothing is cached."""
        if not self._has_warned and _speaks():
            log.warning(
                "AnyEP: compiled kernels are not kept: %s. Every process compiles them anew, which takes"
                " seconds to minutes. Set %s to a folder that belongs to this user and that nobody else can"
                " write.",
                self.reason,
                VARIABLE,
            )
        self._has_warned = True


@functools.cache
def _keeper() -> _Keeper:
    return _Keeper()


class _NotKeptError(Exception):
    """The cache does not have this kernel."""


class _CachedKernel:
    """The cache of one kernel: Numba asks it for the compiled function, as it asks its own cache."""

    cache_path = None

    def __init__(self, keeper: _Keeper, kernel: Kernel, folder: Folder, load_only: bool = False) -> None:
        self._keeper = keeper
        self._folder = folder
        self._load_only = load_only
        # Machines with different CPUs may share a home folder.
        target = kernel.dispatcher.targetctx.codegen().magic_tuple()
        self._identity = repr((folder.path.name, kernel.name, kernel.signature, target))
        self.file_name = f"{kernel.name}-{hashlib.sha256(self._identity.encode()).hexdigest()[:16]}.kernel"

    def load_overload(self, _signature: Any, target_context: Any) -> Any:
        """Called by Numba before it compiles."""
        # Numba's own cache does this too: a loaded kernel may need what it prepares.
        target_context.refresh()
        content = self._folder.read(self.file_name, self._identity)
        if content is not None:
            try:
                return _CompileResult._rebuild(target_context, *pickle.loads(content))
            except Exception:
                log.debug("AnyEP: %s cannot be loaded", self.file_name, exc_info=True)
                self._folder.remove(self.file_name)
        if self._load_only:
            raise _NotKeptError
        return None

    def save_overload(self, _signature: Any, result: Any) -> None:
        """Called by Numba after it has compiled."""
        if result.lifted or result.library.has_dynamic_globals:
            return
        try:
            self._folder.write(self.file_name, self._identity, _dumps(result._reduce()))
        except Unusable as error:
            self._keeper.give_up(str(error))

    def enable(self) -> None:
        """Part of the interface that Numba may call."""

    def disable(self) -> None:
        """Part of the interface that Numba may call."""

    def flush(self) -> None:
        """Part of the interface that Numba may call."""


def _compile(kernel: Kernel, cache: _CachedKernel | None) -> None:
    """Compile a kernel for its types, and prevent compilation for any others."""
    dispatcher = kernel.dispatcher
    if cache is not None:
        dispatcher._cache = cache
    dispatcher.disable_compile(False)
    try:
        dispatcher.compile(kernel.types)
    finally:
        dispatcher._can_compile = False


def _knows_this_numba() -> bool:
    """Whether Numba has the private parts that its own cache and this one use."""
    try:
        KERNELS[0].dispatcher.targetctx.codegen().magic_tuple()
    except AttributeError:
        return False
    used = ((_CompileResult, "_reduce"), (_CompileResult, "_rebuild"), (KERNELS[0].dispatcher, "_cache"))
    return _dumps is not None and all(hasattr(owner, name) for owner, name in used)


def _can_be_kept(kernel: Kernel) -> bool:
    """Whether the source hash covers a kernel; it does not cover those defined elsewhere, as in tests."""
    return kernel.module.startswith(PACKAGE + ".")


def _speaks() -> bool:
    """Whether this process prints messages that hold for every process of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say_who_is_waited_for(pid: int) -> None:
    if _speaks():
        print(f"AnyEP: waiting for process {pid}, which compiles the kernels", file=sys.stderr, flush=True)


def _silent(_num_done: int, _num_kernels: int) -> None:
    pass
