"""`andon generate` of an adapter or of any Hugging Face model: text that it writes, or the class of a text."""

from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.disk.manifest import NAME as MANIFEST
from andon.errors import UserError
from andon.finetune.answer import Answering
from andon.finetune.base import SORTER, Base, read_small
from andon.finetune.model import labels_of, load_adapter, load_weights
from andon.finetune.result import RESULTS, read_state
from andon.finetune.samples.encode import TemplateRefuses, render

LENGTH = 256
"""Tokens of a text, unless told otherwise."""


def result_of(folder: Path) -> Path:
    """The adapter or the model that a fine-tuning run has given; any other folder is itself."""
    found = [folder / name for name in RESULTS if (folder / name / MANIFEST).is_file()]
    return found[0] if found else folder


def is_for_transformers(folder: Path) -> bool:
    """Whether `transformers` must load a folder: an adapter, a result of fine-tuning, or no plain Llama."""
    state = read_state(folder)
    if (folder / "adapter_config.json").is_file() or "columns" in state or _saved_by_finetuning(state):
        return True
    found = read_small(folder / "config.json")
    return bool(found) and found.get("architectures", ["LlamaForCausalLM"]) != ["LlamaForCausalLM"]


def generate(folder: Path, prompt: str, *, count: int, length: int, temperature: float, seed: int) -> list[str]:
    """Texts that a model writes after a prompt, or what class it is of."""
    torch.manual_seed(seed)
    answering = open_folder(folder)
    tokenizer = answering.base.tokenizer
    if answering.task == "classes":
        longest = answering.base.positions
        if not (ids := tokenizer(prompt, truncation=longest is not None, max_length=longest)["input_ids"]):
            raise UserError("There is no text", "A classifier needs one", "Give the text after the folder")
        label, share = answering.classify(ids)
        return [f"{label} ({share:.1%})"]
    chat = read_state(folder).get("columns") == "messages"
    if chat:
        prompt = _as_message(tokenizer, prompt)
    start = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    if len(start) > 1 and start[-1] == tokenizer.eos_token_id:
        start = start[:-1]
    start = start or [answering.base.padding]
    positions = answering.base.positions or len(start) + (length or LENGTH)
    if len(start) >= positions:
        cause = f"The model reads {positions:,}"
        raise UserError(f"The prompt has {len(start):,} tokens", cause, "Give a shorter prompt")
    most = min(length or LENGTH, positions - len(start))
    texts = [answering.write(start, most, temperature) for _ in range(count)]
    return texts if chat else [f"{prompt} {text}" for text in texts]


def open_folder(folder: Path) -> Answering:
    """The model of a folder, ready to answer."""
    if (folder / "adapter_config.json").is_file():
        model, base, task = load_adapter(folder)
        return Answering(model, base, task, labels_of(folder, base))
    if not (folder / "config.json").is_file() and _saved_by_finetuning(read_state(folder)):
        cause = "It is there to resume from: its adapters are not in PEFT's format yet"
        remedy = "Use the folder `adapter` of the run, which is written at its end"
        raise UserError(f"{folder} is a checkpoint of a fine-tuning run", cause, remedy)
    base = Base(folder)
    task = "classes" if base.architecture.endswith(SORTER) else "answers"
    labels = labels_of(folder, base)
    model, new = load_weights(base, task, labels)
    if new:
        cause = f"{len(new):,} of its tensors are missing, such as {new[0]}: it was not trained as a classifier"
        raise UserError(f"{folder} cannot answer yet", cause, f"`andon finetune {folder} DATA` trains it")
    return Answering(model.eval(), base, task, labels)


def _as_message(tokenizer: Any, prompt: str) -> str:
    """A prompt as the user's message of a chat, up to where the answer begins."""
    try:
        return render(tokenizer, [{"role": "user", "content": prompt}], answering=True)
    except TemplateRefuses as error:
        remedy = "Use it in transformers with the messages that its template expects"
        raise UserError("The model's chat template refuses a message of the user alone", str(error), remedy) from None


def _saved_by_finetuning(state: dict[str, Any]) -> bool:
    config = state.get("config")
    return isinstance(config, dict) and "lora" in config
