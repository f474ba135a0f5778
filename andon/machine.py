"""This process and its machine."""

import contextlib
import os
from importlib.metadata import version
from pathlib import Path
from socket import gethostname
from typing import Final

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
DEVICES: Final = Path("/dev")


def machine_id() -> str:
    """Equal for two processes that see each other's process ids: in the same boot of a host, or the same container."""
    if not PID_NAMESPACE.exists():
        return gethostname()
    return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"


def computes_on_gpu(device: str) -> bool:
    """Whether a worker with this setting of `device` would compute on a GPU here; does not load torch."""
    if device != "auto":
        return device == "cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    return visible and any(DEVICES.glob("nvidia[0-9]*")) and "+cpu" not in version("torch")


def name_process(name: str) -> None:
    """Set the name of this process in `top` and `ps -A`, up to 15 characters, where the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
