"""The sections of a configuration: every key with its type, its default and its help text.

Each component receives only its own section.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator
from pydantic import model_validator as validator

from andon.errors import UserError
from andon.model.shape import CHEAP, LARGEST, Shape
from andon.transport.address import parse_address
from andon.transport.base import TRANSPORTS

Preset = Literal["tiny", "30m", "124m", "350m", "1b"]
if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
MOST_SLOTS = 1 << 16


class Section(BaseModel):
    """A frozen section: unknown keys are errors, and each field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        frozen=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain_text(cls, value: Any) -> Any:
        """No system call takes a NUL, and no file a text that is not valid Unicode."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path) and ("\0" in str(text) or not _is_unicode(str(text))):
                raise ValueError(f"{str(text)!r} holds a NUL or is not valid UTF-8")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _number_of_its_text(cls, value: Any, info: ValidationInfo) -> Any:
        """A choice between numbers takes their text, as every other number does."""
        assert info.field_name
        choices = get_args(cls.model_fields[info.field_name].annotation)
        return next((choice for choice in choices if isinstance(choice, int) and str(choice) == value), value)


class ModelConfig(Section):
    preset: Preset = "tiny"
    """The named shape that the other keys default to."""
    source: str = Field("", alias="from")
    """Folder of a Llama model to go on from: its weights, sizes and tokenizer."""
    vocab: int = Field(gt=0, le=LARGEST["vocab"])
    """Rows of the embedding; the tokenizer may use fewer."""
    hidden: int = Field(gt=0, le=LARGEST["hidden"])
    """Width of the residual stream."""
    layers: int = Field(gt=0, le=LARGEST["layers"])
    """Number of transformer blocks."""
    heads: int = Field(gt=0, le=LARGEST["heads"])
    """Query heads."""
    kv_heads: int = Field(gt=0, le=LARGEST["kv_heads"])
    """Key and value heads; divides `heads`."""
    intermediate: int = Field(gt=0, le=LARGEST["intermediate"])
    """Width of the SwiGLU."""
    tied: bool = False
    """Share the embedding with the LM head."""
    rope_theta: float = Field(10_000.0, gt=0, lt=1e30)
    """Base of the rotary positions."""
    norm_eps: float = Field(1e-5, gt=0, lt=1)
    """Epsilon of the norms."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys that a shape has."""
        return self.model_dump(exclude={"preset", "source"})

    @validator(mode="after")
    def _divides(self) -> Self:
        if problem := Shape(context=1, **self.sizes).problem():
            raise ValueError(problem)
        return self


class DataBase(Section):
    """Keys that every kind of data has."""

    validation: float = Field(0.02, ge=0, lt=0.5)
    """Fraction of the windows held out for validation."""
    cache: Path = Field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "andon")
    """Folder of tokenized corpora."""


class DataConfig(DataBase):
    corpus: tuple[Annotated[str, Field(min_length=1)], ...] = Field(("stories",), min_length=1)
    """`stories` (built in), or files, folders and globs of .txt, .md, .jsonl, .json and .parquet, also .gz."""
    stories: int = Field(20_000, gt=0, le=10**9)
    """Number of built-in stories to train on."""
    tokenizer: str = "bpe"
    """`bpe` (trained on the corpus), `bytes`, or the path of a tokenizer.json."""

    @validator(mode="before")
    @classmethod
    def _one_path_is_a_list(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("corpus"), str):
            return {**values, "corpus": [values["corpus"]]}
        return values


class TrainBase(Section):
    """Keys that every kind of training has."""

    steps: int = Field(1_000, gt=0, le=10**12)
    """Optimizer steps of the whole run."""
    slots: int = Field(8, gt=0, le=MOST_SLOTS)
    """Micro-batches per step, divided among the workers."""
    micro_batch: int = Field(8, gt=0, le=1 << 16)
    """Windows per slot."""
    context: int = Field(gt=0, le=LARGEST["context"])
    """Tokens per window."""
    precision: Literal["auto", "f32", "bf16"] = "auto"
    """Compute in bf16, or in f32; `auto` is bf16 on CUDA devices."""


class TrainConfig(TrainBase):
    weights: Literal["f32", "bf16"] = "f32"
    """Format of the model's weights; with bf16, AdamW keeps an f32 master of the weights that a rank owns."""
    compile: bool | None = None
    """Compile each block with torch.compile; by default on CUDA devices."""
    activation_memory: float = Field(CHEAP, gt=0, le=1)
    """Share of the activations that compiled blocks keep on a GPU; backward computes the rest again. 1 is fastest."""


class OptimConfig(Section):
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after the warm-up; `wsd` keeps the peak and decays over the last fifth."""
    warmup: NonNegativeInt = 50
    """Steps of linear warm-up."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's second decay."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""


class EvalBase(Section):
    """Keys that every kind of validation has."""

    every: NonNegativeInt = 100
    """Steps between validations; 0: only after the last step."""


class EvalConfig(EvalBase):
    windows: int = Field(64, gt=0, le=10**9)
    """Number of held-out windows to validate on."""
    sample_every: float = Field(30.0, ge=0)
    """Seconds between samples; 0: none."""
    temperature: float = Field(0.8, ge=0)
    """Temperature of samples; 0 always takes the likeliest token."""
    stories: int = Field(64, ge=0, le=1 << 16)
    """Number of samples for the share of valid stories; 0: do not measure it."""


class GroupConfig(Section):
    transport: TransportName = "auto"
    """How gradients are exchanged; `auto` takes the fastest that is available."""
    wire: Literal["f32", "bf16"] = "f32"
    """Format of gradients on the wire."""
    server: str = ""
    """HOST:PORT of the gradient server that the workers join, for `protocol2`."""
    timeout: Seconds = 60.0
    """Seconds without progress after which a peer counts as stalled."""
    mixed: bool = False
    """Let machines that compute other bits train together: each weight is then updated by one of them only."""

    @property
    def server_address(self) -> tuple[str, int] | None:
        """The gradient server's host and port, if the workers join one."""
        host, port = parse_address(self.server) if self.server else ("", None)
        return (host, port) if port is not None else None

    @validator(mode="after")
    def _names_its_server(self) -> Self:
        try:
            complete = not self.server or self.server_address is not None
        except UserError:
            complete = False
        if not complete:
            raise ValueError(f"group.server = {self.server!r} is not HOST:PORT")
        known = TRANSPORTS.get(self.transport)
        if known and known.joins_server and not self.server:
            raise ValueError(f"group.transport {self.transport} needs group.server, the HOST:PORT of a gradient server")
        if self.server and not (known and known.joins_server):
            raise ValueError(f"group.server is for group.transport protocol2, not {self.transport}")
        return self


class ZeroConfig(Section):
    policy: Literal["auto", "off", "even", "round_robin", "contiguous"] = "auto"
    """Who owns which optimizer state: a slice of every unit per rank (`even`), whole units (`round_robin`,
    `contiguous`), or all of it on every rank (`off`). `auto` is `even`, but `off` over a star, where ZeRO
    would send more bytes than an all-reduce."""
    replicas: Literal[1, 2] = 1
    """Number of ranks that keep each part of the state."""

    def resolve(self, transport: str) -> Literal["off", "even", "round_robin", "contiguous"]:
        """The policy over a transport."""
        if self.policy != "auto":
            return self.policy
        known = TRANSPORTS.get(transport)
        return "off" if known and not known.zero_pays else "even"


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """Steps between saves; 0: only after the last step."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep the checkpoint of every N-th step; 0: none."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a save has failed twice. The last save of a run must succeed."""
    timeout: Seconds = 1800.0
    """Seconds after which a save is abandoned."""


class RunConfig(Section):
    dir: Path = Path("runs/default")
    """The folder of the run: metrics, summary, checkpoints."""
    board: bool = True
    """Show the run on a page of this machine while it lasts, if it was started on a terminal."""


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
