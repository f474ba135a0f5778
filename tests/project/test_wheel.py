"""The wheel installs into an empty environment and works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from andon.version import VERSION
from tests import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=600)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.soak
def test_the_wheel_has_the_page_the_licences_and_its_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        facts = archive.read(f"andon-{VERSION}.dist-info/METADATA").decode()
    page = {f"andon/board/page/{path.name}" for path in (ROOT / "andon" / "board" / "page").iterdir()}
    assert {"andon/py.typed", "andon/data/plots.txt", *page} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names) and "License-Expression: MIT" in facts


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_empty_environment_with_the_wheel_passes_the_demo(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=True)
    bin = tmp_path / "empty" / "bin"
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([str(bin / "pip"), "install", "--quiet", "-c", constraints, str(wheel)], check=True, timeout=1200)
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outside["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    demo = [str(bin / "andon"), "demo", "--train.steps=50"]
    done = subprocess.run(demo, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and (tmp_path / "runs" / "demo" / "summary.json").exists(), done.stdout + done.stderr
    shown = subprocess.run([str(bin / "andon"), "--version"], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert shown.stdout.strip() == f"andon {VERSION}"
