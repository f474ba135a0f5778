"""`andon prepare` and `andon data show`: tokenize a corpus; print single windows or samples as text."""

from pathlib import Path

from rich.console import Console

from andon.config.finetune import FinetuneConfig
from andon.config.load import load_run
from andon.config.schema import Config
from andon.errors import UserError
from andon.run.prepare import prepare_tokens
from andon.run.records.events import read_events


def show_corpus(config: Config, console: Console) -> None:
    """`andon prepare`: tokenize a corpus into the cache and print its size."""
    tokens = prepare_tokens(config, console)
    size = f"{tokens.token_count:,} tokens, {tokens.bytes_per_token:.2f} bytes each"
    console.print(f"{size}, vocabulary {tokens.vocab_size:,}")
    console.print(f"digest {tokens.digest[:16]}… in {tokens.folder}", soft_wrap=True, markup=False)


def show(run: Path, windows: list[int], samples: list[str], console: Console) -> None:
    """`andon data show`: print the text of a run's training windows, or of its samples."""
    # The run may be another user's: nothing is written to the cache that its configuration names.
    config = load_run(run / "config.yaml").with_own_cache()
    if isinstance(config, FinetuneConfig):
        if windows or not samples:
            remedy = "Give --samples a.jsonl:7,a.jsonl:8"
            raise UserError(f"No samples of {run} were named", "It is a run of fine-tuning", remedy)
        show_samples(run, config, samples, console)
    elif isinstance(config, Config):
        if samples or not windows:
            raise UserError(f"No windows of {run} were named", "It is a run of pretraining", "Give --windows 0,1,2")
        show_windows(run, config, windows, console)


def show_samples(run: Path, config: FinetuneConfig, names: list[str], console: Console) -> None:
    """Print samples and their answers as the model saw them."""
    from andon.finetune.base import Base
    from andon.finetune.samples.tokenize import prepare_samples

    base = Base(config.model)
    samples = prepare_samples(config, base)
    check_data(run, samples.digest)
    for name in names:
        number = samples.find(name)
        if number is None:
            files = ", ".join(samples.meta["files"])
            raise UserError(f"There is no sample {name}", f"Samples are lines of {files}", "Give FILE:LINE")
        text, answer = samples.texts(number, base.tokenizer)
        console.print(f"{name} · {len(samples.tokens(number)):,} tokens", style="bold", markup=False)
        console.print(text, markup=False)
        console.print(f"→ {answer}", markup=False)


def show_windows(run: Path, config: Config, windows: list[int], console: Console) -> None:
    """Print the text of training windows."""
    tokens, context = prepare_tokens(config, console), config.train.context
    check_data(run, tokens.digest)
    tokenizer, last = tokens.tokenizer(), (tokens.token_count - 1) // context - 1
    if not all(0 <= window <= last for window in windows):
        raise UserError(f"There are no windows {windows}", f"They are numbered 0 to {last}", "Give --windows 0,1,2")
    for window in windows:
        text = tokenizer.decode(tokens.read(window * context, context + 1).tolist())
        console.print(f"window {window:,} · tokens {window * context:,} to {(window + 1) * context:,}", style="bold")
        console.print(text, markup=False)


def check_data(run: Path, digest: str) -> None:
    """Refuse a run that was trained on other data, according to its events."""
    digests = [event.get("data") for event in read_events(run) if event["event"] == "start"]
    if digests and digests[-1] != digest:
        raise other_data(run)


def other_data(where: Path) -> UserError:
    """The error for a run or checkpoint whose corpus has changed."""
    cause = "The corpus named in its configuration has changed, or its path is relative to another folder"
    remedy = "Restore the corpus, and run this command in the folder where the run was started"
    return UserError(f"{where} was trained on other data", cause, remedy)
