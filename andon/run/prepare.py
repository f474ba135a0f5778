"""From a configuration to tokens on disk, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from andon.config.load import load
from andon.config.schema import Config
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.events import read


def prepare_tokens(config: Config, console: Console) -> TokenSet:
    """The tokens of a configuration's corpus, made now or taken from the cache."""
    corpus = Corpus(
        paths=config.data.corpus,
        stories_seed=config.seed,
        stories_count=config.data.stories,
        tokenizer=config.data.tokenizer,
        vocab_size=config.model.vocab,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=done)

        tokens = prepare(corpus, config.data.cache.expanduser(), progress)
    tokens.verify()
    if replaced := tokens.meta["replaced"]:
        console.print(f"{replaced:,} places were no valid UTF-8 and read as U+FFFD", style="yellow")
    return tokens


def show_windows(run: Path, windows: list[int], console: Console) -> None:
    """Print the text of a run's windows."""
    config = load(run / "config.yaml")
    tokens, context = prepare_tokens(config, console), config.train.context
    trained_on = [said["data"] for said in read(run) if said["event"] == "start"]
    if trained_on and trained_on[-1] != tokens.digest:
        raise other_data(run)
    tokenizer, last = tokens.tokenizer(), (tokens.tokens - 1) // context - 1
    if not windows or not all(0 <= window <= last for window in windows):
        raise UserError(
            f"There are no windows {windows}", f"They are numbered 0 to {last}", "Give --windows 0,1,2"
        )
    for window in windows:
        text = tokenizer.decode(tokens.read(window * context, context + 1).tolist())
        console.print(
            f"window {window:,} · tokens {window * context:,} to {(window + 1) * context:,}", style="bold"
        )
        console.print(text, markup=False)


def other_data(where: Path) -> UserError:
    """The corpus has changed since."""
    return UserError(
        f"{where} was trained on other data",
        "The corpus that its configuration names has changed since, or is found from another folder",
        "Put the corpus back, and run this from the folder where the run was started",
    )


def show_tokens(tokens: TokenSet, console: Console) -> None:
    """What a prepared corpus holds."""
    console.print(
        f"{tokens.tokens:,} tokens, {tokens.bytes_per_token:.2f} bytes each, vocabulary {tokens.vocab_size:,}"
    )
    console.print(f"digest {tokens.digest[:16]}… in {tokens.folder}", soft_wrap=True)
