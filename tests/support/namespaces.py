"""Two hosts on one machine: network namespaces that a veth pair joins, with ranks in each.

    def test_between_hosts() -> None:
        with TwoHosts(ranks_per_host=2) as hosts:
            hosts.run(some_function, 10)  # as in `tests.support.world`: some_function(context, 10) on 4 ranks
            hosts.cut()                   # from now on nothing gets through
            assert hosts.gather(another_function) == ...

Ranks 0 and 1 are on the first host, 2 and 3 on the second. Gloo and NIXL (UCX over TCP) find the interface by
the environment that is set here. Only networks and hostnames are made twice: the ranks still share memory
and the file system. But a Buffer takes ranks with different hostnames for ranks on different hosts.

The namespaces have no name. They are gone when nobody holds them any more, which are this process and the
ranks: nothing is left behind, however pytest ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import pytest
import torch

from anyep.nixl_packages import find_nixl
from tests.support.world import World

NUM_HOSTS: Final = 2
INTERFACE: Final = "wire"
"""The name of the interface to the other host, on both."""
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUTS: Final = 0x04000000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
COMMAND_TIMEOUT_S: Final = 20


class TwoHosts(World):
    """A world whose ranks live on two hosts. Where there cannot be any, the test is skipped."""

    def __init__(self, ranks_per_host: int) -> None:
        missing = _what_is_missing()
        if missing is not None:
            pytest.skip(missing)
        self._namespaces: list[int] = []
        try:
            for _ in range(NUM_HOSTS):
                self._namespaces.append(_new_namespace())
            self._join()
        except BaseException:
            self._leave()
            raise
        paths = tuple(f"/proc/{os.getpid()}/fd/{namespace}" for namespace in self._namespaces)
        super().__init__(NUM_HOSTS * ranks_per_host, _Move(paths, ranks_per_host))

    def close(self) -> None:
        """End the processes and the network. It cannot be used again."""
        super().close()
        self._leave()

    def cut(self) -> None:
        """Take the link down: packets are lost, and nobody is told."""
        self._ip(0, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Take the link up again."""
        self._ip(0, "link", "set", INTERFACE, "up")
        self._wait_until_up()

    def _join(self) -> None:
        far_end = f"/proc/{os.getpid()}/fd/{self._namespaces[1]}"
        peer = ("peer", "name", INTERFACE, "netns", far_end)
        self._ip(0, "link", "add", INTERFACE, "type", "veth", *peer)
        for host in range(NUM_HOSTS):
            self._ip(host, "address", "add", f"10.77.0.{host + 1}/24", "dev", INTERFACE)
            self._ip(host, "link", "set", "lo", "up")
            self._ip(host, "link", "set", INTERFACE, "up")
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        """The kernel takes up to a second to call a link running, and UCX does not use it before."""
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        for host in range(NUM_HOSTS):
            while " state UP " not in self._ip(host, "-oneline", "link", "show", INTERFACE):
                if time.monotonic() > deadline:
                    raise OSError(f"the link between the hosts did not come up in {COMMAND_TIMEOUT_S} s")
                time.sleep(0.02)

    def _ip(self, host: int, *arguments: str) -> str:
        """What the command `ip` says on a host."""

        def call() -> str:
            _enter(self._namespaces[host])
            finished = subprocess.run(
                [_path_of_ip() or "ip", *arguments],
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            if finished.returncode:
                raise OSError(f"ip {' '.join(arguments)}: {finished.stderr.strip()}")
            return finished.stdout

        return _in_thread(call)

    def _leave(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())


def cut_own_link() -> None:
    """On a rank: take the link of its host down."""
    subprocess.run([_path_of_ip() or "ip", "link", "set", INTERFACE, "down"], check=True)


@dataclass(frozen=True)
class _Move:
    """What moves a rank's process to its host."""

    namespaces: tuple[str, ...]
    ranks_per_host: int

    def __call__(self, rank: int) -> None:
        namespace = os.open(self.namespaces[rank // self.ranks_per_host], os.O_RDONLY)
        _enter(namespace)
        os.close(namespace)
        # UCX looks for interfaces in /sys, which shows those of the namespace that it was mounted in.
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
        socket.sethostname(f"anyep-host-{rank // self.ranks_per_host}")
        _check(_libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount /")
        _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount /sys")
        os.environ |= {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "UCX_NET_DEVICES": INTERFACE,
            "UCX_TLS": "tcp,self",
        }


T = TypeVar("T")
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _new_namespace() -> int:
    """A descriptor of a network namespace that nobody is in."""

    def make() -> int:
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def _enter(namespace: int) -> None:
    """Move this thread, and what it starts from here on, into a network namespace."""
    _check(_libc.setns(namespace, CLONE_NEWNET), "setns")


def _in_thread(function: Callable[[], T]) -> T:
    """What a function returns that changes its thread's namespace: it gets a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _path_of_ip() -> str | None:
    return shutil.which("ip", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _what_is_missing() -> str | None:
    """Why there cannot be two hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if _path_of_ip() is None:
        return "network namespaces need `ip`: install iproute2"
    if find_nixl(torch.version.cuda) is None:
        return "NIXL is not installed: pip install 'anyep[network]'"
    try:
        os.close(_new_namespace())
    except PermissionError as error:
        return f"network namespaces are not allowed here ({error}): give the container CAP_SYS_ADMIN"
    return None
