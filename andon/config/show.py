"""`andon config show`, `reference` and `presets`: every key with its value and help, and the presets."""

import json
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from andon.config.finetune import FinetuneConfig, SamplesConfig
from andon.config.load import keys, load
from andon.config.presets import DEFAULTS
from andon.config.schema import RunSettings

HELP_COLUMN = 36
TABLE = ("", "| key | default | |", "|---|---|---|")
INTRODUCTION = """Set a key in a YAML file (`andon config show` prints one) or on the command line as `--key value`.
Defaults are those of the preset `tiny`; `andon config presets` lists the others. Generated from the schema."""


def annotated(config: RunSettings) -> str:
    """Write the configuration as YAML, with the help of each key as a comment."""
    return "\n".join(_lines(config, config.model_dump(mode="json"), "")) + "\n"


def _lines(section: BaseModel, values: dict[str, Any], indent: str) -> Iterator[str]:
    for attribute, field in type(section).model_fields.items():
        name, value = field.alias or attribute, getattr(section, attribute)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, values[name], f"{indent}  ")
            continue
        written = yaml.safe_dump(values[name], default_flow_style=True, width=10**9).removesuffix("...\n").strip()
        entry, text = f"{indent}{name}: {written}", " ".join((field.description or "").split())
        yield f"{entry:<{HELP_COLUMN}}  # {text}" if text else entry


def reference() -> str:
    """Write a Markdown page of the documentation with every key."""
    lines = ["# Configuration", "", INTRODUCTION]
    rows, last = _rows(load(None)), None
    for key, row in rows.items():
        section = key.rpartition(".")[0]
        if section != last:
            lines += ["", f"## {section or 'The run as a whole'}", *TABLE]
            last = section
        lines.append(row)
    tuning = _rows(FinetuneConfig(model="MODEL", data=SamplesConfig(files=("DATA",))))
    lines += ["", "## Fine-tuning", "", "Keys that only `andon finetune` has, or that differ there."]
    lines += TABLE
    lines += [row for key, row in tuning.items() if row != rows.get(key)]
    return "\n".join([*lines, ""])


def _rows(config: RunSettings) -> dict[str, str]:
    """The table row of every key."""
    rows, values = {}, config.model_dump(mode="json")
    for key, text in keys(type(config)).items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        rows[key] = f"| `{key}` | `{json.dumps(value)}` | {' '.join(text.split())} |"
    return rows


def _short(value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value / 1e6:,.1f}M" if value >= 1_000_000 else f"{value:,}"


def show_presets(console: Console, as_json: bool) -> None:
    """Print a table of all presets, or one JSON object per line."""
    rows = []
    for name in DEFAULTS:
        config = load(None, {"model.preset": name})
        shape, train = config.shape, config.train
        sizes = {"layers": shape.layers, "width": shape.hidden, "context": train.context}
        defaults = {"steps": train.steps, "tokens_per_step": config.tokens_per_step, "lr": config.optim.lr}
        rows.append({"preset": name, "parameters": shape.parameters, **sizes, **defaults})
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table()
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="left" if heading == "preset" else "right")
    for row in rows:
        table.add_row(*(_short(value) for value in row.values()))
    console.print(table)
    console.print("Each is a starting point: every key can be changed, for example --model.layers 6", style="dim")
