"""What a user sees when a run ends: the halt, on one screen, or the summary; and what to do next."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from andon.checkpoint.disk.listing import newest
from andon.config.schema import RunSettings
from andon.run.records.events import Event
from andon.run.screen.terminal import counted, human_bytes, human_count

MAX_SLOTS = 4  # that the panel of a halt names


def show_halt(console: Console, config: RunSettings, event: Event) -> None:
    """Print a halt on one screen: what happened, its first findings, and what to do. `halt.json` has all findings."""
    lines = [f"[bold]{escape(first_causes(event['cause']))}[/]", ""]
    samples: list[int | str] = []
    seen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for found in event["findings"]:
        seen.setdefault((found["rank"], found["host"], found["slot"]), []).append(found)
        samples += [sample for sample in found["samples"] if sample not in samples]
    for (rank, host, slot), found_here in list(seen.items())[:MAX_SLOTS]:
        lines += _slot_lines(f"rank {rank} · {host}", slot, found_here)
    if len(seen) > MAX_SLOTS:
        lines.append(f"and {len(seen) - MAX_SLOTS} more slots")
    if event["sound"]:
        state = f"Weights stay at step {event['committed']}. Nothing of step {event['step']} touched them."
    else:
        state = "Ranks hold different bits, so nothing was saved. The last checkpoint is from before they differed."
    which = "The first" if event.get("left_out") else "All"
    lines += ["", f"{state} {which} findings: {escape(str(config.run.dir / 'halt.json'))}", ""]
    todo = []
    if samples:
        option = "--samples" if isinstance(samples[0], str) else "--windows"
        named = shlex.join([str(config.run.dir), option, ",".join(map(str, samples[:8]))])
        todo.append(("look at the samples", f"andon data show {named}"))
    saved = event["sound"] or newest(config.run.dir / "checkpoints") is not None
    command = resuming_command(sys.argv[1:], saved)
    todo.append(("go on from there", command))
    if event["sound"] and not config.group.server:  # a gradient server would halt as well
        todo.append(("skip such steps", f"{command} --on_nonfinite skip"))
    title = f"[bold]THE LINE STOPPED at step {event['step']}[/]"
    console.print(Panel("\n".join(lines), title=title, title_align="left", border_style="red"))
    for name, command in todo:  # outside the panel, so that a command can be copied as a whole
        console.print(f"  {name:<21} {command}", soft_wrap=True, markup=False)


def _slot_lines(where: str, slot: int | None, found: list[dict[str, Any]]) -> list[str]:
    """One slot's findings in two lines: how many parameters, and the first of them."""
    first = found[0]
    if slot is None:
        units = _and_more([str(each["unit"]) for each in found])
        return [escape(f"{where} · {units} · not seen when computed again: a transient fault")]
    parameters = f"{len(found)} parameters, first " if len(found) > 1 else ""
    amount = f"{first['count']:,} element{'s' if first['count'] != 1 else ''}, first at {first['first']:,}"
    samples = ", ".join(map(str, first["samples"][:8]))
    return [
        escape(f"{where} · slot {slot} · samples {samples}"),
        escape(f"  {first['kind']} in {parameters}{first['parameter']} ({amount})"),
    ]


def first_causes(cause: str) -> str:
    return _and_more(cause.split("; "), "; ")


def _and_more(parts: list[str], separator: str = ", ") -> str:
    if len(parts) > 3:
        parts = [*parts[:2], f"and {len(parts) - 2} more"]
    return separator.join(parts)


def resuming_command(arguments: Sequence[str], saved: bool = True) -> str:
    """The command that resumes a run which was started with these arguments: without its injected faults, without
    `--resume none`, and without the checkpoint of another run once the run has `saved` one."""
    kept, words = [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in ("--fault", "--resume"):
            kept.append(word)
            continue
        given = [word] if equals else [word, next(words, "")]
        if option == "--resume" and not saved and (value or given[-1]) != "none":
            kept += given
    return shlex.join(["andon", *kept])


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600} h {whole // 60 % 60} min" if whole >= 3600 else f"{whole // 60}:{whole % 60:02d} min"


def show_summary(console: Console, folder: Path, summary: dict[str, Any]) -> None:
    """Print how a run ended, and what to do next."""
    checkpoint = folder / "checkpoints" / f"checkpoint-{summary['step']}"
    table = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    unit = "answers" if "accuracy" in summary else "tokens"
    table.add_row("steps", f"{summary['step']:,} · {human_count(summary['tokens'])} {unit}")
    table.add_row("loss", f"{summary['loss']:.4f} · validation {summary['validation_loss']:.4f}")
    if skipped := summary.get("skipped"):
        table.add_row("skipped", f"{counted(skipped, 'step')} changed no weight, because a gradient was not finite")
    if "seconds" in summary:
        speed = f"{human_count(summary['tokens_per_s'])} {unit}/s on average"
        memory = f"peak {human_bytes(summary['peak_memory'])} a worker, with what workers share"
        table.add_row("took", f"{_minutes(summary['seconds'])} · {speed} · {memory}")
    if "valid_share" in summary:
        known = f"{summary['known']} of them in the training text"
        table.add_row("stories", f"{summary['valid_share']:.0%} of the samples are valid, {known}")
    if "accuracy" in summary:
        right = f"{summary['correct']:,} of {summary['total']:,} held-out answers are right"
        table.add_row("accuracy", f"{summary['accuracy']:.1%} · {right}")
    table.add_row("weights", f"blake3 {summary['weights_blake3'][:16]}… (in summary.json)")
    result = summary.get("result")
    table.add_row("result" if result else "checkpoint", escape(str(result or checkpoint)))
    console.print(table)
    console.print("Next:", style="bold")
    for command in (*_next(checkpoint, summary), f"andon board {folder}"):
        console.print(f"  {command}", soft_wrap=True, markup=False)


def _next(checkpoint: Path, summary: dict[str, Any]) -> list[str]:
    """What a user may want to do with the model."""
    if result := summary.get("result"):
        merge = [f"andon merge {result}"] if Path(result).name == "adapter" else []
        return [f'andon generate {result} "…"', *merge]
    prompt = "Once upon a time," if "valid_share" in summary else "The"
    return [f'andon generate {checkpoint} "{prompt}"', f"andon evaluate {checkpoint}"]
