"""README, CONTRIBUTING and docs say what is there: the tree, every name, and every command, which is run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from andon.checkpoint.disk.manifest import verify
from andon.config.load import build, keys, parse_arguments
from andon.config.presets import DEFAULTS
from andon.config.show import reference
from tests import ROOT
from tests.board.test_board import board_of
from tests.cluster.test_torchrun import COMMAND as TORCHRUN
from tests.cluster.test_torchrun import STANDALONE
from tests.finetune.tuning import LIBRARIES, endings, make_model
from tests.kit import prefork
from tests.kit.runs import SMALL, andon, environment, launch, outcome, train

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
NAME = re.compile(r"`((?:andon|tests|docs)/[\w/]+\.\w+)(?::([\w.]+))?`")


def tree() -> dict[str, str]:
    """The files in the README's tree, each with what is said of it; a folder ends with a slash."""
    block = next(block for block in FENCED.findall(TEXT["README.md"]) if block.startswith("andon/"))
    folders: list[str] = []
    found = {}
    for line in block.splitlines():
        name, _, words = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        found["".join(folders)] = words.strip()
    return found


def test_the_tree_names_every_file_and_says_what_it_is_for() -> None:
    package = ROOT / "andon"
    found = [
        path for path in package.rglob("*") if path.is_file() and path.suffix in (".py", ".txt", ".html", ".css", ".js")
    ]
    # A folder stands for its __init__.py.
    files = {path for path in found if path.name != "__init__.py" or path.parent == package}
    folders = {path.parent for path in files}
    expected = {f"{path.relative_to(ROOT)}" for path in files} | {f"{path.relative_to(ROOT)}/" for path in folders}
    assert set(tree()) == expected
    silent = {path for path, words in tree().items() if not words} - {"andon/"}
    assert not silent


def defined(path: Path, dotted: str) -> bool:
    """Whether a file defines a name; `Class.method` is looked up in the class."""
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in dotted.split("."):
        found = [node for node in scope if name in _names(node)]
        if not found:
            return False
        scope = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("document", TEXT)
def test_every_file_and_function_that_is_named_exists(document: str) -> None:
    for file, name in NAME.findall(TEXT[document]):
        assert (ROOT / file).is_file(), f"{document} names {file}"
        assert not name or defined(ROOT / file, name), f"{document} names {name} in {file}"


def test_the_python_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)  # more of them would spin on a busy machine
    (example,) = re.findall(r"^```python\n(.*?)^```", TEXT["README.md"], re.M | re.S)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(32, 3, generator=generator), torch.arange(32) % 2
    losses = []

    def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append(torch.nn.functional.cross_entropy(output, target))
        return losses[-1]

    names = {
        "F": SimpleNamespace(cross_entropy=cross_entropy),
        "MyModel": lambda: torch.nn.Linear(3, 2),
        "batch": lambda step, slot: (inputs, targets),
    }
    exec(example.replace("steps(start, 1000)", "steps(start, 100)"), names)
    assert losses[-1] < losses[0]
    assert verify(tmp_path / "runs" / "mine" / "checkpoints" / "checkpoint-100").step == 100


(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", TEXT["python.md"], re.M | re.S)


SCRIPTED = ("python mine.py", "andon run --workers 2 mine.py", "torchrun --nproc-per-node 2 mine.py")


def test_the_script_of_the_documents_prints_the_same_however_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    code, alone = execute(SCRIPTED[0], tmp_path)
    assert code == 0 and re.fullmatch(r"loss 0\.\d{4}, weights [0-9a-f]{64}", alone.strip()), alone
    assert andon(*shlex.split(SCRIPTED[1])[1:], cwd=tmp_path) == (0, alone)
    code, output = execute(SCRIPTED[2], tmp_path)
    assert code == 0 and alone in output, output


COMMAND = re.compile(r"(?:[A-Z]+=\S+ )*(?:make|andon|pytest|torchrun|python) [a-z-].*")


def commands() -> list[str]:
    """Every command line of the documents, each once. The beginning of a command within a sentence only names
    it, if a code block has the whole command."""
    blocks: list[str] = []
    prose: list[str] = []
    for text in TEXT.values():
        blocks += [line.partition("#")[0].strip() for part in FENCED.findall(text) for line in part.splitlines()]
        prose += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    prose = [line for line in prose if not any(whole.startswith(line) for whole in blocks)]
    return list(dict.fromkeys(line for line in (*blocks, *prose) if COMMAND.fullmatch(line)))


DEMO_STEPS = DEFAULTS["tiny"]["train"]["steps"]
TUNED = [
    *("--train.steps=2", "--train.slots=3", "--train.micro_batch=1", "--train.context=32", "--eval.samples=2"),
    *("--eval.shown=1", "--eval.length=2", "--device=cpu"),
]
SUBSTITUTES = {
    "CHECKPOINT": "runs/demo/checkpoints/checkpoint-6",
    f"checkpoint-{DEMO_STEPS}": "checkpoint-6",  # the demo here has six steps
    "…": "",
}
APPENDED = {
    "andon bench checkpoint": ["--preset=tiny", "--tokens=16", "--repetitions=1", "--ranks=1"],
    "andon bench checkpoint --device": ["--tokens=512", "--repetitions=1"],
    "andon bench train": ["--preset=tiny", "--tokens=16", "--repetitions=1", "--ranks=1"],
    "andon bench train --device": ["--preset=tiny", "--tokens=512", "--repetitions=1"],
    "andon bench transport": [
        *("--transports=shm,ring:bf16,protocol2", "--ranks=2", "--sizes=64KB", "--repetitions=1", "--json")
    ],
    "andon bench cnn": ["--images=4", "--repetitions=1"],
    "andon bench hosts": ["--rates=1gbit", "--ranks=2", "--tokens=16", "--repetitions=1"],
    "andon bench goodput": ["--workers=1", "--every=1", "--minutes=0.01"],
    "andon bench numerics": ["--presets=tiny", "--repetitions=1"],
    "andon drill": ["--help"],  # tests/commands/test_drill.py runs it
    "andon run": ["2"],
    "andon finetune": TUNED,
    "andon bench finetune": ["--presets=tiny", "--samples=1", "--repetitions=1", "--ranks=1"],
    "andon merge": ["--out=merged"],
    "andon plan --finetune": ["--json"],  # without it, the cost of portable kernels is measured
    "andon plan config.yaml": ["--json"],
    "andon plan --device": ["--json"],
    "andon data show": ["runs/demo", "--windows=0"],
    "andon data show runs/finetune": [],
    "andon profile": [*SMALL, "--steps=1"],
    "andon evaluate": ["--windows=2"],
    "andon train": [*SMALL, "--train.steps=8"],
    "make": ["--dry-run"],
    "pytest": ["--collect-only", "-q"],
}
"""What makes a command short; its own words stay as they are."""
ELSEWHERE = ("andon coordinator", "andon worker", "andon gradient-server", TORCHRUN, *SCRIPTED)
"""Commands that are run together with others: above, in `tests/cluster/test_machines.py`, `test_torchrun.py` and
`tests/protocol2/test_protocol2_group.py`."""
ROW = {"transport", "ranks", "mb", "ms", "gloo_ms", "ratio", "cpu_s_per_gb"}


def test_the_commands_are_found() -> None:
    """Those of docs/machines.md run on machines (`tests/cluster/test_machines.py`)."""
    found = commands()
    assert len(found) >= 15 and "make demo" in found and "SEED=7 COUNT=300 make soak" in found
    assert any(line.startswith("torchrun ") for line in found)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a reader's after `make demo`, but small, with texts and a configuration."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-texts").mkdir()
    (folder / "my-texts" / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (folder / "config.yaml").write_text(build({}, parse_arguments(SMALL)[1]).to_yaml())
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "script.py").symlink_to(ROOT / "examples" / "cnn.py")
    (folder / "mine.py").write_text(SCRIPT)
    (folder / "my.json").write_text(json.dumps([{"text": "The quick brown fox jumps over the lazy dog. " * 200}]))
    train("--checkpoint.every=2", cwd=folder, name="runs/demo")
    return folder


@pytest.mark.parametrize("document", [*TEXT, "CHANGELOG.md", "SECURITY.md"])
def test_every_link_and_picture_resolves(document: str) -> None:
    path = next(each for each in (ROOT / document, ROOT / "docs" / document) if each.exists())
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FENCED.sub("", path.read_text(encoding="utf-8"))):
        generated = target == "configuration.md"  # by `make docs`, from the schema
        assert generated or target.startswith("https://") or (path.parent / target).exists(), f"{document}: {target}"


def test_the_site_names_every_page_and_the_reference_every_key() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"{name}\n" in site for name in re.findall(r"\((\S+\.md)\)", TEXT["index.md"]))
    assert all(f"`{key}`" in reference() for key in keys())


def execute(line: str, folder: Path) -> tuple[int, str]:
    """Run a command line that is not Andon's in a shell: exit code and output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={**environment(folder), "PATH": path, "PYTHONPATH": str(ROOT), **STANDALONE},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def tuned(workplace: Path) -> Path:
    """The folder of a reader who has fine-tuned a model."""
    prefork.preload(*LIBRARIES)
    make_model(workplace / "my-model")
    endings(workplace / "samples.jsonl", 12)
    code, output = andon("finetune", "my-model", "samples.jsonl", *TUNED, cwd=workplace)
    assert code == 0, output
    code, output = andon("merge", "runs/finetune/adapter", cwd=workplace)
    assert code == 0, output
    return workplace


@pytest.mark.parametrize(
    "line", [line for line in commands() if not line.startswith(ELSEWHERE) and "--group.server" not in line]
)
def test_every_command_in_the_documents_runs(
    workplace: Path, tmp_path: Path, line: str, request: pytest.FixtureRequest
) -> None:
    if any(word in line for word in ("my-model", "samples.jsonl", "runs/finetune")):
        request.getfixturevalue("tuned")
    for placeholder, value in SUBSTITUTES.items():
        line = line.replace(placeholder, value)
    command = re.sub(r"^([A-Z]+=\S+ )*", "", line)
    kind = max((known for known in APPENDED if command.startswith(known)), key=len, default="")
    trains = kind.startswith(("andon train", "andon finetune"))
    own_sizes = "--model." if "--model.from" in line else "--none"
    short = [option for option in APPENDED.get(kind, []) if not option.startswith(own_sizes)]
    options = [*short, *([f"--run.dir={tmp_path}"] if trains else [])]
    line = f"{line} {shlex.join(options)}"
    if command.startswith("andon board"):
        with board_of(shlex.split(line)[1:], workplace) as url:
            assert url.startswith("http://127.0.0.1:")
        return
    if command.startswith("andon"):
        code, output = andon(*shlex.split(line)[1:], cwd=workplace)
    elif command.startswith("pytest"):
        code, output = outcome(launch([sys.executable, "-m", *shlex.split(line)], ROOT))
    else:
        code, output = execute(line, ROOT if kind == "make" else workplace)
    not_here = ("--rate 4gbit is not possible here", "Hosts cannot be made here", "--device cuda needs a GPU")
    if any(text in output for text in not_here):
        pytest.skip(output)
    if command.startswith(("andon stop", "andon resize")):  # the tests of these commands have a live run
        assert code == 1 and "holds its lock" in output
        return
    assert code == (3 if "--fault" in line else 0), output
    if kind == "andon bench transport":
        rows = [json.loads(text) for text in output.splitlines() if text.startswith("{")]
        assert [row["transport"] for row in rows] == ["gloo", "shm", "ring:bf16", "protocol2"]
        assert all(row.keys() >= ROW for row in rows)
