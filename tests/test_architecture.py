"""The architecture: imports point one way, the engine needs few packages, the launcher needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "andon"
FILES = sorted(PACKAGE.rglob("*.py"))

ENGINE = [
    "durable",
    "order",
    "arena",
    "gradients",
    "gather",
    "group",
    "optim",
    "integrity",
    "checkpoint",
    "data",
    "model",
]
ENGINE_MAY_IMPORT = {"torch", "numpy", "safetensors", "blake3", "andon"} | set(sys.stdlib_module_names)

# Each room may use itself, `errors`, and the rooms named here.
MAY_USE = {
    "errors": set(),
    "order": set(),
    "durable": set(),
    "data": {"durable"},
    "model": set(),
    "arena": set(),
    "group": {"order"},
    "optim": {"arena", "order"},
    "gradients": {"arena", "order", "group", "optim"},
    "gather": {"arena", "group", "optim"},
    "integrity": {"arena", "group", "order"},
    "checkpoint": {"arena", "durable", "group", "integrity"},
    "parallel": {"arena", "gather", "gradients", "group", "integrity", "optim"},
    "metrics": set(),
    "config": {"integrity", "model"},
    "configure": {"config", "model"},
    "plan": {"config", "model", "optim", "order"},
    "evaluation": {"data", "group", "model"},
    "trainer": {
        *("arena", "checkpoint", "config", "data", "evaluation", "gradients", "group", "integrity"),
        *("metrics", "model", "optim", "parallel"),
    },
}


def imports(path: Path, top_level_only: bool) -> set[str]:
    """Modules that a file imports; names bound only for type checking count as well."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = room_of(path)
    if own not in MAY_USE:
        return  # the shell: cluster, bench, cli and what serves them may use everything
    used = {room(name) for name in imports(path, top_level_only=False) if name.startswith("andon.")}
    assert used <= MAY_USE[own] | {own, "errors"}, (
        f"{own} must not use {used - MAY_USE[own] - {own, 'errors'}}"
    )


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(p) in ENGINE], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_the_engine_imports_few_packages(path: Path) -> None:
    packages = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    compiles = path == PACKAGE / "group" / "rounding.py"
    assert packages <= ENGINE_MAY_IMPORT | ({"numba"} if compiles else set())


def test_only_a_bf16_wire_loads_the_compiler() -> None:
    script = (
        "import sys, andon.trainer, andon.group.ring, andon.group.star_server, andon.group.forms\n"
        "andon.group.forms.form_for('f32'); print('numba' in sys.modules)\n"
        "andon.group.forms.form_for('bf16'); print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_nothing_is_pickled() -> None:
    for path in FILES:
        text = path.read_text()
        for word in ("import pickle", "torch.load", "torch.save", "_object("):
            assert word not in text, f"{path} uses {word}"


def test_the_launcher_does_not_load_torch() -> None:
    script = "import sys, andon.cluster.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
