"""`andon doctor`: the facts about this machine that a bug report needs."""

import os
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from andon.run.display import human_bytes
from andon.version import VERSION

PACKAGES = ("torch", "numpy", "safetensors", "blake3", "tokenizers", "pydantic", "transformers", "pyarrow")


def examine(console: Console) -> None:
    """Print versions, cores, memory, devices, ports and shared memory."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in findings():
        table.add_row(name, value)
    console.print(table)


def findings() -> list[tuple[str, str]]:
    """Each fact with its name."""
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return [
        ("andon", VERSION),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("packages", versions),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("memory", f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"),
        ("disk", f"{human_bytes(shutil.disk_usage(Path.cwd()).free)} free here"),
        ("shared memory", f"{human_bytes(shutil.disk_usage(shared).free)} free" if shared.is_dir() else "none"),
        ("loopback", _loopback()),
        ("devices", _devices()),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _loopback() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return f"a port opens ({server.getsockname()[1]}); host name {socket.gethostname()}"
    except OSError as error:
        return f"no port opens: {error}"


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "CPU only: " + ("torch is built without CUDA" if torch.version.cuda is None else "no CUDA is visible")
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{each.name}, {human_bytes(each.total_memory)}" for each in names)
