"""The plan of a run: its memory and traffic, calculated before torch is loaded.

Memory is the peak of one worker in a step. Shared memory is divided among the workers that share it, as in the
*proportional set size* (PSS) of a process. From its first save on a worker also keeps copies: its share of the moments,
and on rank 0 the weights. The arithmetic is exact except for two figures, measured with torch 2.13's CPU build: the
memory of torch and Andon without a model, and how much more than the live tensors the C library's allocator holds. On a
GPU compiled blocks keep less, in bf16, and only a part of the logits; the program and the copies are in the host's
memory.

Traffic is what one rank sends in a step, on average over the ranks; in shared memory, what it moves between its own
memory and that of others. Norms and fingerprints are left out: they are less than a thousandth.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeVar

from andon.config.load import merge, validate
from andon.config.schema import Config, RunSettings
from andon.engine.gradients.order import MOST_SLOTS, make_order
from andon.machine import computes_on_gpu
from andon.model.shape import CHEAP, LOGITS_BYTES, Shape
from andon.optim.shard_map import UnitOwners
from andon.transport.registry import TRANSPORTS, Traffic

C = TypeVar("C", bound=RunSettings)
PROGRAM_BYTES: Final = 12_000_000
"""Private memory of Python, torch and Andon in every worker."""
SHARED_BYTES: Final = 264_000_000
"""Pages that all workers of `andon train` share: libraries, and what was loaded before the workers were forked."""
ALLOCATOR_RATIO: Final = 1.4
"""Memory that the allocator holds for temporary tensors, over their live bytes: 1.2 to 1.45 with `30m`."""
GPU_ALLOCATOR_RATIO: Final = 1.05
"""The same on a GPU: 1.02 to 1.06 with `124m` to `1b`."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one worker holds: at the peak of a step, and for a save."""

    program: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int
    snapshot: int
    """Copies of every rank for a save."""
    weights_snapshot: int
    """The copy of the weights, on rank 0 only."""
    on_host: int = 0
    """Of a GPU's worker: copies for a save, in pinned memory of the host; not counted in the total."""

    @property
    def step(self) -> int:
        """The peak of a step, before the first save."""
        return self.total - self.snapshot - self.weights_snapshot

    @property
    def total(self) -> int:
        """The most that rank 0 holds."""
        bytes_of: dict[str, int] = asdict(self)
        return sum(bytes_of.values()) - self.on_host

    def of_all(self, workers: int) -> int:
        """The most that all workers hold together."""
        return workers * (self.total - self.weights_snapshot) + self.weights_snapshot


@dataclass(frozen=True)
class Plan:
    """Size, memory and traffic of a run; `sent` are the bytes that a rank sends in a step."""

    parameters: int
    tokens_per_step: int
    tokens: int
    memory: Memory
    sent: int

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON, with the total of its memory."""
        plan = asdict(self)
        plan["memory"] |= {"step": self.memory.step, "total": self.memory.total}
        return plan


@dataclass(frozen=True)
class Trained:
    """The trained parameters: their number in each block and in each other unit, and their type."""

    blocks: Sequence[int]
    others: Sequence[int]
    weights: Literal["f32", "bf16"] = "f32"

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(self.blocks) + sum(self.others)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the model."""
        return 2 if self.weights == "bf16" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes that AdamW keeps for a weight: two f32 moments, and an f32 master for a bf16 weight."""
        return 12 if self.weights == "bf16" else 8


def make_plan(config: Config) -> Plan:
    """The plan of a configuration."""
    shape = config.shape
    others = [shape.hidden] + [shape.vocab * shape.hidden] * (1 if shape.tied else 2)
    trained = Trained([shape.block_parameters] * shape.layers, others, config.train.weights)
    activations = activations_of(config) + widened(config)
    tokens = config.tokens_per_step
    memory = memory_of(config, trained, activations)
    return Plan(shape.parameters, tokens, tokens * config.train.steps, memory, sent(config, trained))


def memory_of(config: RunSettings, trained: Trained, activations: int, frozen: int = 0) -> Memory:
    """The memory of a worker; `activations` and `frozen` (weights that are not trained) are in bytes."""
    order = make_order(config.train.slots, config.workers)
    accumulate = config.group.wire == "f32"
    rows = max(order.rows(rank, accumulate) for rank in range(config.workers))
    on_host = not computes_on_gpu(config.device)
    weights, moments = trained.weight_bytes * trained.parameters, trained.state_bytes * saved(config, trained)
    transport = TRANSPORTS[config.group.transport]
    return Memory(
        program=PROGRAM_BYTES + SHARED_BYTES // config.workers if on_host else 0,
        weights=weights + frozen,
        gradients=4 * trained.parameters * rows,
        optimizer=trained.state_bytes * owned(config, trained),
        activations=round((ALLOCATOR_RATIO if on_host else GPU_ALLOCATOR_RATIO) * activations),
        exchange=transport.buffers(4 * max((*trained.blocks, *trained.others))) if config.workers > 1 else 0,
        snapshot=moments if on_host else 0,
        weights_snapshot=weights if on_host else 0,
        on_host=0 if on_host else pinned(weights) + pinned(moments),
    )


def pinned(size: int) -> int:
    """The bytes that torch allocates for a buffer in pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def cost_of_a_loss(config: C, make: Callable[[C], Plan] | None = None) -> str:
    """What the loss of one worker costs with these settings, in one sentence; `make` makes their plan."""
    zero, every = config.zero.resolve(config.group.transport), config.checkpoint.every
    how_far = f"up to {every:,} steps" if every else "or to the first step"
    back = f"all go back to the newest checkpoint, {how_far}"
    if not TRANSPORTS[config.group.transport].goes_on:
        return f"ends the run over {config.group.transport}; the same command resumes: {back}"
    if config.workers == 1:
        return f"the worker is started again: {back}"
    if zero == "off":
        return "no committed step: every worker has all of the state"
    if config.zero.replicas > 1:
        return "no committed step, unless two neighbours are lost at once: each part of the state is on two workers"
    text = f"{back}; --zero.replicas 2 would lose none"
    if make is None:
        return text
    replicas = config.model_copy(update={"zero": config.zero.model_copy(update={"replicas": 2})})
    more = make(replicas).memory.total - make(config).memory.total
    return f"{text}, for {more / 1e6:,.1f} MB more a worker"


def widened(config: Config) -> int:
    """Bytes of the largest bf16 weight as f32: a CPU computes with one such copy at a time."""
    if config.train.weights == "f32" or computes_on_gpu(config.device):
        return 0
    return 4 * config.shape.hidden * max(config.shape.vocab, config.shape.intermediate)


def activations_of(config: Config) -> int:
    """The most bytes of activations: as compiled blocks keep them on a GPU, or as autograd does elsewhere."""
    shape, windows, train = config.shape, config.train.micro_batch, config.train
    if not computes_on_gpu(config.device) or train.precision == "f32" or train.compile is False:
        return live_activations(shape, windows)
    tokens = windows * shape.context
    # In numbers of bf16: residuals, norms, queries, keys, values, attention with its log-sum-exp; gate, up, product.
    kept = 6 * shape.hidden + 2 * shape.kv_heads * shape.head_dim + 2 * shape.heads + 3 * shape.intermediate
    if train.activation_memory < 1:
        cheap = kept - 2 * shape.hidden - shape.intermediate
        kept = cheap if train.activation_memory >= CHEAP else min(cheap, round(train.activation_memory * kept))
    logits = 2 * min(LOGITS_BYTES, 2 * tokens * shape.vocab)  # and as much again for other tensors of that moment
    return 2 * tokens * shape.layers * kept + logits


def live_activations(shape: Shape, windows: int) -> int:
    """Bytes of f32 tensors alive when backward begins, which is the peak.

    A block keeps, per token: for each norm its input, the normalised input and the product with its weight; queries,
    keys and values of all heads, attention's output and its log-sum-exp; and of the SwiGLU gate, its silu, up and their
    product. The final norm keeps the same three; the log-probabilities exist with two gradients of the same size.
    """
    block = 10 * shape.hidden + 4 * shape.intermediate + shape.heads + 2
    end = 3 * shape.vocab + 3 * shape.hidden + 1
    return 4 * windows * shape.context * (shape.layers * block + end)


def saved(config: RunSettings, trained: Trained) -> int:
    """The number of parameters whose moments a rank saves, for the rank that saves most."""
    policy = "even" if config.zero.policy == "off" else config.zero.policy
    zero = config.zero.model_copy(update={"policy": policy, "replicas": 1})
    return owned(config.model_copy(update={"zero": zero}), trained)


def owned(config: RunSettings, trained: Trained) -> int:
    """The number of parameters whose moments a rank holds, with replicas, for the rank that holds most."""
    workers, policy = config.workers, config.zero.policy
    replicas = min(config.zero.replicas, workers)
    if policy == "off":
        return trained.parameters
    if policy == "even":
        return -(-trained.parameters * replicas // workers)
    assert policy != "auto", "a plan is made of a configuration without open choices"
    own = UnitOwners.of(policy, trained.blocks, trained.others, workers).parameters
    return max(sum(own[rank - back] for back in range(replicas)) for rank in range(workers))


def sent(config: RunSettings, trained: Trained) -> int:
    """Bytes that a rank sends in a step: gradients, and with ZeRO the weights that it updated."""
    workers, zero = config.workers, config.zero
    if workers == 1:
        return 0
    transport = TRANSPORTS[config.group.transport]
    rounded = config.group.wire == "bf16" and transport.rounds_on_wire
    traffic = Traffic(
        workers,
        rows=len(make_order(config.train.slots, workers).leaves) / workers,
        gradient=trained.parameters * (2 if rounded else 4),
        whole_sum=zero.policy == "off" or zero.replicas > 1,
        weights=0 if zero.policy == "off" else trained.parameters * trained.weight_bytes,
    )
    return round(transport.bytes_sent(traffic))


def changes(config: C, make: Callable[[C], Plan]) -> list[tuple[dict[str, Any], Plan]]:
    """Other settings worth a look, each with its plan."""
    return [(keys, make(_with(config, keys))) for keys in _other_settings(config)]


def _other_settings(config: RunSettings) -> Iterator[dict[str, Any]]:
    slots, micro_batch, workers = config.train.slots, config.train.micro_batch, config.workers
    for count in sorted(count for count in {workers, 1, 2, 4, 8} if count <= slots):
        for policy in ("off", "even") if count > 1 else ("off",):
            if (count, policy) != (workers, config.zero.policy):
                yield {"workers": count, "zero.policy": policy, "zero.replicas": 1}
    if workers > 1 and (config.zero.policy, config.zero.replicas) != ("even", 2):
        yield {"zero.policy": "even", "zero.replicas": 2}
    if micro_batch % 2 == 0 and 2 * slots <= MOST_SLOTS:
        yield {"train.micro_batch": micro_batch // 2, "train.slots": 2 * slots}
    if isinstance(config, Config):
        yield {"train.weights": "f32" if config.train.weights == "bf16" else "bf16"}
    for name, transport in TRANSPORTS.items() if workers > 1 else ():
        if transport.connects and not transport.joins_server and name != config.group.transport:
            yield {"group.transport": name}
    if workers > 1 and config.group.wire == "f32" and TRANSPORTS[config.group.transport].rounds_on_wire:
        yield {"group.wire": "bf16"}


def _with(config: C, keys: dict[str, Any]) -> C:
    """The configuration with other values; the transport changes where the number of workers requires it."""
    values = config.model_dump()
    values["min_workers"] = min(config.min_workers, keys.get("workers", config.workers))
    if keys.get("workers", 1) > 1 and not TRANSPORTS[config.group.transport].connects:
        values["group"]["transport"] = "auto"
    if "group.transport" in keys:
        values["group"]["server"] = ""
    return validate(merge(values, keys, type(config)), type(config)).on_this_machine()
