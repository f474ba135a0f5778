"""The architecture: imports point one way, the engine needs few packages, the launcher needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "andon"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom to the top. A file may import its own layer and those before it. Every file is in a layer:
# that of the longest name that fits. Transports and optimizers are written in terms of `order` and `arena`.
LAYERS = (
    "version",
    "errors",
    "files",
    "machine",
    "numerics",
    "engine.gradients.order",
    "engine.gradients.arena",
    "model",
    "data",
    "transport",
    "protocol2",
    "optim",
    "integrity",
    "engine",
    "checkpoint",
    "engine.trainer",
    "config",
    "run",
    "finetune",
    "control",
    "board",
    "cluster",
    "bench",
    "commands",
    "cli",
)
ENGINE = {"files", "machine", "engine", "transport", "optim", "integrity", "checkpoint", "data", "model"}
ENGINE_MAY_IMPORT = {"torch", "numpy", "safetensors", "blake3", "triton", "andon"} | set(sys.stdlib_module_names)


def module_of(path: Path) -> str:
    """`andon/run/loop.py` → `run.loop`; a package is its folder; the package itself is empty."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports; names bound only for type checking count as well."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_modules(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    found = set()
    for name in imports(path):
        package, _, rest = name.partition(".")
        while package == "andon" and rest not in MODULES:
            rest = rest.rpartition(".")[0]
        found |= {rest} if package == "andon" else set()
    return found - {module_of(path), ""}


def layer_of(module: str) -> int:
    fitting = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    assert fitting, f"{module} is in no layer"
    return LAYERS.index(max(fitting, key=len))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    if module in ("", "__main__"):  # the front doors are above everything
        return
    above = [used for used in imported_modules(MODULES[module]) if layer_of(used) > layer_of(module)]
    assert not above, f"{module} must not use {above}"


def test_no_import_goes_round_in_a_circle() -> None:
    TopologicalSorter({module: imported_modules(path) for module, path in MODULES.items()}).prepare()


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in ENGINE],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_engine_imports_few_packages(path: Path) -> None:
    packages = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert packages <= ENGINE_MAY_IMPORT


def test_nothing_is_pickled() -> None:
    for path in FILES:
        text = path.read_text()
        for word in ("import pickle", "torch.load", "torch.save", "_object("):
            assert word not in text, f"{path} uses {word}"


def test_the_launcher_does_not_load_torch() -> None:
    script = "import sys, andon.cluster.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
