"""The end of a step: reduce, compare, verdict, update, gather, in this order and nowhere else.

No weight changes before every rank has agreed on the verdict, and every rank comes to the same one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from andon.engine.exchange import Passenger
from andon.engine.parallel import DataParallel
from andon.integrity.fingerprint import Fingerprints, compare_replicas
from andon.integrity.halt import JidokaHalt
from andon.optim.adamw import AdamWRule, AdamWSettings
from andon.optim.base import MakeRule
from andon.optim.sharding import Ownership, Zero


@dataclass(frozen=True)
class Totals:
    """What a step came to, the same on every rank."""

    loss: float
    """The mean over all tokens of the step."""
    tokens: int
    norm: float
    """Of the mean gradient, before clipping."""
    bad_units: tuple[tuple[int, str], ...] = ()
    """(rank, unit) of every contribution that was not finite."""

    @property
    def sound(self) -> bool:
        """Whether the step may change the weights."""
        return not self.bad_units and math.isfinite(self.norm) and math.isfinite(self.loss)

    @property
    def complaint(self) -> str:
        """Why a step is not sound, in one line."""
        if self.bad_units:
            return "; ".join(f"rank {rank} computed a bad gradient of {unit}" for rank, unit in self.bad_units)
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return f"every contribution is finite, but the norm of their sum is {self.norm}"


Judge = Callable[[int, Totals], bool]
"""(step, totals) → whether to update; raises `JidokaHalt` to stop the line. The same answer on every rank."""


def halt_unless_sound(step: int, totals: Totals) -> bool:
    """Stop the line on a loss or gradient that is not finite (F-DP-003)."""
    if not totals.sound:
        raise JidokaHalt(step, totals.complaint)
    return True


class Optimizer:
    """Ends the steps of a `DataParallel` model: exchange, checks, update; ZeRO-1 shares out its state."""

    def __init__(self, model: DataParallel, make_rule: MakeRule, lr: float, zero: Zero | None = None) -> None:
        self.model, self.lr = model, lr
        membership, arena = model.membership, model.arena
        self.ownership = Ownership.of(arena.layout, membership.world_size, zero or Zero())
        model.exchange.own(self.ownership)
        self.owned_parts = self.ownership.parts(membership.rank)
        self.rule = make_rule(arena, self.owned_parts + self.ownership.replica_parts(membership.rank))
        self.steps = 0
        """Steps that were ended, skipped ones included."""
        self.facts = ""
        """What the ranks must agree on besides their bits: configuration, data."""
        self.judge: Judge = halt_unless_sound
        self.passengers: list[Passenger] = []
        self._fingerprints = Fingerprints(arena, self.compared_state, membership)

    def compared_state(self) -> dict[str, Tensor]:
        """The flat buffers that are equal on every rank: the weights, and without ZeRO the optimizer's state."""
        return {"weights": self.model.arena.weights, **({} if self.ownership.sharded else self.rule.state)}

    def step(self, clip: float = 0.0) -> Totals:
        """End a step: agree with all ranks, halt if something is wrong, and only then update.

        `clip` is the largest norm of the mean gradient; 0: it is not clipped."""
        model, step = self.model, self.steps + 1
        with model.phases("fingerprint"):  # while the last units are exchanged
            fingerprints = self._take_fingerprints(f"{step} {self.lr} {clip} {self.facts}")
        with model.phases("exchange"):
            totals = self._reduce()
            self._compare(step, fingerprints)
        if self.judge(step, totals):
            with model.phases("optimizer"):
                self._update(totals, clip)
                model.gather.begin(self.ownership)
        self.steps = step
        return totals

    def _take_fingerprints(self, facts: str) -> bytes:
        return self._fingerprints.take(facts) if self.model.exchange.checks else b""

    def _reduce(self) -> Totals:
        """Wait for the exchange and agree on what the step came to."""
        exchange, gradients = self.model.exchange, self.model.gradients
        slots = gradients.end_step()
        bad = exchange.wait()
        losses = [(each.slot, each.loss.item(), each.count) for each in slots]
        everyone = exchange.tell([bad, losses, [each.status() for each in self.passengers]])
        records = sorted(tuple(record) for _, of_rank, _ in everyone for record in of_rank)
        tokens = sum(count for _, _, count in records)
        norm = exchange.norm() / max(1, tokens)
        bad_units = tuple((rank, unit) for rank, (units, *_) in enumerate(everyone) for unit in units)
        if not math.isfinite(norm):
            bad_units = exchange.blame(bad_units, gradients.rows)
        for index, passenger in enumerate(self.passengers):
            passenger.receive([statuses[index] for *_, statuses in everyone])
        return Totals(
            loss=sum(loss for _, loss, _ in records) / max(1, tokens), tokens=tokens, norm=norm, bad_units=bad_units
        )

    def _compare(self, step: int, fingerprints: bytes) -> None:
        """Halt on every rank if any rank holds other bits than it should (C-DDP-001)."""
        if not self.model.exchange.checks:
            return
        self._fingerprints.compare(step, fingerprints)
        if self.ownership.replicas > 1:
            owned = sum(stop - start for start, stop in self.owned_parts)
            state = self.rule.state.values()
            compare_replicas(
                self.model.membership.group, step, [flat[:owned] for flat in state], [flat[owned:] for flat in state]
            )

    def _update(self, totals: Totals, clip: float) -> None:
        """The update rule on the mean gradient, clipped to a global norm."""
        scale = totals.tokens * max(1.0, totals.norm / clip if clip else 1.0)
        self.rule.update(self.model.gradients.rows[0], scale, self.lr)


class AdamW(Optimizer):
    """AdamW with weight decay on matrices only; `zero` shares out its state, by default an even slice to each."""

    def __init__(
        self, model: DataParallel, lr: float, settings: AdamWSettings | None = None, zero: Zero | None = None
    ) -> None:
        super().__init__(model, partial(AdamWRule, settings=settings or AdamWSettings()), lr, zero)
