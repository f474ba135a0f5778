"""Which kernels torch computes with: `portable` ones, which give the same bits on every x86-64 CPU with AVX2, or
`native` ones, the fastest of this processor. Environment variables choose them, before torch computes anything."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

Numerics = Literal["portable", "native"]
AVX2: Final = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""The variables that torch's own kernels, MKL and oneDNN read when they start."""
CPUINFO: Final = Path("/proc/cpuinfo")


def kernels(numerics: Numerics) -> Mapping[str, str]:
    """The environment variables that choose the kernels; none for native kernels or without AVX2."""
    return AVX2 if numerics == "portable" and has_avx2() else {}


def has_avx2() -> bool:
    """Whether this processor has AVX2; outside Linux every x86-64 processor is assumed to have it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not CPUINFO.exists() or " avx2 " in CPUINFO.read_text()


def choose_kernels(numerics: Numerics) -> str:
    """Choose the kernels of this process; returns a warning if torch has chosen others before, else an empty text.

    torch must not have computed anything yet: each library reads its variable once."""
    os.environ.update(kernels(numerics))
    if numerics == "native":
        return ""
    if not has_avx2():
        return f"numerics = portable, but this processor ({platform.machine()}) has no AVX2: others give different bits"
    import torch

    chosen = torch.backends.cpu.get_cpu_capability()
    if chosen == "AVX2":
        return ""
    return (
        f"numerics = portable, but torch already uses {chosen} kernels: other machines may give different bits. "
        "Start the script with `andon run`, or call andon.init() before anything is computed"
    )
