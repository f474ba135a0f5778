"""This process and its machine."""

import contextlib
from pathlib import Path
from socket import gethostname

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Equal for two processes that see each other's process ids: in the same boot of a host, or the same container."""
    if not PID_NAMESPACE.exists():
        return gethostname()
    return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"


def name_process(name: str) -> None:
    """Set the name of this process in `top` and `ps -A`, up to 15 characters, where the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
