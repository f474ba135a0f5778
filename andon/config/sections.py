"""The sections of a configuration: every key with its type, default and help text.

Each component receives only its own section.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator
from pydantic import model_validator as validator
from pydantic_core import PydanticCustomError

from andon.engine.gradients.order import MOST_SLOTS
from andon.errors import UserError
from andon.model.shape import CHEAP, LARGEST, Shape
from andon.transport.address import parse_address
from andon.transport.registry import TRANSPORTS

Preset = Literal["tiny", "30m", "124m", "350m", "1b"]
if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]
Seconds = Annotated[float, Field(gt=0, le=1e7)]


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
        """Refuse text that cannot be a file name or be written to a file: NUL characters and lone surrogates."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path) and re.search("[\0\ud800-\udfff]", str(text)):
                raise ValueError(f"{str(text)!r} holds a NUL or is not valid UTF-8")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_yes_or_no(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number belongs: it would count as 1, and YAML reads `yes` and `on` as `true`."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise PydanticCustomError(
                "boolean", "Input should not be true or false, as which YAML reads yes, no, on, off"
            )
        return value


class ModelConfig(Section):
    preset: Preset = "tiny"
    """Named model shape. It sets the defaults of the other `model` keys and of batch size, steps and learning rate."""
    source: str = Field("", alias="from")
    """Folder of a Llama model to continue from: its weights, sizes and tokenizer. Empty: start with new weights."""
    vocab: int = Field(gt=0, le=LARGEST["vocab"])
    """Number of rows of the embedding; the tokenizer may use fewer."""
    hidden: int = Field(gt=0, le=LARGEST["hidden"])
    """Width of the residual stream."""
    layers: int = Field(gt=0, le=LARGEST["layers"])
    """Number of transformer blocks."""
    heads: int = Field(gt=0, le=LARGEST["heads"])
    """Number of query heads."""
    kv_heads: int = Field(gt=0, le=LARGEST["kv_heads"])
    """Number of key and value heads; must divide `heads`."""
    intermediate: int = Field(gt=0, le=LARGEST["intermediate"])
    """Inner width of the SwiGLU MLP."""
    tied: bool = False
    """Use one matrix for the embedding and the LM head."""
    rope_theta: float = Field(10_000.0, gt=0, lt=1e30)
    """Base of the rotary position embedding."""
    norm_eps: float = Field(1e-5, gt=0, lt=1)
    """Epsilon of the RMS norms."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys that describe the shape."""
        return self.model_dump(exclude={"preset", "source"})

    @validator(mode="after")
    def _check_sizes(self) -> Self:
        if problem := Shape(context=1, **self.sizes).problem():
            raise ValueError(problem)
        return self


class DataBase(Section):
    """Keys that every kind of data has."""

    validation: float = Field(0.02, ge=0, lt=0.5)
    """Fraction of the windows (of `train.context` tokens) held out for validation."""
    cache: Path = Field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "andon")
    """Folder that keeps tokenized data, so that a second run on the same text starts at once."""


class DataConfig(DataBase):
    corpus: tuple[Annotated[str, Field(min_length=1)], ...] = Field(("stories",), min_length=1)
    """`stories` (built in), or files, folders and globs of .txt, .md, .jsonl, .json (all also .gz) and .parquet."""
    stories: int = Field(20_000, gt=0, le=10**9)
    """Number of stories in the built-in corpus."""
    tokenizer: str = "bpe"
    """`bpe` (trained on the corpus), `bytes`, or the path of a tokenizer.json or its folder."""

    @validator(mode="before")
    @classmethod
    def _wrap_single_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("corpus"), str):
            return {**values, "corpus": [values["corpus"]]}
        return values


class TrainBase(Section):
    """Keys that every kind of training has."""

    steps: int = Field(1_000, gt=0, le=10**12)
    """Number of optimizer steps of the whole run."""
    slots: int = Field(8, gt=0, le=MOST_SLOTS)
    """Number of micro-batches (slots) per step. Workers share them, so the batch does not depend on their number."""
    micro_batch: int = Field(8, gt=0, le=1 << 16)
    """Windows per micro-batch."""
    context: int = Field(gt=0, le=LARGEST["context"])
    """Tokens per window: the longest text that the model sees at once."""
    precision: Literal["auto", "f32", "bf16"] = "auto"
    """Number format of forward and backward; `auto` is bf16 on CUDA devices and f32 on CPUs."""


class TrainConfig(TrainBase):
    weights: Literal["f32", "bf16"] = "f32"
    """Number format of the weights. With `bf16`, AdamW keeps an f32 master copy of the weights that a rank owns."""
    compile: bool | None = None
    """Compile each block with torch.compile; null: only on CUDA devices."""
    activation_memory: float = Field(CHEAP, gt=0, le=1)
    """Share of the activations that compiled blocks keep on a GPU; backward recomputes the rest. 1 is fastest; 0.75
    recomputes cheap operations only, no matrix products."""


class OptimConfig(Section):
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after the warm-up; `wsd` keeps the peak and decays linearly over the last fifth of the steps."""
    warmup: NonNegativeInt = 50
    """Number of steps over which the learning rate rises linearly to its peak."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate of the last step, as a fraction of the peak."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay, on matrices only: not on norms and biases."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the running mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the running mean of squared gradients; 0.95 is usual for language models."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the denominator of the update."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 switches clipping off."""


class EvalBase(Section):
    """Keys that every kind of validation has."""

    every: NonNegativeInt = 100
    """Steps between validations; 0: only after the last step."""


class EvalConfig(EvalBase):
    windows: int = Field(64, gt=0, le=10**9)
    """Number of held-out windows in each validation."""
    sample_every: float = Field(30.0, ge=0)
    """Seconds between sample texts that the model writes during training; 0: none."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature of these texts; 0 always takes the most likely token."""
    stories: int = Field(64, ge=0, le=1 << 16)
    """Number of stories that each validation samples to measure the share of valid ones (built-in corpus); 0: none."""


class GroupConfig(Section):
    transport: TransportName = "auto"
    """How workers exchange gradients; `auto` takes the fastest transport that is available."""
    wire: Literal["f32", "bf16"] = "f32"
    """Number format of gradients between workers; `bf16` rounds them, so the final weights differ, and halves the bytes
    over `ring`, `star` and `torch`."""
    server: str = ""
    """HOST:PORT of the gradient server that the workers join; only for the transport `protocol2`."""
    timeout: Seconds = 60.0
    """Seconds without progress after which a peer counts as stalled; 60 tolerates a slow link or a busy machine."""
    mixed: bool = False
    """Let machines that compute different bits train together: one rank updates a weight and sends it to the others."""

    @property
    def server_address(self) -> tuple[str, int] | None:
        """The gradient server's host and port, if the workers join one."""
        host, port = parse_address(self.server) if self.server else ("", None)
        return None if port is None else (host, port)

    @validator(mode="after")
    def _check_server(self) -> Self:
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
    """How optimizer state is divided among ranks: a slice of every unit each (`even`), whole units (`round_robin`,
    `contiguous`), or a full copy on every rank (`off`). `auto` is `even`, but `off` for one worker and for `star` and
    `protocol2`, where ZeRO would send more bytes than an all-reduce."""
    replicas: int = Field(1, ge=1, le=2)
    """Number of ranks that hold each part of the optimizer state; 2 needs twice the memory and survives one loss."""

    def resolve(self, transport: str) -> Literal["off", "even", "round_robin", "contiguous"]:
        """The policy to use over a transport."""
        if self.policy != "auto":
            return self.policy
        known = TRANSPORTS.get(transport)
        return "off" if known and not known.zero_pays else "even"


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep: more than one, in case the newest is damaged."""
    keep_every: NonNegativeInt = 0
    """Also keep each checkpoint whose step is a multiple of this; 0: none."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Whether to continue or stop the run when a save has failed twice. The last save of a run must succeed."""
    timeout: Seconds = 1800.0
    """Seconds after which an unfinished save is abandoned; long, for large models on slow disks."""


class RunConfig(Section):
    dir: Path = Path("runs/default")
    """Folder of the run: configuration, metrics, summary, checkpoints."""
    board: bool = True
    """Serve the board, a local web page that shows the run while it lasts, if the run was started in a terminal."""
