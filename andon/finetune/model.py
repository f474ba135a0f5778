"""The model to train: a Hugging Face model with LoRA adapters, or with all its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andon.config.finetune import FinetuneConfig, LoraConfig, Task
from andon.errors import UserError, shown
from andon.finetune.base import LOADING, Base, first_line, read_json
from andon.finetune.samples.sample_set import SampleSet

COPY_AGAIN = "Copy it again from where it came"
WITHOUT_CODE = "Use a model that transformers knows; code that comes with a model is not run"
POOLER = "pooler"
"""A layer of some classifiers between the last block and the head; models that were not classifiers often lack it."""
PEFT_TASKS = {"classes": "SEQ_CLS", "answers": "CAUSAL_LM"}


def build_model(config: FinetuneConfig, samples: SampleSet, base: Base) -> nn.Module:
    """The model with its first weights: those of the folder, and new ones from the seed."""
    base.check_task(samples.task)
    torch.manual_seed(config.seed)
    model, new = load_weights(base, samples.task, samples.labels)
    if not config.lora.rank:
        return model.train()
    torch.manual_seed(config.seed)
    return add_adapters(model, samples.task, config.lora, new).train()


def load_weights(base: Base, task: Task, labels: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """Load the model of a folder in f32, and list its new weights: a classifier gets a head of the right size."""
    import transformers

    settings: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, **LOADING}
    kind = transformers.AutoModelForCausalLM
    if task == "classes":
        kind = transformers.AutoModelForSequenceClassification
        names = dict(enumerate(labels))
        numbers = {name: number for number, name in names.items()}
        settings |= {"num_labels": len(labels), "id2label": names, "label2id": numbers, "ignore_mismatched_sizes": True}
    try:
        model, loaded = kind.from_pretrained(base.folder, output_loading_info=True, **settings)
    except Exception as error:  # the library raises many kinds of errors
        raise cannot_load(base, error) from None
    new = sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})
    body = f"{model.base_model_prefix}."
    # The library silently initialises missing tensors. Only the head and the pooler of a classifier may be new.
    if lacking := [name for name in new if task == "answers" or (name.startswith(body) and POOLER not in name)]:
        cause = f"{len(lacking):,} tensors are missing or of another shape, such as {lacking[0]}"
        raise UserError(f"{base.folder} does not hold all weights of its model", cause, COPY_AGAIN)
    model.config.get_text_config().pad_token_id = base.padding
    return model, new


def cannot_load(base: Base, error: Exception) -> UserError:
    """The error for a model that the library cannot load."""
    cause = first_line(error)
    if not list(base.folder.glob("*.safetensors")) and list(base.folder.glob("*.bin")):
        cause = "Its weights are a .bin file, a pickle, which can run code when it is loaded"
        remedy = "Save it as safetensors first: model.save_pretrained(FOLDER)"
        return UserError(f"{base.folder} has no safetensors", cause, remedy)
    needs_code = "trust_remote_code" in str(error)
    return UserError(f"{base.folder} cannot be loaded", cause, WITHOUT_CODE if needs_code else COPY_AGAIN)


def add_adapters(model: nn.Module, task: Task, lora: LoraConfig, new: Sequence[str] = ()) -> nn.Module:
    """Add new adapters to a model; only they, the head of a classifier and a new pooler are trained and saved."""
    peft = import_peft()
    poolers = {name[: name.index(POOLER) + len(POOLER)] for name in new if POOLER in name}
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets) or "all-linear",
        task_type=PEFT_TASKS[task],
        modules_to_save=sorted(poolers) or None,
    )
    try:
        found: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
        cause = first_line(error)
        remedy = f"Give --lora.targets some of {', '.join(names[:12])}"
        where = ", ".join(lora.targets) or "this model"
        raise UserError(f"Adapters cannot be added to {where}", cause, remedy) from None
    refuse_tied(found)
    return found


def refuse_tied(adapted: nn.Module) -> None:
    """Refuse an adapter for a weight that two modules share: merging it would change the other module, too."""
    users: dict[int, list[str]] = {}
    for name, module in adapted.named_modules():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter) and not hasattr(module, "lora_A"):
            users.setdefault(id(weight), []).append(name.removesuffix(".base_layer").removeprefix("base_model.model."))
    for shared in (names for names in users.values() if len(names) > 1):
        for name in shared:
            if hasattr(adapted.get_submodule(f"base_model.model.{name}"), "lora_A"):
                others = " and ".join(other for other in shared if other != name)
                cause = f"It shares its weight with {others}, so the adapter could not be merged into it"
                remedy = "Leave it out of --lora.targets"
                raise UserError(f"An adapter cannot be added to {name}", cause, remedy)


def import_peft() -> Any:
    """Import peft, the library of adapters."""
    try:
        import peft
    except ImportError:
        raise UserError("Adapters cannot be used", "peft is not installed", "pip install 'andon[finetune]'") from None
    return peft


def load_adapter(folder: Path) -> tuple[nn.Module, Base, Task]:
    """Load the model of an adapter folder with its adapters, for inference."""
    peft = import_peft()
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # the library raises many kinds of errors
        cause = first_line(error)
        raise UserError(f"{folder} is not an adapter", cause, "Name a folder with adapter_config.json") from None
    named = settings.base_model_name_or_path
    if not named or not isinstance(named, str):
        cause = f"base_model_name_or_path in its adapter_config.json is {shown(named)}"
        raise UserError(f"The adapter {folder} does not name its model", cause, "Write the folder of the model there")
    base = Base(named)
    task: Task = "classes" if settings.task_type == "SEQ_CLS" else "answers"
    model, _ = load_weights(base, task, labels_of(folder, base))
    try:
        return peft.PeftModel.from_pretrained(model, str(folder)).eval(), base, task
    except Exception as error:  # the library raises many kinds of errors
        what = f"The adapter {folder} does not fit {base.folder}"
        raise UserError(what, first_line(error), "Name the model that it was made for in adapter_config.json") from None


def labels_of(folder: Path, base: Base) -> list[str]:
    """The classes that an adapter was trained for, from its `state.json`; if it has none, those of its model."""
    labels = read_json(folder / "state.json").get("labels")
    return [str(name) for name in labels] if isinstance(labels, list) else base.labels
