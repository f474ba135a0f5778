"""The benchmarks run and print what scripts read; their figures are not judged here."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.runs import andon

ROW = {"transport", "ranks", "mb", "ms", "gloo_ms", "ratio", "cpu_s_per_gb"}


@pytest.mark.parametrize("rate", [[], ["--rate", "4gbit"]], ids=["loopback", "4gbit"])
def test_transport(tmp_path: Path, rate: list[str]) -> None:
    if rate and (os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "tc")))):
        pytest.skip("cannot make a network here")
    options = ["--transports", "shm,ring:bf16", "--ranks", "2", "--sizes", "64KB", "--repetitions", "1"]
    code, output = andon("bench", "transport", *options, *rate, "--json", cwd=tmp_path)
    assert code == 0, output
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [row["transport"] for row in rows] == ["gloo", "shm", "ring:bf16"]
    assert all(row.keys() >= ROW for row in rows)
