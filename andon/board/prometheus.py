"""`/metrics`: the state of every run, in the text format of Prometheus."""

from collections.abc import Iterable, Sequence

from andon.board.feed import Feed
from andon.board.text import number, plain

HELP = {
    "andon_step": "Last committed step.",
    "andon_steps": "Steps of the whole run.",
    "andon_tokens_total": "Tokens trained on, including steps that were done again.",
    "andon_train_loss": "Loss of the last step.",
    "andon_train_accuracy": "Share of right answers in the last step of a fine-tuning run.",
    "andon_val_loss": "Loss on held-out data.",
    "andon_val_accuracy": "Share of right answers on held-out data.",
    "andon_tokens_per_second": "Tokens per second of all workers.",
    "andon_gradient_norm": "Norm of the mean gradient before clipping.",
    "andon_learning_rate": "Learning rate of the last step.",
    "andon_skipped_steps_total": "Steps without an update, because a gradient was not finite.",
    "andon_checkpoint_step": "Step of the newest checkpoint.",
    "andon_last_event_time_seconds": "Time of the last event, in seconds since 1970.",
    "andon_state": "1 for the state that the run is in.",
    "andon_worker_up": "1 if the worker takes part, 0 if it is lost or has pulled the cord.",
}
STATES = ("waiting", "running", "silent", "halted", "stopped", "done")
Sample = tuple[str, dict[str, str], float]


def exposition(feeds: Sequence[Feed]) -> str:
    """The metrics of all runs, as text."""
    by_name: dict[str, list[str]] = {name: [] for name in HELP}
    for feed in feeds:
        feed.advance()
        with feed.lock:
            samples = list(_samples(feed))
        for name, labels, value in samples:
            if value == value:
                inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
                by_name[name].append(f"{name}{{{inside}}} {value:.17g}")
    lines = []
    for name, found in by_name.items():
        if found:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}", *found]
    return "\n".join([*lines, ""])


def _samples(feed: Feed) -> Iterable[Sample]:
    story = feed.history.story
    run, state = {"run": feed.folder.name}, story.state_now()
    yield "andon_step", run, story.step
    yield "andon_steps", run, number(story.facts.get("steps"))
    yield "andon_tokens_total", run, story.tokens
    columns = {
        "loss": "andon_train_loss",
        "accuracy": "andon_train_accuracy",
        "tokens_per_s": "andon_tokens_per_second",
        "grad_norm": "andon_gradient_norm",
        "lr": "andon_learning_rate",
    }
    for key, name in columns.items():
        yield name, run, number(story.last.get(key))
    if story.evals:
        yield "andon_val_loss", run, story.evals[-1][1]
        yield "andon_val_accuracy", run, story.evals[-1][4]
    yield "andon_skipped_steps_total", run, story.skipped
    good = [step for step, save in story.saves.items() if save["verdict"] == "verified"]
    if good:
        yield "andon_checkpoint_step", run, max(good)
    yield "andon_last_event_time_seconds", run, story.time
    for each in STATES:
        yield "andon_state", {**run, "state": each}, float(each == state)
    for worker in story.lamps(state):
        up = worker.lamp in ("running", "waiting", "slow", "done")
        yield "andon_worker_up", {**run, "rank": str(worker.rank), "host": worker.host}, float(up)


def _escape(text: str) -> str:
    shown: str = plain(text)
    return shown.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
