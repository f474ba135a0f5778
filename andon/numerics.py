"""Which CPU kernels torch computes with. Environment variables choose them before torch computes anything.

- `portable` kernels use AVX2 and give the same bits on every x86-64 CPU of one vendor. AMD and Intel differ in a few
  operations, because MKL has kernels for AMD that no setting switches off (`integrity.probe` names them).
- `compatible` kernels give the same bits on both vendors, at about half the speed: MKL then uses SSE2 for its matrix
  products and functions.
- `native` kernels are the fastest of this processor.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

Numerics = Literal["portable", "compatible", "native"]
AVX2: Final = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""What torch's own kernels, MKL and oneDNN read when they start."""
KERNELS: Final[Mapping[Numerics, Mapping[str, str]]] = {
    "portable": AVX2,
    "compatible": {**AVX2, "MKL_CBWR": "COMPATIBLE"},
    "native": {},
}
CPUINFO: Final = Path("/proc/cpuinfo")


def kernels(numerics: Numerics) -> Mapping[str, str]:
    """The environment variables that choose the kernels; none for native ones, or where there is no AVX2."""
    return KERNELS[numerics] if has_avx2() else {}


def has_avx2() -> bool:
    """Whether this processor has AVX2; outside Linux every x86-64 one of the last ten years is taken to have it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not CPUINFO.exists() or " avx2 " in CPUINFO.read_text()


def choose_kernels(numerics: Numerics) -> str:
    """Choose the kernels of this process; returns a warning if it already uses others, and else an empty string.

    torch must not have computed anything yet, because each library reads its variable only once."""
    os.environ.update(kernels(numerics))
    if numerics == "native":
        return ""
    if not has_avx2():
        return f"numerics = {numerics}, but this processor ({platform.machine()}) has no AVX2: its bits differ"
    import torch

    if torch.backends.cpu.get_cpu_capability() == "AVX2" and _products_are_fused() == (numerics == "portable"):
        return ""
    return (
        f"numerics = {numerics}, but torch already uses other kernels: other machines may give different bits. "
        "Call andon.init() before anything is computed, or start the script with `andon run --numerics`"
    )


def _products_are_fused() -> bool:
    """Whether MKL's matrix products use fused multiply-add, as portable kernels do and compatible ones do not."""
    import torch

    x = torch.full((16, 2), 1 + 2**-12)  # x² needs one bit more than f32 has: only a fused x·x − x² is not zero
    return bool((x @ (x * torch.tensor([-1.0, 1.0])).T).any())
