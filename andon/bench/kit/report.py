"""Results of benchmarks: the slowest rank, medians of ratios, rows as a table or as JSON."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Turns = dict[str, list[float]]
"""Seconds of each turn, by name."""


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> Turns:
    """The seconds of the slowest rank in each turn."""
    names = by_rank[0]
    return {name: [max(turn) for turn in zip(*(each[name] for each in by_rank), strict=True)] for name in names}


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of each turn, so that a slow moment of the machine affects both sides."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def show(title: str, rows: Sequence[Mapping[str, Any]], as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print rows: a table and notes for people, or one JSON row per line for scripts."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    console = Console()
    console.print(table)
    if "ratio" in names:
        notes = [*notes, "ratio: median over pairs of turns that were measured one after the other"]
    for note in notes:
        console.print(note)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
