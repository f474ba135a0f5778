"""Which machine this process runs on."""

from pathlib import Path
from socket import gethostname

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Equal for two processes that see each other's process ids: one boot of one host, or one container."""
    if not PID_NAMESPACE.exists():
        return gethostname()
    return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"
