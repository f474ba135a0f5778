"""What a user sees during a run: progress, samples, notes; plain lines without a terminal. And errors."""

import shlex
import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from andon.config.schema import RunSettings
from andon.errors import UserError, harmless
from andon.run.records.events import Event
from andon.run.screen.ending import first_causes, resuming_command, show_halt, show_summary
from andon.run.screen.terminal import Terminal

STEP_FACTS = ("loss", "accuracy", "tokens/s", "answers/s", "MFU", "lr", "grad norm")
EVAL_FACTS = ("validation", "valid stories")
LINE_SECONDS = 2.0  # between lines without a terminal


def progress_bar(console: Console) -> Progress:
    """A progress bar that disappears at the end; none without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show_error(console: Console, error: UserError) -> None:
    """Print three lines: what happened, the likely cause, what to try."""
    for style, line in (("bold red", error.what), ("", error.cause), ("bold", error.remedy)):
        console.print(harmless(line), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Display:
    """Shows the events of a run."""

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
        """Show one event; `OSError` if the terminal fails."""
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)
        if isinstance(self.console, Terminal) and self.console.failure:
            raise self.console.failure

    def close(self) -> None:
        """Stop the live display."""
        if self._live:
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str) -> None:
        # Without a wrap the live display would be cut as well.
        self.console.print(text, style=style, markup=False, soft_wrap=not self._live)

    def _on_note(self, event: Event) -> None:
        self._print(event["text"], "dim")

    def _on_lost(self, event: Event) -> None:
        self._print(event["text"], "bold red")

    def _on_generation(self, event: Event) -> None:
        workers, joined, step = event["workers"], event["joined"], event["step"]
        self.started, self.first_step = time.monotonic(), step
        who = f"{workers} worker{'s' if workers > 1 else ''}" + (f", {joined} of them new," if joined else "")
        where = f"from the checkpoint of step {step:,}" if event["lost_state"] else f"after step {step:,}"
        where = where if step else "from the beginning"
        how = f"{event['seconds']:.1f} s, generation {event['generation']}"
        self._print(f"Going on with {who} {where} ({how})", "bold")

    def _on_save_failed(self, event: Event) -> None:
        next_try = "trying again" if event["again"] else "skipped; the earlier checkpoints are intact"
        what = f"Checkpoint {event['step']} could not be written to {event['folder']}"
        self._print(f"{what}: {event['reason']} ({next_try})", "bold red")

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
        if reason := event.get("skipped"):
            self._print(f"step {event['step']:,} skipped, no weight changed: {first_causes(str(reason))}", "yellow")
        elapsed = time.monotonic() - self.started
        left = (self.config.train.steps - event["step"]) * elapsed / max(1, event["step"] - self.first_step)
        self.facts["loss"] = f"{event['loss']:.4f}" + self.floor
        if "accuracy" in event:
            self.facts["accuracy"] = f"{event['accuracy']:.1%}"
        self.facts["answers/s" if "accuracy" in event else "tokens/s"] = f"{event['tokens_per_s']:,.0f}"
        if "mfu" in event:
            self.facts["MFU"] = f"{event['mfu']:.1%}"
        self.facts["lr"] = f"{event['lr']:.2e}"
        self.facts["grad norm"] = f"{event['grad_norm']:.3f}"
        eta = f"{int(left) // 60}:{int(left) % 60:02d} left"
        if self._live and self._task is not None:
            self._progress.update(self._task, completed=event["step"], eta=eta)
            self._live.update(self._render())
        elif time.monotonic() - self._last_line > LINE_SECONDS or event["step"] == self.config.train.steps:
            self._last_line = time.monotonic()
            facts = "  ".join(f"{name} {self.facts[name]}" for name in STEP_FACTS if name in self.facts)
            self.console.print(f"step {event['step']}/{self.config.train.steps}  {facts}  {eta}", soft_wrap=True)

    def _on_sample(self, event: Event) -> None:
        self.sample = event["text"]
        if self._live:
            self._live.update(self._render())
        else:
            self.console.print(f"  “{event['text']}”", soft_wrap=True, highlight=False, markup=False)

    def _on_eval(self, event: Event) -> None:
        bits = f" ({event['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in event else ""
        found = f"{event['loss']:.4f}{bits}"
        if "accuracy" in event:
            found += f", accuracy {event['accuracy']:.1%} ({event['correct']:,} of {event['total']:,})"
        self.facts["validation"] = f"{found} at step {event['step']:,}"
        text = f"step {event['step']}: validation loss {found}"
        if "valid_share" in event:
            self.facts["valid stories"] = f"{event['valid_share']:.0%}"
            text += f", {event['valid_share']:.0%} of the sampled stories valid"
        if not self._live:
            self.console.print(text, soft_wrap=True)

    def _on_stopped(self, event: Event) -> None:
        self.close()
        again, command = resuming_command(sys.argv[1:]), shlex.join(["andon", *sys.argv[1:]])
        how = "The same command resumes from there." if again == command else f"Resume from there: {again}"
        what = f"Stopped and saved at step {event['step']:,}."
        self.console.print(f"{what} {how}", soft_wrap=True, markup=False)

    def _on_halt(self, event: Event) -> None:
        self.close()
        show_halt(self.console, self.config, event)

    def _on_done(self, event: Event) -> None:
        self.close()
        for text in event["samples"]:
            self.console.print(Panel(escape(text), border_style="dim", padding=(0, 1)))
        show_summary(self.console, self.config.run.dir, event)

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._progress]
        for names in (STEP_FACTS, EVAL_FACTS):
            facts = Table.grid(padding=(0, 3))
            facts.add_row(*(f"{name} [bold]{self.facts[name]}[/]" for name in names if name in self.facts))
            rows.append(facts)
        if self.sample:
            rows.append(Panel(escape(self.sample), title="a sample", title_align="left", border_style="dim"))
        return Group(*rows)
