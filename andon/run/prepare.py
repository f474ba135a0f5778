"""From a configuration to tokens on disk, with a progress bar."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from andon.config.schema import Config
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet


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
