"""`andon generate` and `andon evaluate`: write text with a model, and measure a checkpoint on held-out data."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from andon.checkpoint.disk.manifest import verify_named
from andon.checkpoint.disk.store import load_state
from andon.commands.data import other_data
from andon.config.load import build, is_finetuning
from andon.config.schema import Config
from andon.data import stories
from andon.data.token_set import TokenSet
from andon.data.tokenizer import Tokenizer
from andon.errors import UserError, harmless
from andon.finetune import generate as tuned
from andon.finetune.generate import is_for_transformers
from andon.model.generate import sample
from andon.model.hub import load_model
from andon.model.llama import Llama
from andon.run import evaluate as evaluation
from andon.run.prepare import build_batches, prepare_tokens
from andon.run.records.folder import DamagedCheckpoint, newest_good
from andon.transport.local import LocalGroup


def generate(folder: Path, prompt: str, *, count: int, length: int, temperature: float, seed: int) -> None:
    """Print texts that continue a prompt."""
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    folder = checkpoint_of(tuned.result_of(folder))
    if is_for_transformers(folder):
        for text in tuned.generate(folder, prompt, count=count, length=length, temperature=temperature, seed=seed):
            _print(text)
        return
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    start = [tokenizer.end, *tokenizer.encode(prompt)]
    context = model.shape.context
    if len(start) >= context:
        cause = f"The model's context is {context:,}"
        raise UserError(f"The prompt has {len(start):,} tokens", cause, "Give a shorter prompt")
    for row in sample(model, [start] * count, tokenizer.end, length or context - len(start), temperature, seed):
        _print(prompt + tokenizer.decode(row))


def _print(text: str) -> None:
    print(harmless(text) if sys.stdout.isatty() else text, flush=True)


def checkpoint_of(folder: Path) -> Path:
    """Verify and return the checkpoint that is named, or the newest good one of the run that is named."""
    if not (folder / "checkpoints").is_dir():
        verify_named(folder)
        return folder
    damaged: list[DamagedCheckpoint] = []
    found = newest_good(folder / "checkpoints", damaged)
    for damage in damaged:
        print(harmless(damage.note), file=sys.stderr)
    if found is None:
        raise UserError(f"{folder} has no checkpoint yet", "The run has not saved", "Wait for its first save")
    return found


def evaluate(folder: Path, windows: int, as_json: bool, console: Console) -> None:
    """Print a checkpoint's loss on held-out windows of its corpus and, for the built-in stories, the valid share."""
    folder = checkpoint_of(folder)
    state = load_state(folder)
    if not isinstance(state.get("config"), dict):
        cause = "Its state.json has no configuration: a script saved it"
        raise UserError(f"{folder} is not a checkpoint of `andon train`", cause, "Evaluate it in the script")
    if is_finetuning(state["config"]):
        cause = "It is a checkpoint of `andon finetune`, whose accuracy is in metrics.jsonl and summary.json"
        raise UserError(f"{folder} is not a checkpoint of `andon train`", cause, "Look at the run's summary.json")
    # The checkpoint may be another user's: nothing is written to the cache that its configuration names.
    config = build(state["config"], {}).with_own_cache()
    model, tokens = load_model(folder), prepare_tokens(config, console)
    if tokens.digest != state.get("data"):
        raise other_data(folder)
    loss = evaluation.validation_loss(model, build_batches(config, tokens).validation(windows), LocalGroup())
    bits = evaluation.bits_per_byte(loss, tokens.bytes_per_token)
    found: dict[str, Any] = {"checkpoint": str(folder), "loss": loss, "bits_per_byte": bits}
    if config.data.corpus == ("stories",):
        found |= _stories(config, model, tokens)
    if as_json:
        print(json.dumps(found))
        return
    console.print(f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte")
    if "floor" not in found:
        return
    count, entropy = found["stories"], stories.entropy() / math.log(2)
    console.print(f"{found['valid_share']:.1%} of {count} stories valid, {found['known']} in the training text")
    console.print(f"floor of the loss: {found['floor']:.4f}, from the grammar's entropy of {entropy:.0f} bits a story")


def _stories(config: Config, model: Llama, tokens: TokenSet) -> dict[str, Any]:
    """Let the model write stories; returns their valid share and the floor of the loss."""
    with torch.no_grad():
        count = config.eval.stories or 64
        texts = evaluation.sample_texts(model, tokens.tokenizer(), count, config.eval.temperature, config.seed)
    score = evaluation.story_score(texts, config.seed, config.data.stories)
    floor = evaluation.loss_floor(config.data.stories, tokens.token_count)
    return {"stories": count, "valid_share": score.valid_share, "known": score.known, "floor": floor}
