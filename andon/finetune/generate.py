"""`andon generate` for an adapter or any Hugging Face model: a text that it continues, or the class of a text."""

from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.disk.manifest import NAME as MANIFEST
from andon.config.load import is_finetuning
from andon.errors import UserError
from andon.finetune.answer import Predictor
from andon.finetune.base import Base, read_json
from andon.finetune.model import labels_of, load_adapter, load_weights
from andon.finetune.result import RESULTS, read_state
from andon.finetune.samples.encode import TemplateError, render

DEFAULT_LENGTH = 256
"""Most new tokens of a text, if no length is given."""


def result_of(folder: Path) -> Path:
    """The adapter or model in the folder of a fine-tuning run; any other folder is returned unchanged."""
    return next((folder / name for name in RESULTS if (folder / name / MANIFEST).is_file()), folder)


def is_for_transformers(folder: Path) -> bool:
    """Whether `transformers` must load a folder: an adapter, a result of fine-tuning, or a model other than Llama."""
    state = read_state(folder)
    if (folder / "adapter_config.json").is_file() or "columns" in state or _saved_by_finetuning(state):
        return True
    found = read_json(folder / "config.json")
    return bool(found) and found.get("architectures", ["LlamaForCausalLM"]) != ["LlamaForCausalLM"]


def generate(folder: Path, prompt: str, *, count: int, length: int, temperature: float, seed: int) -> list[str]:
    """Texts that continue a prompt, or the class of a text."""
    torch.manual_seed(seed)
    predictor = open_folder(folder)
    tokenizer, longest, length = predictor.base.tokenizer, predictor.base.positions, length or DEFAULT_LENGTH
    if predictor.task == "classes":
        if not (ids := tokenizer(prompt, truncation=longest is not None, max_length=longest)["input_ids"]):
            raise UserError("There is no text", "A classifier needs one", "Give the text after the folder")
        label, probability = predictor.classify(ids)
        return [f"{label} ({probability:.1%})"]
    chat = read_state(folder).get("columns") == "messages"
    if chat:
        prompt = _as_message(tokenizer, prompt)
    start = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    if len(start) > 1 and start[-1] == tokenizer.eos_token_id:
        start = start[:-1]
    start = start or [predictor.base.padding]
    if longest and len(start) >= longest:
        cause = f"The model reads at most {longest:,}"
        raise UserError(f"The prompt has {len(start):,} tokens", cause, "Give a shorter prompt")
    texts = [predictor.generate(start, length, temperature) for _ in range(count)]
    return texts if chat else [f"{prompt} {text}" for text in texts]


def open_folder(folder: Path) -> Predictor:
    """Load the adapter or model of a folder."""
    if (folder / "adapter_config.json").is_file():
        model, base, task = load_adapter(folder)
        return Predictor(model, base, task, labels_of(folder, base))
    if not (folder / "config.json").is_file() and _saved_by_finetuning(read_state(folder)):
        cause = "It can only be resumed from: its adapters are not in PEFT's format"
        remedy = "Use the folder `adapter` of the run, which is written at its end"
        raise UserError(f"{folder} is a checkpoint of a fine-tuning run", cause, remedy)
    base = Base(folder)
    task = "classes" if base.is_classifier else "answers"
    labels = labels_of(folder, base)
    model, new = load_weights(base, task, labels)
    if new:
        cause = f"{len(new):,} of its tensors are missing, such as {new[0]}: it was not trained as a classifier"
        raise UserError(f"{folder} cannot answer yet", cause, f"`andon finetune {folder} DATA` trains it")
    return Predictor(model.eval(), base, task, labels)


def _as_message(tokenizer: Any, prompt: str) -> str:
    """Render a prompt as the user's message of a chat, up to the beginning of the answer."""
    try:
        return render(tokenizer, [{"role": "user", "content": prompt}], generation_prompt=True)
    except TemplateError as error:
        remedy = "Use it in transformers with the messages that its template expects"
        raise UserError("The model's chat template refuses a single message of the user", str(error), remedy) from None


def _saved_by_finetuning(state: dict[str, Any]) -> bool:
    config = state.get("config")
    return isinstance(config, dict) and is_finetuning(config)
