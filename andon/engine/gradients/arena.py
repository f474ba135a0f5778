"""The arena: all weights in one flat buffer, all gradients in others; parameters are views into them.

A *unit* is what is exchanged as one: each transformer block, the embedding, the final norm, the LM head. It is a
contiguous range; units are in the order in which backward finishes them. Units start on a *cell* (1,024 elements, the
grain of norms, fingerprints and shards), tensors on 64 bytes of f32. Inside a unit the matrices come first, so that
weight decay, which excludes vectors, has two ranges per unit and not one per parameter. The gaps between tensors are
always zero.

Weights are f32 or bf16, as the model's parameters are; gradients are always f32. The layout counts elements and is the
same for both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CELL = 1024
ALIGN = 16  # float32 elements in 64 bytes
SMALL_UNIT = 1 << 18  # elements below which a module is exchanged together with the next one


@dataclass(frozen=True)
class Slice:
    """Where a parameter is in the arena."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True)
class Unit:
    """A contiguous range of the arena: matrices in [start, vectors), the rest in [vectors, stop)."""

    name: str
    start: int
    vectors: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter, including the padding after it; their sum is the size of the unit."""
        ends = [*(each.start for each in self.slices[1:]), self.stop]
        return tuple(end - each.start for each, end in zip(self.slices, ends, strict=True))


class Layout:
    """Which parameter is where; the same for weights, gradients and moments."""

    def __init__(self, units: Iterable[tuple[str, Sequence[tuple[str, Tensor]]]]) -> None:
        self.units: list[Unit] = []
        self.size = 0
        for name, parameters in units:
            self._place(name, parameters)
        self.slices = {piece.name: piece for unit in self.units for piece in unit.slices}

    def _place(self, name: str, parameters: Sequence[tuple[str, Tensor]]) -> None:
        start = at = self.size
        pieces = []
        for key, value in sorted(parameters, key=lambda named: named[1].dim() <= 1):  # matrices first
            pieces.append(Slice(key, at, value.shape))
            at += round_up(value.numel(), ALIGN)
        vectors = next((piece.start for piece in pieces if len(piece.shape) <= 1), at)
        self.size = round_up(at, CELL)
        self.units.append(Unit(name, start, vectors, self.size, tuple(pieces)))

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The view of a parameter in a flat buffer."""
        piece = self.slices[name]
        return flat[piece.start : piece.stop].view(piece.shape)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """All parameters' views in a flat buffer, by name."""
        return {name: self.view(flat, name) for name in self.slices}

    def unit_of(self, name: str) -> str:
        """The name of the unit that holds a parameter."""
        return next(unit.name for unit in self.units if any(piece.name == name for piece in unit.slices))


NamedUnit = tuple[str, list[tuple[str, Tensor]]]
"""A unit's name, and its parameters by name."""


def backward_order(model: nn.Module) -> list[NamedUnit]:
    """Units by rule: each child of the longest module list is a block; the modules registered after the blocks come
    first, then the blocks from last to first, then the modules before them. In a model without blocks, small modules
    that follow each other are one unit. Frozen parameters are left out."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    prefix, blocks = max(lists, key=lambda found: len(found[1]), default=("", nn.ModuleList()))
    inside: dict[str, list[tuple[str, Tensor]]] = {f"{prefix}.{index}.": [] for index in range(len(blocks))}
    before: list[NamedUnit] = []
    after: list[NamedUnit] = []
    seen_blocks = False
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        block = next((start for start in inside if name.startswith(start)), None)
        if block:
            seen_blocks = True
            inside[block].append((name, parameter))
        else:
            unit = name.rpartition(".")[0] or name
            side = after if seen_blocks else before
            if not side or side[-1][0] != unit:
                side.append((unit, []))
            side[-1][1].append((name, parameter))
    middle = [(start.rstrip("."), found) for start, found in inside.items() if found]
    return after[::-1] + middle[::-1] + before[::-1] if len(blocks) else _joined(before[::-1])


def _joined(units: list[NamedUnit]) -> list[NamedUnit]:
    """Join small units until they have `SMALL_UNIT` elements: every exchange has a fixed cost."""
    joined: list[NamedUnit] = []
    size = SMALL_UNIT
    for name, parameters in units:
        if size < SMALL_UNIT:
            last, found = joined.pop()
            joined.append((f"{last.partition(' to ')[0]} to {name}", found + parameters))
        else:
            joined.append((name, parameters))
            size = 0
        size += sum(value.numel() for _, value in parameters)
    return joined


class Arena:
    """A model's weights in one buffer. `allocate` chooses its memory (shared memory, a GPU).

    Reading `weights` or `parameters` waits for updated weights that are still being gathered."""

    def __init__(self, model: nn.Module, allocate: Callable[[int], Tensor] | None = None) -> None:
        self.layout = Layout(backward_order(model))
        self.wait_for_weights: Callable[[], None] = lambda: None
        parameters = dict(model.named_parameters())
        self._parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._frozen = {name: value for name, value in parameters.items() if not value.requires_grad}
        assert self._parameters.keys() == self.layout.slices.keys()
        self.device = next(iter(self._parameters.values())).device
        self._dtype = _common_dtype(self._parameters)
        for parameter in self._parameters.values():
            parameter.grad_dtype = torch.float32
        self.move(allocate)

    def move(self, allocate: Callable[[int], Tensor] | None = None) -> None:
        """Move the weights to the memory of a new group."""
        buffer = (allocate or self.zeros)(self.layout.size * self._dtype.itemsize // 4).view(self._dtype)
        for name, parameter in self._parameters.items():
            view = self.layout.view(buffer, name)
            view.copy_(parameter.data)
            parameter.data, parameter.grad = view, None
            set_grad_out(parameter, None)
        self.buffer = buffer
        """All weights, without waiting: parts of it may still be gathered."""
        self._addresses = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}

    def check_module(self) -> None:
        """Refuse a module that was moved, converted, frozen or unfrozen since the arena was made."""
        frozen = [name for name, value in self._parameters.items() if not value.requires_grad]
        if changed := frozen + [name for name, value in self._frozen.items() if value.requires_grad]:
            how = "frozen" if frozen else "unfrozen"
            raise ValueError(f"{changed[0]} was {how} after DataParallel was made: freeze and unfreeze before that")
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                raise ValueError(
                    f"{name} was moved or converted after DataParallel was made: call .to(), .bfloat16() and the like "
                    "before that, and change weights in place"
                )

    @property
    def weights(self) -> Tensor:
        """All weights in one flat tensor."""
        self.wait_for_weights()
        return self.buffer

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name; their data are views into the weights."""
        self.wait_for_weights()
        return self._parameters

    def zeros(self, size: int) -> Tensor:
        """A flat f32 buffer on the device of the weights."""
        return torch.zeros(size, dtype=torch.float32, device=self.device)


def _common_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of all parameters; refuses several dtypes, and those that AdamW cannot train."""
    by_dtype = {parameter.dtype: name for name, parameter in parameters.items()}
    if len(by_dtype) > 1 or not by_dtype.keys() <= {torch.float32, torch.bfloat16}:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        raise ValueError(f"{found}; all trained parameters must be float32, or all bfloat16")
    return next(iter(by_dtype))


def set_grad_out(parameter: nn.Parameter, out: Tensor | None) -> None:
    """Set where a layer may write the gradient of a parameter (`andon.model.grad_out`); None: into new memory."""
    parameter.grad_out = out  # type: ignore[attr-defined]


def round_up(count: int, grain: int) -> int:
    """The next multiple of `grain`."""
    return -(-count // grain) * grain
