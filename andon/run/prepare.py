"""Making the tokens of a configuration, with a progress bar, and batches of them."""

from rich.console import Console

from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.build import Corpus, prepare
from andon.data.token_set import TokenSet
from andon.run.screen.display import progress_bar


def prepare_tokens(config: Config, console: Console) -> TokenSet:
    """The tokens of a configuration's corpus, from the cache if they are there."""
    data = config.data
    corpus = Corpus(data.corpus, data.tokenizer, config.model.vocab, data.stories, config.seed)
    with progress_bar(console) as bar:
        tasks = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total or None)
            bar.update(tasks[phase], completed=done)

        tokens = prepare(corpus, data.cache, progress)
    tokens.verify()
    if replaced := tokens.meta["replaced"]:
        console.print(f"{replaced:,} places were not valid UTF-8 and were read as U+FFFD", style="yellow")
    return tokens


def build_batches(config: Config, tokens: TokenSet) -> Batches:
    """The batches of a run, a pure function of step and slot."""
    train = config.train
    return Batches(tokens, config.seed, train.slots, train.micro_batch, train.context, config.data.validation)
