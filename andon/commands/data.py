"""`andon prepare` and `andon data show`: what a corpus holds, and the text of single windows."""

from pathlib import Path

from rich.console import Console

from andon.config.load import load
from andon.config.schema import Config
from andon.data.token_set import TokenSet
from andon.errors import UserError
from andon.run.events import read
from andon.run.prepare import prepare_tokens


def show_corpus(config: Config, console: Console) -> None:
    """`andon prepare`: tokenize a corpus into the cache and print its size."""
    tokens = prepare_tokens(config, console)
    size = f"{tokens.token_count:,} tokens, {tokens.bytes_per_token:.2f} bytes each"
    console.print(f"{size}, vocabulary {tokens.vocab_size:,}")
    console.print(f"digest {tokens.digest[:16]}… in {tokens.folder}", soft_wrap=True, markup=False)


def show_windows(run: Path, windows: list[int], console: Console) -> None:
    """`andon data show`: print the text of a run's training windows."""
    # The run may be another's: nothing is written where its configuration says.
    config = load(run / "config.yaml").with_own_cache()
    tokens, context = prepare_tokens(config, console), config.train.context
    check_data(run, tokens)
    tokenizer, last = tokens.tokenizer(), (tokens.token_count - 1) // context - 1
    if not windows or not all(0 <= window <= last for window in windows):
        raise UserError(f"There are no windows {windows}", f"They are numbered 0 to {last}", "Give --windows 0,1,2")
    for window in windows:
        text = tokenizer.decode(tokens.read(window * context, context + 1).tolist())
        console.print(f"window {window:,} · tokens {window * context:,} to {(window + 1) * context:,}", style="bold")
        console.print(text, markup=False)


def check_data(run: Path, tokens: TokenSet) -> None:
    """Refuse a run that was trained on other data."""
    trained_on = _data_of(run)
    if trained_on and trained_on[-1] != tokens.digest:
        raise other_data(run)


def _data_of(run: Path) -> list[str]:
    """The digests of the data that a run was trained on, as its events tell."""
    try:
        return [event["data"] for event in read(run) if event["event"] == "start"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "A line of it is no event"
        raise UserError(f"{run / 'metrics.jsonl'} cannot be read", str(cause), "Name the folder of a run") from None


def other_data(where: Path) -> UserError:
    """The error for a run or checkpoint whose corpus has changed."""
    cause = "The corpus named in its configuration has changed, or its path is relative to another folder"
    remedy = "Restore the corpus, and run this command in the folder where the run was started"
    return UserError(f"{where} was trained on other data", cause, remedy)
