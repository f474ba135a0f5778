"""`make compare-bench BEFORE=COMMIT`: a benchmark of this tree against the same one of another commit, in turns.

Each pair runs `andon bench … --json` once of either tree, the other one first in every second pair. Rows are matched by
what they measure (the transport, the number of ranks, …), and their figures by name; a figure that only one of the
trees prints is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.bench.compare import checkout
from tests.kit.runs import environment

SIZES = ("transport", "ranks", "mb", "tokens", "preset")
"""What a row measures; everything else in it are figures."""
DEADLINE = 1800.0
Figures = dict[tuple[str, str], float]
"""By row and name."""


def measure(source: Path, benchmark: list[str]) -> Figures:
    """Run a tree's benchmark once."""
    with tempfile.TemporaryDirectory() as cwd:
        done = subprocess.run(
            [sys.executable, "-m", "andon", "bench", *benchmark, "--json"],
            cwd=cwd,
            env={**environment(Path(cwd)), "PYTHONPATH": str(source)},
            text=True,
            stdout=subprocess.PIPE,
            timeout=DEADLINE,
            check=True,
        )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        (" ".join(f"{row[size]:g}" if size == "mb" else str(row[size]) for size in SIZES if size in row), name): value
        for row in rows
        for name, value in row.items()
        if name not in SIZES and isinstance(value, float) and value > 0
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compare_bench", description=__doc__)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--figures", default="ms", help="names of figures, with commas")
    options, benchmark = parser.parse_known_args()
    pairs: list[tuple[Figures, Figures]] = []
    with checkout(options.before) as before:
        for number in range(options.pairs):
            first, second = (ROOT, before) if number % 2 else (before, ROOT)
            found = {source: measure(source, benchmark) for source in (first, second)}
            pairs.append((found[ROOT], found[before]))
            print(f"pair {number + 1} of {options.pairs}", file=sys.stderr, flush=True)
    for key in pairs[0][0]:
        row, name = key
        ratios = [now[key] / before[key] for now, before in pairs if key in now and key in before]
        if name in options.figures.split(",") and ratios:
            between = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{row:24} {name:24} {statistics.median(ratios):.3f} of the other's ({between}, {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
