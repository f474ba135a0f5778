"""What a user sees of a run: plan, progress, samples, halt, end; plain lines without a terminal."""

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from andon.config.schema import Config, RunSettings
from andon.errors import UserError, harmless
from andon.run.events import Event
from andon.run.plan import Memory, make_plan
from andon.run.terminal import Terminal

PLAIN_EVERY = 2.0  # seconds between lines where there is no terminal


def human_bytes(count: float) -> str:
    """Bytes with a unit."""
    return _human(count, (" B", " KB", " MB", " GB", " TB"))


def human_count(count: float) -> str:
    """A count with a unit."""
    return _human(count, ("", "K", "M", "B", "T"))


def _human(count: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}{units[-1]}"


def byte_progress(console: Console) -> Progress:
    """A progress bar over bytes, which disappears at the end; none without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show_error(console: Console, error: UserError) -> None:
    """Three lines: what happened, the likely cause, what to try."""
    for style, line in (("bold red", error.what), ("", error.cause), ("bold", error.remedy)):
        console.print(harmless(line), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def show_plan(console: Console, config: Config) -> None:
    """Print the plan of a run."""
    plan, train, shape = make_plan(config), config.train, config.shape
    table = Table.grid(Column(style="bold"), "", padding=(0, 2))
    width = f"{shape.layers} blocks of width {shape.hidden}"
    name = escape(config.model.source) or config.model.preset
    table.add_row("model", f"{name} · {human_count(plan.parameters)} parameters · {width}")
    table.add_row("data", f"{escape(', '.join(config.data.corpus))} · tokenizer {escape(config.data.tokenizer)}")
    batch = f"{train.slots} slots × {train.micro_batch} windows × {train.context} tokens"
    table.add_row("step", f"{plan.tokens_per_step:,} tokens = {batch}")
    table.add_row("run", f"{train.steps:,} steps · {human_count(plan.tokens)} tokens · seed {config.seed}")
    shared = f"{config.workers} × {config.threads} thread{'s' if config.threads > 1 else ''}"
    table.add_row("workers", f"{shared} · transport {config.group.transport} · device {config.device}")
    table.add_row("memory", f"about {human_bytes(plan.memory.total)} a worker: {_parts(plan.memory)}")
    if plan.sent:
        table.add_row("traffic", f"{human_bytes(plan.sent)} a step and rank")
    table.add_row("folder", escape(str(config.run.dir)))
    panel = Panel(table, title="[bold]Andon[/] · the plan", title_align="left", expand=False)
    console.print(panel if console.is_terminal else table)


def _parts(memory: Memory) -> str:
    parts = asdict(memory)
    copies = parts.pop("snapshot") + parts.pop("weights_snapshot")
    named = {"torch and Andon": parts.pop("program"), **parts, "copies for a save": copies}
    return ", ".join(f"{name} {human_bytes(count)}" for name, count in named.items() if count)


class Display:
    """Follows the events of a run."""

    def __init__(self, console: Console, config: RunSettings) -> None:
        self.console, self.config = console, config
        self.facts: dict[str, str] = {}
        self.sample, self.floor = "", ""
        self.started, self.first_step = 0.0, 0
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("[bold]step {task.completed:>5,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[eta]}"),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None
        self._live: Live | None = None

    def __call__(self, event: Event) -> None:
        """Show one event; `OSError` if nothing can be shown any more."""
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)
        if isinstance(self.console, Terminal) and self.console.failure:
            raise self.console.failure

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._live.stop()
            self._live = None

    def _on_note(self, event: Event) -> None:
        self.console.print(event["text"], style="dim", markup=False, soft_wrap=True)

    def _on_save_failed(self, event: Event) -> None:
        what = "trying once more" if event["again"] else "skipped; the earlier checkpoints are intact"
        where = f"Checkpoint {event['step']} could not be written to {event['folder']}"
        self.console.print(f"{where}: {event['reason']} ({what})", style="bold red", markup=False, soft_wrap=True)

    def _on_start(self, event: Event) -> None:
        self.started, self.first_step = time.monotonic(), event["step"]
        self.floor = f" (floor {event['floor']:.3f})" if event["floor"] else ""
        if event["step"]:
            self.console.print(f"Resuming from step {event['step']:,}", style="dim")
        self._task = self._progress.add_task("", total=self.config.train.steps, completed=event["step"], eta="")
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=8)
            self._live.start()

    def _on_step(self, event: Event) -> None:
        elapsed = time.monotonic() - self.started
        left = (self.config.train.steps - event["step"]) * elapsed / max(1, event["step"] - self.first_step)
        self.facts["loss"] = f"{event['loss']:.4f}" + self.floor
        if "accuracy" in event:
            self.facts["accuracy"] = f"{event['accuracy']:.1%}"
        self.facts["answers/s" if "accuracy" in event else "tokens/s"] = f"{event['tokens_per_s']:,.0f}"
        self.facts["lr"] = f"{event['lr']:.2e}"
        self.facts["grad norm"] = f"{event['grad_norm']:.3f}"
        eta = f"{int(left) // 60}:{int(left) % 60:02d} left"
        if self._live and self._task is not None:
            self._progress.update(self._task, completed=event["step"], eta=eta)
            self._live.update(self._render())
        elif time.monotonic() - self._last_line > PLAIN_EVERY or event["step"] == self.config.train.steps:
            self._last_line = time.monotonic()
            facts = "  ".join(f"{name} {value}" for name, value in self.facts.items())
            self.console.print(f"step {event['step']}/{self.config.train.steps}  {facts}  {eta}", soft_wrap=True)

    def _on_sample(self, event: Event) -> None:
        self.sample = event["text"]
        if self._live:
            self._live.update(self._render())
        else:
            self.console.print(f"  “{event['text']}”", soft_wrap=True, highlight=False, markup=False)

    def _on_eval(self, event: Event) -> None:
        bits = f" ({event['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in event else ""
        self.facts["validation"] = f"{event['loss']:.4f}{bits}"
        if "accuracy" in event:
            right = f"accuracy {event['accuracy']:.1%} ({event['correct']:,} of {event['total']:,})"
            self.facts["validation"] += f", {right}"
        text = f"step {event['step']}: validation loss {self.facts['validation']}"
        if "valid_share" in event:
            self.facts["valid stories"] = f"{event['valid_share']:.0%}"
            text += f", {event['valid_share']:.0%} of the sampled stories valid"
        if not self._live:
            self.console.print(text, soft_wrap=True)

    def _on_stopped(self, event: Event) -> None:
        self.close()
        self.console.print(f"Stopped and saved at step {event['step']:,}. The same command resumes from there.")

    def _on_halt(self, event: Event) -> None:
        self.close()
        show_halt(self.console, self.config, event)

    def _on_done(self, event: Event) -> None:
        self.close()
        for text in event["samples"]:
            self.console.print(Panel(escape(text), border_style="dim", padding=(0, 1)))
        show_summary(self.console, self.config.run.dir, event)

    def _render(self) -> RenderableType:
        facts = Table.grid(padding=(0, 3))
        facts.add_row(*(f"{name} [bold]{value}[/]" for name, value in self.facts.items()))
        rows: list[RenderableType] = [self._progress, facts]
        if self.sample:
            rows.append(Panel(escape(self.sample), title="a sample", title_align="left", border_style="dim"))
        return Group(*rows)


def show_halt(console: Console, config: RunSettings, event: Event) -> None:
    """Print a halt: what happened, on which rank, in which parameter, and what to do."""
    lines = [f"[bold]{escape(event['cause'])}[/]", ""]
    samples: list[int | str] = []
    for found in event["findings"]:
        where = escape(f"rank {found['rank']} · {found['host']}")
        if found["slot"] is None:
            lines.append(f"{where} · {escape(str(found['unit']))} · not seen when computed again: a transient fault")
            continue
        amount = f"{found['count']:,} elements, first {found['first']:,}"
        lines.append(f"{where} · slot {found['slot']} · {found['kind']} in {escape(found['parameter'])} · {amount}")
        samples += [sample for sample in found["samples"] if sample not in samples]
    if event["sound"]:
        state = f"Weights stay at step {event['committed']}. Nothing of step {event['step']} touched them."
    else:
        state = "Ranks hold different bits, so nothing was saved. The last checkpoint is from before that."
    lines += ["", state, ""]
    if samples:
        option = "--samples" if isinstance(samples[0], str) else "--windows"
        named = shlex.join([str(config.run.dir), option, ",".join(map(str, samples[:16]))])
        lines.append(f"look at the samples   andon data show {escape(named)}")
    lines.append("try again             the same command resumes from the last checkpoint")
    if event["sound"]:
        lines.append("skip such steps       the same command with --on_nonfinite skip")
    title = f"[bold]THE LINE STOPPED at step {event['step']}[/]"
    console.print(Panel("\n".join(lines), title=title, title_align="left", border_style="red"))


def show_summary(console: Console, folder: Path, summary: dict[str, Any]) -> None:
    """Print how a run ended, and what to do next."""
    checkpoint = folder / "checkpoints" / f"checkpoint-{summary['step']}"
    table = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    what = "answers" if "accuracy" in summary else "tokens"
    table.add_row("steps", f"{summary['step']:,} · {human_count(summary['tokens'])} {what}")
    table.add_row("loss", f"{summary['loss']:.4f} · validation {summary['validation_loss']:.4f}")
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
    if result:
        console.print(f'  andon generate {result} "…"', soft_wrap=True, markup=False)
        if Path(result).name == "adapter":
            console.print(f"  andon merge {result}", soft_wrap=True, markup=False)
        return
    prompt = "Once upon a time," if "valid_share" in summary else "The"
    console.print(f'  andon generate {checkpoint} "{prompt}"', soft_wrap=True, markup=False)
    console.print(f"  andon evaluate {checkpoint}", soft_wrap=True, markup=False)
