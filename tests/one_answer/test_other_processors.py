"""Portable numerics on processors of other makers, emulated by `qemu-x86_64` (Debian: qemu-user).

The emulator computes in software what each instruction is defined to give, so an emulated processor has the bits of a
real one. Only instructions that approximate (rcpps, rsqrtps) may differ; few functions of MKL use them.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from andon.integrity.probe import differing
from andon.numerics import KERNELS, Numerics
from tests.kit.runs import SMALL, environment, summary

INTEL, AMD = "Skylake-Client", "EPYC-Milan"
DEADLINE = 900.0
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-x86_64: apt-get install qemu-user"),
]


def emulate(processor: str, *arguments: str, cwd: Path, numerics: Numerics = "portable") -> str:
    """Run Python on an emulated processor, as the only rank of a torchrun; what it prints."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", processor, sys.executable, *arguments],
        cwd=cwd,
        env={**environment(cwd), **KERNELS[numerics], **rank, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def probe(processor: str, cwd: Path, numerics: Numerics) -> dict[str, str]:
    """The probe that an emulated processor takes."""
    code = "import json, torch; from andon.integrity.probe import take_probe; torch.set_num_threads(1); "
    code += "print(json.dumps(take_probe(torch.device('cpu'))))"
    found: dict[str, str] = json.loads(emulate(processor, "-c", code, cwd=cwd, numerics=numerics))
    return found


def trained(processor: str, *options: str, cwd: Path, numerics: Numerics = "portable") -> str:
    """The digest of the weights of a run on an emulated processor."""
    folder = f"{processor}-{numerics}"
    settings = [f"--run.dir={folder}", f"--numerics={numerics}", "--threads=1"]
    emulate(processor, "-m", "andon", "train", *options, *settings, cwd=cwd, numerics=numerics)
    digest: str = summary(cwd / folder)["weights_blake3"]
    return digest


def test_the_tiny_preset_gives_one_answer_on_amd_and_intel(tmp_path: Path) -> None:
    options = ["--train.steps=2", "--train.slots=2", "--eval.windows=4", "--eval.stories=1", "--eval.sample_every=0"]
    assert trained(INTEL, *options, cwd=tmp_path) == trained(AMD, *options, cwd=tmp_path)


def test_the_probe_names_what_portable_kernels_compute_differently_on_amd_and_intel(tmp_path: Path) -> None:
    intel, amd = (probe(processor, tmp_path, "portable") for processor in (INTEL, AMD))
    assert differing(intel, amd) == ["the matrix product of small sizes", "the exponential"]


def test_compatible_kernels_compute_the_same_on_amd_and_intel(tmp_path: Path) -> None:
    assert probe(INTEL, tmp_path, "compatible") == probe(AMD, tmp_path, "compatible")


def test_a_hidden_size_of_256_has_one_answer_only_with_compatible_kernels(tmp_path: Path) -> None:
    """Once the portable digests are equal, MKL has changed: then change the README and `andon.numerics` too."""
    options = [*SMALL, "--model.hidden=256", "--train.steps=2"]
    assert trained(INTEL, *options, cwd=tmp_path) != trained(AMD, *options, cwd=tmp_path)
    found = {trained(each, *options, cwd=tmp_path, numerics="compatible") for each in (INTEL, AMD)}
    assert len(found) == 1
