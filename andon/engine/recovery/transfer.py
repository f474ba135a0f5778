"""Sends weights and optimizer state from the members of a run that hold them to those that do not.

The `Recovery` lists the transfers (`andon.engine.recovery.commit`): chunks of the arena, each from one of its holders.
All members take part in each transfer, over the group of the new generation.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from andon.engine.parallel import DataParallel
from andon.engine.recovery.commit import Recovery
from andon.optim.base import UpdateRule
from andon.transport.base import Group


@torch.no_grad()
def share_state(model: DataParallel, recovery: Recovery, before: UpdateRule, rule: UpdateRule) -> None:
    """Send weights and progress to the ranks that lack them; move the optimizer state from the rule of the
    last generation to that of the next one."""
    group, arena = model.membership.group, model.arena
    keeps = rule is before and group.rank not in recovery.new
    if rule is not before:
        for lo, hi in before.parts:
            for kind, flat in rule.state.items():
                put(rule, flat, lo, take(before, before.state[kind], lo, hi))
    for lo, hi, source in recovery.transfers:
        group.broadcast(arena.buffer[lo:hi], source)
        for kind, flat in rule.state.items():
            whole = arena.zeros(hi - lo)
            if group.rank == source:
                whole.copy_(take(before, before.state[kind], lo, hi))
            group.broadcast(whole, source)
            if not keeps:
                put(rule, flat, lo, whole)
    if recovery.new:
        source = next(rank for rank in range(group.world_size) if rank not in recovery.new)
        model.progress.restore(group.all_gather_json(model.progress.fields())[source])


@torch.no_grad()
def share_common_buffers(model: DataParallel, recovery: Recovery) -> None:
    """Send the module's buffers from one rank to all.

    Forward may have created buffers, or changed their shape, on some ranks only: then they are caches, and not sent."""
    group, buffers = model.membership.group, dict(sorted(model.module.named_buffers()))
    source = next((rank for rank in range(group.world_size) if rank not in recovery.new), 0)
    kinds = {name: [list(buffer.shape), str(buffer.dtype)] for name, buffer in buffers.items()}
    of_ranks = group.all_gather_json(kinds)
    common = [name for name, kind in kinds.items() if all(other.get(name) == kind for other in of_ranks)]
    share_buffers(group, [buffers[name] for name in common], source)


def share_buffers(group: Group, buffers: Iterable[Tensor], source: int) -> None:
    """Give all ranks the values that buffers of any type have on one rank."""
    for buffer in buffers:
        flat = buffer.detach().resolve_conj().contiguous().view(-1)
        group.broadcast(flat.view(torch.uint8), source)
        buffer.copy_(flat.view(buffer.shape))


def take(rule: UpdateRule, flat: Tensor, lo: int, hi: int) -> Tensor:
    """A rule's state of elements [lo, hi) of the arena, which are in one of its parts."""
    offset = 0
    for start, stop in rule.parts:
        if start <= lo and hi <= stop:
            return flat[offset + lo - start : offset + hi - start]
        offset += stop - start
    raise AssertionError(f"[{lo}, {hi}) is not in {rule.parts}")


def put(rule: UpdateRule, flat: Tensor, lo: int, values: Tensor) -> None:
    """Set a rule's state of the elements from `lo` on; those that it does not have are left out."""
    offset = 0
    for start, stop in rule.parts:
        first, last = max(start, lo), min(stop, lo + len(values))
        if first < last:
            flat[offset + first - start : offset + last - start] = values[first - lo : last - lo]
        offset += stop - start
