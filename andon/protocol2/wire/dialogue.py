"""The dialogues of wire version 2: which gradient comes next (pure).

A *part* is a gradient that every worker sends before it waits for the mean. In the dialogue of fine-tuning a step has
one part, the whole vector. In that of pretraining it has the blocks from the last to the first and then the components:
0 LM head, 1 final norm, 2 embedding. There is no version field, so the first part that the workers send decides which
dialogue it is. Between Andon's own peers, a part above 100 MB is sent in pieces, and each piece is averaged separately
(`andon.protocol2.wire.extension`).
"""

from dataclasses import dataclass, replace
from typing import Final

from andon.protocol2.wire import messages
from andon.protocol2.wire.extension import AveragedPiece, GradientPiece
from andon.protocol2.wire.heads import Head
from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import Floats, Message

WHOLE: Final = messages.GradientPayload.tag
BLOCK: Final = messages.BlockGradientPayload.tag
COMPONENT: Final = messages.NonBlockGradientPayload.tag
COMPONENTS: Final = ("LM head", "final norm", "embedding")


@dataclass(frozen=True)
class Part:
    """Which part of a gradient it is, and its shape. `tag` is that of its message."""

    tag: int
    step: int
    index: int = 0
    """The block or the component."""
    blocks: int = 0
    sizes: tuple[int, ...] = ()
    start: int = 0
    """For a piece: where its floats begin in the vector."""
    count: int = 0
    length: int = 0
    """Floats of the vector; `count` is smaller only for a piece."""

    @property
    def name(self) -> str:
        """How errors name the part."""
        if self.tag == WHOLE:
            return "whole vector"
        return f"block {self.index}" if self.tag == BLOCK else f"component {self.index}"


def part_of(head: Head, worker_id: int) -> Part:
    """The part in a message; `ProtocolError` if it is not a gradient, or contradicts itself."""
    values, count = head.values, head.count
    if head.message is messages.GradientPayload:
        part = Part(WHOLE, values[0], count=count, length=count)
    elif head.message is messages.BlockGradientPayload:
        part = Part(BLOCK, values[0], values[2], values[3], values[4], count=count, length=count)
    elif head.message is messages.NonBlockGradientPayload:
        part = Part(COMPONENT, values[0], values[2], count=count, length=count)
    elif head.message is GradientPiece:
        step, _, tag, index, blocks, sizes, start, length = values
        part = Part(tag, step, index, blocks, sizes, start, count, length)
        inside = 0 < count < length and start + count <= length
        if part.tag not in (WHOLE, BLOCK, COMPONENT) or not inside:
            raise ProtocolError(f"a piece of {count:,} floats at {part.start:,} of {part.length:,}")
    else:
        raise ProtocolError(f"{head.message.__name__} where a gradient was expected")
    if values[1] != worker_id:
        raise ProtocolError(f"it calls itself worker {values[1]}")
    if part.tag == COMPONENT and part.index >= len(COMPONENTS):
        raise ProtocolError(f"component {part.index} where 0, 1 or 2 was expected")
    if part.tag == BLOCK and part.index >= part.blocks:
        raise ProtocolError(f"block {part.index} of {part.blocks}")
    if part.tag == BLOCK and sum(part.sizes) != part.length:
        raise ProtocolError(f"sizes for {sum(part.sizes):,} of {part.length:,} floats")
    return part


def answer(part: Part, mean: Floats, loss: float) -> Message:
    """The message with the mean of a part."""
    if part.count < part.length:
        return AveragedPiece(part.step, part.tag, part.index, part.start, mean, loss)
    if part.tag == WHOLE:
        return messages.AveragedGradient(part.step, mean, loss)
    if part.tag == BLOCK:
        return messages.AveragedBlockGradient(part.step, part.index, part.sizes, mean)
    return messages.AveragedNonBlockGradient(part.step, part.index, mean)


class Dialogue:
    """Follows a session: which part may come now. With `step`, the first step of shard assignments, whole vectors
    are expected."""

    def __init__(self, step: int | None = None) -> None:
        self._next = None if step is None else Part(WHOLE, step)
        self._blocks = 0
        self.between_steps = True
        """Whether the next part is the first of a step."""

    @property
    def tag(self) -> int | None:
        """The message tag of the next part, once it is known."""
        return self._next.tag if self._next else None

    @property
    def name(self) -> str:
        """How errors name the next part."""
        return f"{self._next.name} of step {self._next.step}" if self._next else "the first gradient"

    def check(self, part: Part) -> None:
        """Refuse a part that may not come now."""
        if self._next is None:
            first_block = part.tag == BLOCK and part.index == part.blocks - 1
            if part.start or not (part.tag == WHOLE or first_block or (part.tag == COMPONENT and part.index == 0)):
                raise ProtocolError(f"{part.name} cannot begin a step")
            return
        if part.tag != self._next.tag or part.index != self._next.index:
            raise ProtocolError(f"{part.name} where {self._next.name} was expected")
        if part.step != self._next.step:
            raise ProtocolError(f"step {part.step} where {self._next.step} was expected")
        if part.start != self._next.start:
            raise ProtocolError(f"a piece at {part.start:,} where {self._next.start:,} was expected")
        if part.tag == BLOCK and self._blocks and part.blocks != self._blocks:
            raise ProtocolError(f"a block of {part.blocks} where the step has {self._blocks}")

    def advance(self, part: Part) -> None:
        """Expect the next part, because the mean of this one is being sent."""
        self._next, self.between_steps = self._after(part)

    def _after(self, part: Part) -> tuple[Part, bool]:
        end = part.start + part.count
        if end < part.length:
            return replace(part, start=end), False
        step = part.step + 1
        if part.tag == WHOLE:
            return Part(WHOLE, step), True
        if part.tag == BLOCK:
            self._blocks = part.blocks
            return (Part(BLOCK, part.step, part.index - 1) if part.index else Part(COMPONENT, part.step)), False
        if part.index + 1 < len(COMPONENTS):
            return Part(COMPONENT, part.step, part.index + 1), False
        blocks, self._blocks = self._blocks, 0
        return (Part(BLOCK, step, blocks - 1) if blocks else Part(COMPONENT, step)), True
