"""The end of a step: reduce, compare, verdict, update, gather, in this order and nowhere else.

No weight changes before every rank has agreed on the verdict, and every rank comes to the same one. The verdict comes
out of the step's last exchange, that of the norms, so that a worker which is told of it late can still update
(`engine.recovery.commit`). One worker on a GPU, which has nobody to agree with, launches the update ahead of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from andon.engine.gradients.exchange import Passenger
from andon.engine.membership import Membership
from andon.engine.parallel import DataParallel
from andon.engine.reading import Reading
from andon.engine.recovery.commit import Commit, Recovery, Standing, plan_recovery
from andon.engine.recovery.transfer import share_state
from andon.errors import EXIT_STOPPED
from andon.integrity.fingerprint import Fingerprints, compare_replicas
from andon.integrity.halt import JidokaHalt
from andon.optim.adamw import AdamWRule
from andon.optim.base import Range, UpdateRule
from andon.optim.shard_map import Policy
from andon.optim.sharding import Ownership, Zero
from andon.transport.base import TRANSPORTS, GroupError


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
    committed: bool = True
    """False: a worker was lost, and `model.steps` gives the step again."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Totals:
        """From JSON."""
        return cls(**{**fields, "bad_units": tuple((rank, unit) for rank, unit in fields["bad_units"])})

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


class Vote:
    """Whether any rank wants something after this step, such as to stop; all learn it with the step's exchange."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.wanted, self.agreed = wanted, False

    def status(self) -> bool:
        return self.wanted()

    def receive(self, statuses: Sequence[bool]) -> None:
        self.agreed = any(statuses)


class Optimizer(torch.optim.Optimizer):
    """Ends the steps of a `DataParallel` model: exchange, checks, update; ZeRO-1 shares out its state.

    All trained parameters are one group, whose `lr` torch's schedulers change. A subclass names the rule that updates
    the weights. On unequal machines (`group.mixed`) every weight is updated by one rank only, and sent to the others.
    """

    rule_type: ClassVar[type[UpdateRule]]

    def __init__(self, model: DataParallel, options: Mapping[str, Any], zero: Zero | Policy = "even") -> None:
        super().__init__(list(model.arena.parameters.values()), dict(options))
        self.model, self.progress = model, model.progress
        self.zero = zero if isinstance(zero, Zero) else Zero(zero)
        self.commit = Commit()
        self.is_new = False
        """Whether weights and state have yet to come from the other members of the run."""
        self.goes_on = False
        """Whether the loss of a worker is for `model.steps` to deal with, and no error."""
        self.failure: GroupError | None = None
        """How the group has failed, until `model.steps` has dealt with it."""
        self.before_redo: Callable[[], None] = lambda: None
        """Called when the group has failed in a step: what follows on the step is to be undone."""
        model.optimizer = self
        self.rule = self.rule_type(model.arena, *self._share_out())
        self.facts = ""
        """What the ranks must agree on besides their bits: configuration, data."""
        self.judge: Judge = halt_unless_sound
        self.stop = Vote(lambda: model.membership.group.stop_wanted())
        self.change = Vote(lambda: model.membership.group.change_wanted())
        """Whether the members of the run change after this step."""
        self.shrink = Vote(lambda: model.membership.group.shrink_wanted())
        """Whether some of them leave then, with their parts of the state."""
        self.samples: Callable[[], list[int]] = list
        """Checksums of the samples of each slot of the step, for the run's ledger."""
        self.on_halt: Callable[[JidokaHalt], None] = _nothing
        """Called with a halt before it is raised; the same on every rank."""
        model.before_step = self._leave_if_agreed
        for prefix, module in model.module.named_modules():
            module.register_load_state_dict_post_hook(partial(self._weights_loaded, prefix))
        self.checkpoints: object = None
        """What `andon.save` and `andon.load` keep for it."""
        self.passengers: list[Passenger] = [self.stop, self.change, self.shrink]
        self._fingerprints = Fingerprints(model.arena, self.compared_state)
        self._clip = 0.0

    def go_on_from(self, step: int) -> None:
        """Weights, state and progress are those after a step: they were loaded, or are the first ones."""
        self.rule.updates = self.progress.updates
        self.commit.go_back(step)
        self.is_new = False

    def record(self) -> dict[str, Any]:
        """What the run's ledger says of the last step."""
        membership = self.model.membership
        numbers = {"step": self.progress.step, "generation": membership.generation}
        return {**numbers, "shares": list(membership.order.bounds), "samples": self.samples()}

    def _share_out(self) -> tuple[list[Range], list[Range]]:
        """Decide who owns what in this generation; the parts whose state this rank keeps, and those it updates."""
        membership, arena = self.model.membership, self.model.arena
        self.ownership = Ownership.of(arena.layout, membership.world_size, self.zero)
        self.model.exchange.own(self.ownership)
        alone = not TRANSPORTS[membership.group.transport].connects
        self._updates_ahead = alone and arena.device.type == "cuda" and self.rule_type.gated
        """One worker on a GPU: the update is launched before the verdict is read. The GPU comes to the same verdict,
        and leaves the weights alone if it is bad; so the GPU has work while the host reads. Not where a group can fail
        before the step is committed: the update would be made again with the step."""
        self._updaters = self.ownership
        if membership.group.mixed and not self.ownership.sharded:
            self._updaters = Ownership.of(arena.layout, membership.world_size, Zero("even"))
        self.owned_parts = self.ownership.parts(membership.rank)
        parts = self.owned_parts + self.ownership.replica_parts(membership.rank)
        updated = parts if self._updaters is self.ownership else self._updaters.parts(membership.rank)
        return parts, updated

    def enter(self, membership: Membership, recorded: int) -> Recovery:
        """Take part in another generation, with the state that its members have between them; all call it together.

        `recorded` is the last step that the run's ledger has. If the state is lost, a checkpoint has to be loaded."""
        group = membership.group
        standing = self.commit.standing(() if self.is_new else self.rule.updated, recorded)
        standings = group.all_gather_bytes(json.dumps(standing.fields()).encode())
        recovery = plan_recovery([Standing.of(json.loads(each)) for each in standings], self.model.arena.layout.size)
        if group.rank in recovery.late:
            totals, updated = recovery.verdict
            self._conclude(Totals.of(totals), updated)
        self.commit.catch_up(recovery, group.rank, self.record())
        self.model.enter(membership)
        rule, wanted = self.rule, self._share_out()
        if recovery.lost or wanted != (rule.parts, rule.updated):
            rule = self.rule_type(self.model.arena, *wanted)
            rule.keeps_gradients = self.rule.keeps_gradients
        if not recovery.lost:
            share_state(self.model, recovery, self.rule, rule)
        self.rule, self.is_new = rule, recovery.lost
        rule.updates = self.progress.updates
        if not recovery.lost:
            prints = group.all_gather_bytes(self._fingerprints.take(f"{self.progress} {self.facts}"))
            self._fingerprints.compare(self.progress.step, prints)
        return recovery

    def _leave_if_agreed(self) -> None:
        """Before a step: if a stop was asked for, end the process; `andon.load` and `andon.save` see to it first."""
        if self.stop.agreed:
            raise SystemExit(EXIT_STOPPED)

    def _weights_loaded(self, prefix: str, module: nn.Module, _: object) -> None:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        self.rule.weights_changed({f"{prefix}.{name}" if prefix else name for name in names})

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state is shared out among the ranks."""
        raise RuntimeError("the optimizer's state is shared out among the ranks: save it with andon.save")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the state is shared out among the ranks."""
        raise RuntimeError("the optimizer's state is shared out among the ranks: load it with andon.load")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The one group of all trained parameters."""
        # torch's own loads its compiler: 2 s and 70 MB a worker.
        if self.param_groups:
            raise ValueError("the trained parameters are one group, which has all of them already")
        self.param_groups.append({**self.defaults, **param_group})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: every slot writes its gradients anew."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the parameters: `lr` and the rest."""
        return {key: value for key, value in self.param_groups[0].items() if key != "params"}

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.param_groups[0]["lr"] = value

    def compared_state(self) -> dict[str, Tensor]:
        """The flat buffers that are equal on every rank: the weights, and without ZeRO the optimizer's state."""
        return {"weights": self.model.arena.weights, **({} if self.ownership.sharded else self.rule.state)}

    def step(self, clip: float = 0.0) -> Totals:  # type: ignore[override]
        """End a step: agree with all ranks, halt if something is wrong, and only then update.

        `clip` is the largest norm of the mean gradient; 0: it is not clipped."""
        if not isinstance(clip, int | float):
            raise TypeError("step takes no closure: `clip` is the largest norm of the gradient")
        if self.failure:
            raise self.failure
        try:
            return self._step(clip)
        except JidokaHalt as halt:
            self.on_halt(halt)
            raise
        except GroupError as failure:
            if not self.goes_on:
                raise
            self.failure = failure
            self.before_redo()
            return Totals(math.nan, 0, math.nan, committed=False)

    def _step(self, clip: float) -> Totals:
        model, step = self.model, self.progress.step + 1
        self.commit.begin()
        self._clip = clip
        with model.phases("fingerprint"):  # while the last units are exchanged
            fingerprints = self._take_fingerprints(f"{step} {self.options} {clip} {self.facts}")
        with model.phases("exchange"):
            totals = self._reduce(step, fingerprints)
        if self._updates_ahead and not totals.sound:
            self.rule.updates -= 1  # it was none
        updated = self.judge(step, totals)
        with model.phases("optimizer"):
            self._conclude(totals, updated)
            self.commit.decide([asdict(totals), updated], self.record())
            if updated:
                self._distribute()
        return totals

    def _take_fingerprints(self, facts: str) -> bytes:
        if not self.model.exchange.checks or self.model.membership.world_size == 1:
            return b""
        return self._fingerprints.take(facts, self.model.buffers_of_step.fingerprint())

    def _reduce(self, step: int, fingerprints: bytes) -> Totals:
        """Wait for the exchange, compare what all ranks hold, and agree on what the step came to."""
        exchange, gradients = self.model.exchange, self.model.gradients
        slots = gradients.end_step()
        bad = exchange.wait()
        passengers: list[Passenger] = [self.model.buffers_of_step, *self.passengers]
        # The status of a save waits for its snapshot: nothing may be updated before that.
        statuses = [each.status() for each in passengers]
        measured = torch.stack([each.loss.reshape(()).to(self.model.arena.device, torch.float64) for each in slots])
        tokens = sum(each.count for each in slots)
        reading = self._update_ahead(measured, tokens) if self._updates_ahead else Reading(measured)
        values = reading.values()
        losses = [(each.slot, value, each.count) for each, value in zip(slots, values, strict=False)]
        everyone = exchange.tell([bad, losses, statuses, fingerprints.hex()])
        for index, passenger in enumerate(passengers):
            passenger.receive([of_rank[index] for _, _, of_rank, _ in everyone])
        self._compare(step, [bytes.fromhex(prints) for *_, prints in everyone])
        self.model.buffers_of_step.gather()
        self.commit.enter_last_exchange()
        norm_of_sum = values[-1] if self._updates_ahead else exchange.norm().item()
        records = sorted(tuple(record) for _, of_rank, *_ in everyone for record in of_rank)
        tokens = sum(count for _, _, count in records)
        norm = norm_of_sum / max(1, tokens)
        bad_units = tuple((rank, unit) for rank, (units, *_) in enumerate(everyone) for unit in units)
        if not math.isfinite(norm):
            bad_units = exchange.blame(bad_units, gradients.rows)
        loss = sum(loss for _, loss, _ in records) / max(1, tokens)
        return Totals(loss, tokens, norm, bad_units)

    def _compare(self, step: int, everyone: list[bytes]) -> None:
        """Halt on every rank if any rank holds other bits than it should (C-DDP-001)."""
        if not self.model.exchange.checks:
            return
        self._fingerprints.compare(step, everyone)
        if self.ownership.replicas > 1:
            owned = sum(stop - start for start, stop in self.owned_parts)
            state = self.rule.state.values()
            compare_replicas(
                self.model.membership.group, step, [flat[:owned] for flat in state], [flat[owned:] for flat in state]
            )

    def _update_ahead(self, losses: Tensor, tokens: int) -> Reading:
        """The update of `_conclude` without the host's knowledge of the norm, or none if the step is not sound; gives
        the losses and the norm, which do not wait for the update."""
        measured = torch.cat([losses, self.model.exchange.norm().view(1)])
        reading = Reading(measured)
        # A number of the host would be a factor of 1/x on a GPU, which rounds otherwise: it gets tensors.
        numbers = (max(1, tokens), self._clip)
        count, most = (torch.full((), number, dtype=torch.float64, device=measured.device) for number in numbers)
        scale = count * (measured[-1] / count / most).clamp(min=1.0) if self._clip else count
        gate = ~torch.isfinite(measured).all()
        self.rule.update_unless(gate, self.model.gradients.rows[0], scale, self.options)
        return reading

    def _conclude(self, totals: Totals, updated: bool) -> None:
        """The step has its verdict: the update rule on the mean gradient, clipped to a global norm. It needs nobody."""
        if self._updates_ahead:
            assert updated == totals.sound, f"{totals} was updated ahead of its verdict: {updated}"
        elif updated:
            scale = max(1, totals.tokens) * max(1.0, totals.norm / self._clip if self._clip else 1.0)
            self.rule.update(self.model.gradients.rows[0], scale, self.options)
        self.model.end_step(totals.loss, totals.tokens, updated)

    def _distribute(self) -> None:
        """Owners send what they have updated."""
        self.model.gather.begin(self._updaters)
        if self._updaters is not self.ownership:
            for flat in self.rule.state.values():
                for unit, bounds in zip(self.model.arena.layout.units, self._updaters.bounds or (), strict=True):
                    self.model.group.all_gather(flat[unit.start : unit.stop], bounds)


def _nothing(_: JidokaHalt) -> None:
    pass


class AdamW(Optimizer):
    """AdamW with weight decay on matrices only; `zero` shares out its state, by default an even slice to each."""

    rule_type = AdamWRule

    def __init__(
        self,
        model: DataParallel,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        zero: Zero | Policy = "even",
    ) -> None:
        super().__init__(model, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, zero)
