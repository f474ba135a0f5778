"""`andon doctor`: facts about this machine for a bug report."""

import json
import os
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Column, Table

from andon.bench.numerics import cost
from andon.numerics import has_avx2
from andon.run.screen.terminal import human_bytes
from andon.version import VERSION

PACKAGES = ("torch", "numpy", "safetensors", "blake3", "tokenizers", "pydantic", "transformers", "peft", "pyarrow")


def examine(as_json: bool, console: Console) -> None:
    """Print versions, cores, memory, devices, ports and shared memory."""
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    facts = {
        "andon": VERSION,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}",
        "disk": f"{human_bytes(shutil.disk_usage(Path.cwd()).free)} free here",
        "shared memory": f"{human_bytes(shutil.disk_usage(shared).free)} free" if shared.is_dir() else "none",
        "loopback": _loopback(),
        "devices": _devices(),
        "numerics": cost() if has_avx2() else "this processor has no AVX2, so its bits differ from other machines'",
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    for fact in facts.items():
        table.add_row(*fact)
    console.print(table)


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
