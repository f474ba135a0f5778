"""The configuration of `andon finetune`: a Hugging Face model, samples and adapters."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt
from pydantic import model_validator as validator

from andon.config.schema import RunSettings
from andon.config.sections import DataBase, EvalBase, Section, TrainBase
from andon.engine.gradients.order import MOST_SLOTS
from andon.model.shape import LARGEST

ADAPTER_LR, WHOLE_LR = 2e-4, 2e-5
"""Default peak learning rates: new adapters need larger steps than weights that were trained before."""

Task = Literal["classes", "answers"]
"""What the model learns: the class of a text, or the tokens of an answer."""


class SamplesConfig(DataBase):
    files: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Files, folders and globs of .jsonl (also .gz) and .parquet."""
    validation: float = Field(0.1, ge=0, lt=0.5)
    """Fraction of the samples held out for validation."""


class LoraConfig(Section):
    rank: int = Field(8, ge=0, le=1 << 12)
    """Rank of the LoRA adapters; 0 trains all weights instead, by default with the smaller `optim.lr` 2e-5."""
    alpha: float = Field(16.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the layers that get adapters, such as q_proj,v_proj; empty: every linear layer but the last."""


class TuneConfig(TrainBase):
    steps: int = Field(0, ge=0, le=10**12)
    """Number of optimizer steps of the whole run; 0: `train.epochs` decides."""
    epochs: float = Field(3.0, gt=0, le=10**6)
    """Number of passes over the training samples, if `train.steps` is 0."""
    slots: int = Field(4, gt=0, le=MOST_SLOTS)
    """Number of micro-batches (slots) per step. Workers share them, so the batch does not depend on their number."""
    micro_batch: int = Field(4, gt=0, le=1 << 16)
    """Samples per micro-batch."""
    context: int = Field(512, gt=1, le=LARGEST["context"])
    """Most tokens per sample; longer samples are cut, and their number is reported."""


class TuneEvalConfig(EvalBase):
    every: NonNegativeInt = 50
    """Steps between validations; 0: only after the last step."""
    samples: int = Field(256, gt=0, le=10**9)
    """Number of held-out samples in each validation."""
    shown: int = Field(3, ge=0, le=64)
    """Number of held-out samples whose answers are shown before and after training."""
    length: int = Field(64, gt=0, le=1 << 16)
    """Most tokens of each answer that is shown."""


class FinetuneConfig(RunSettings):
    """Everything that determines a run of `andon finetune`."""

    model: Annotated[str, Field(min_length=1)]
    """Folder of a Hugging Face model."""
    data: SamplesConfig
    train: TuneConfig = Field(default_factory=TuneConfig)
    eval: TuneEvalConfig = Field(default_factory=TuneEvalConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)

    @validator(mode="before")
    @classmethod
    def _set_defaults(cls, values: Any) -> Any:
        """Set the defaults of `optim` and `run` that differ from those of pretraining."""
        if not isinstance(values, dict):
            return values
        lora, optim, run = (values.get(name, {}) for name in ("lora", "optim", "run"))
        whole = isinstance(lora, dict) and str(lora.get("rank", "")) == "0"
        rate = {"lr": WHOLE_LR if whole else ADAPTER_LR, "schedule": "linear", "warmup": 10, "final_lr": 0.0}
        result = dict(values)
        if isinstance(optim, dict):
            result["optim"] = {**rate, "weight_decay": 0.0, **optim}
        if isinstance(run, dict):
            result["run"] = {"dir": Path("runs/finetune"), **run}
        return result
