"""`python -m tests.mutants [IDS…] [--jobs N]`: who notices which fault; exit code 1 below 95%."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.mutants import Mutant, everything

ENOUGH = 0.95
DEADLINE = 400.0  # seconds; the tests have deadlines of their own, which must be the first to end a hang
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--durations=0"]


@dataclass(frozen=True)
class Result:
    """What came of a mutant: the test that noticed it, or why none did."""

    mutant: Mutant
    noticed_by: str
    problem: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("ids", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in everything() if not options.ids or mutant.id in options.ids]
    for mutant in chosen:
        check(mutant)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="andon-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(copy_tree(Path(folder) / f"{job}"))
        run_unchanged(Path(folder) / "0", chosen, options.jobs)

        def attempt(mutant: Mutant) -> Result:
            copy = copies.get()
            try:
                return try_out(mutant, copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            results = [show(result) for result in pool.map(attempt, chosen)]
    return summarise(results, time.monotonic() - started)


def check(mutant: Mutant) -> None:
    """Refuse a mutant whose old text is not there exactly once."""
    count = (ROOT / mutant.path).read_text().count(mutant.old)
    if count != 1:
        sys.exit(f"{mutant.id}: its old text occurs {count} times in {mutant.path}")


def copy_tree(folder: Path) -> Path:
    """What the tests need of this working tree."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("andon", "tests", "docs"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for file in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "Makefile"):
        shutil.copy(file, folder / file.name)
    return folder


def run_unchanged(copy: Path, mutants: Sequence[Mutant], jobs: int) -> None:
    """Without any fault every named test must pass; a test that fails anyway notices nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    found = run_tests(copy, tests, 1800, "-n", str(jobs))
    if found.returncode:
        sys.exit(f"{found.stdout[-4000:]}\nThe tests do not pass without a fault")


def try_out(mutant: Mutant, copy: Path) -> Result:
    """Put a fault into a copy, run its tests, and take it out again."""
    path, started = copy / mutant.path, time.monotonic()
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    try:
        found = run_tests(copy, mutant.tests, DEADLINE)
    except subprocess.TimeoutExpired:
        return Result(mutant, "", "the tests hang", time.monotonic() - started)
    finally:
        path.write_text(sound)
    seconds = time.monotonic() - started
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", found.stdout, re.MULTILINE)
    if found.returncode == 1 and failed:
        return Result(mutant, failed[1], "", seconds)
    problem = "" if found.returncode == 0 else f"pytest ended with {found.returncode}: {found.stdout[-600:]}"
    return Result(mutant, "", problem, seconds)


def run_tests(copy: Path, tests: Sequence[str], deadline: float, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests on a copy; whatever they have started ends with them."""
    command = [sys.executable, *PYTEST, "-m", "not soak", *options, *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def show(result: Result) -> Result:
    verdict = result.noticed_by or result.mutant.equivalent or f"NOT NOTICED {result.problem}"
    print(f"{result.mutant.id:40} {result.seconds:5.0f} s  {verdict}", flush=True)
    return result


def summarise(results: Sequence[Result], seconds: float) -> int:
    noticed = sum(bool(result.noticed_by) for result in results)
    missed = [result.mutant for result in results if not result.noticed_by]
    print(f"{noticed} of {len(results)} faults were noticed ({noticed / len(results):.0%}), {seconds:.0f} s")
    for mutant in missed:
        print(f"  {mutant.id}: {mutant.says} {mutant.equivalent}")
    return 0 if noticed >= ENOUGH * len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
