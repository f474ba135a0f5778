"""A separate network for a benchmark: the loopback of a new network namespace (Linux).

Andon's sockets to this machine set their own congestion control (`andon.transport.tcp.connect`). gloo's sockets use the
system's default, which may pace what they send (bbr) and cannot be set from outside. In a new namespace the default can
be set for all sockets. A rate limits the loopback.
"""

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Final

from andon.errors import UserError

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 0x1
OURS: Final = "reno"
"""The congestion control of Andon's sockets to this machine."""
CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def enter_network(rate: str = "") -> str:
    """Move this process, and those it starts, to a new network; returns a note if that is not possible.

    Without root this needs a user namespace, which a process with threads cannot enter: call it before torch is
    imported. If a rate (4gbit) is given and cannot be set, that is an error.
    """
    try:
        _new_namespace()
        _set_loopback_up()
        if rate:
            _limit(rate)
        CONGESTION_CONTROL.write_text(OURS)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that there is no DNS
    except OSError as error:
        if rate:
            raise UserError(
                f"--rate {rate} is not possible here",
                f"It needs a network namespace: {error}",
                "Run it as root, or leave out --rate",
            ) from None
        system = CONGESTION_CONTROL.read_text().strip() if CONGESTION_CONTROL.exists() else "the system's"
        return f"gloo's sockets have {system} congestion control, Andon's {OURS}: no namespace ({error})"
    return ""


def _new_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError("network namespaces need Linux")
    if libc.unshare(CLONE_NEWNET) == 0:
        return
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def _limit(rate: str) -> None:
    if not shutil.which("tc"):
        raise OSError("the command tc (iproute2) is missing")
    command = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate]
    done = subprocess.run([*command, "burst", "4mb", "latency", "100ms"], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"tc: {done.stderr.strip()}")
