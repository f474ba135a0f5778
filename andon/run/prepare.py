"""Making the tokens of a configuration, with a progress bar, and batches of them."""

from pathlib import Path

from rich.console import Console

from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet
from andon.run.screen.display import progress_bar
from andon.run.screen.terminal import counted


def prepare_tokens(config: Config, console: Console) -> TokenSet:
    """The tokens of a configuration's corpus, from the cache if they are there."""
    data = config.data
    corpus = Corpus(data.corpus, data.tokenizer, config.model.vocab, data.stories, config.seed)
    links: list[Path] = []
    with progress_bar(console) as bar:
        tasks = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=done)

        tokens = prepare(corpus, data.cache, progress, links=links)
    tokens.verify()
    if links:
        what = f"{counted(len(links), 'symbolic link')} in the corpus not followed: {links[0].name}"
        console.print(f"{what}{', …' if links[1:] else ''}", style="yellow", soft_wrap=True, markup=False)
    if replaced := tokens.meta["replaced"]:
        count, *names = tokens.meta.get("replaced_in", [0])  # an older cache has none
        where = (
            f", in {counted(count, 'file')}: {', '.join(names)}{', …' if count > len(names) else ''}" if count else ""
        )
        what = f"{counted(replaced, 'place')} not valid UTF-8, read as U+FFFD{where}"
        console.print(what, style="yellow", soft_wrap=True, markup=False)
    return tokens


def build_batches(config: Config, tokens: TokenSet) -> Batches:
    """The batches of a run, a pure function of step and slot."""
    train = config.train
    return Batches(tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation)
