"""What a user sees of a run while it lasts: progress, samples, notes; plain lines without a terminal. And errors."""

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
from andon.run.screen.ending import first_causes, show_halt, show_summary
from andon.run.screen.terminal import Terminal

OF_STEPS = ("loss", "accuracy", "tokens/s", "answers/s", "lr", "grad norm")
OF_TESTS = ("validation", "valid stories")
PLAIN_EVERY = 2.0  # seconds between lines where there is no terminal


def progress_bar(console: Console) -> Progress:
    """A progress bar that disappears at the end; none without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def show_error(console: Console, error: UserError) -> None:
    """Three lines: what happened, the likely cause, what to try."""
    for style, line in (("bold red", error.what), ("", error.cause), ("bold", error.remedy)):
        console.print(harmless(line), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


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

    def _on_lost(self, event: Event) -> None:
        self.console.print(event["text"], style="bold red", markup=False, soft_wrap=True)

    def _on_generation(self, event: Event) -> None:
        workers, joined = event["workers"], event["joined"]
        who = f"{workers} worker{'s' if workers > 1 else ''}" + (f", {joined} of them new," if joined else "")
        self.started, self.first_step = time.monotonic(), event["step"]
        where = f"{'from the checkpoint of' if event['lost_state'] else 'after'} step {event['step']:,}"
        where = where if event["step"] else "from the beginning"
        text = f"Going on with {who} {where} ({event['seconds']:.1f} s, generation "
        self.console.print(f"{text}{event['generation']})", style="bold", markup=False, soft_wrap=True)

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
        if reason := event.get("skipped"):
            text = f"step {event['step']:,} skipped, no weight changed: {first_causes(str(reason))}"
            self.console.print(text, style="yellow", markup=False, soft_wrap=True)
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
        elif time.monotonic() - self._last_line > PLAIN_EVERY or event["step"] == self.config.train.steps:
            self._last_line = time.monotonic()
            facts = "  ".join(f"{name} {self.facts[name]}" for name in OF_STEPS if name in self.facts)
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
        rows: list[RenderableType] = [self._progress]
        for names in (OF_STEPS, OF_TESTS):
            facts = Table.grid(padding=(0, 3))
            facts.add_row(*(f"{name} [bold]{self.facts[name]}[/]" for name in names if name in self.facts))
            rows.append(facts)
        if self.sample:
            rows.append(Panel(escape(self.sample), title="a sample", title_align="left", border_style="dim"))
        return Group(*rows)
