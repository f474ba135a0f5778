"""The end of a step: reduce, compare, verdict, update, gather, in this order and nowhere else.

No weight changes before the ranks have agreed on the verdict, which is the same on every rank. The verdict comes out of
the step's last exchange, that of the norms, so that a worker which receives it late can still update
(`engine.recovery.commit`). A single worker on a GPU, which has nobody to agree with, launches the update ahead of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from andon.engine.gradients.exchange import Passenger
from andon.engine.membership import Membership
from andon.engine.parallel import DataParallel
from andon.engine.reading import Reading
from andon.engine.recovery.commit import Commit, Recovery, Standing, plan_recovery
from andon.engine.recovery.transfer import share_common_buffers, share_state
from andon.engine.verdict import Judge, Report, Totals, Vote, halt_unless_sound
from andon.errors import EXIT_STOPPED
from andon.integrity.fingerprint import Fingerprints, compare_replicas
from andon.integrity.halt import JidokaHalt
from andon.optim.adamw import AdamWRule
from andon.optim.base import Range, UpdateRule
from andon.optim.shard_map import Policy
from andon.optim.sharding import Ownership, Zero
from andon.transport.base import GroupError
from andon.transport.registry import TRANSPORTS


class Optimizer(torch.optim.Optimizer):
    """Ends the steps of a `DataParallel` model: exchange, checks, update; ZeRO-1 divides its state.

    All trained parameters are one group, whose `lr` torch's schedulers change. A subclass names the rule that updates
    the weights. On machines that compute different bits (`group.mixed`) each weight is updated by one rank only."""

    rule_type: ClassVar[type[UpdateRule]]

    def __init__(self, model: DataParallel, options: Mapping[str, Any], zero: Zero | Policy = "even") -> None:
        if not isinstance(model, DataParallel):
            raise TypeError("the optimizer takes the andon.DataParallel model itself, not its parameters")
        super().__init__(list(model.arena.parameters.values()), dict(options))
        self.model, self.progress = model, model.progress
        self.zero = zero if isinstance(zero, Zero) else Zero(zero)
        self.commit = Commit()
        self.is_new = False
        """Whether this worker still has to receive weights and state from the other members of the run."""
        self.schedule_is_old = False
        """Whether its options, and the schedule that sets them, are older than its weights: they came from a peer."""
        self.goes_on = False
        """Whether `model.steps` handles the loss of a worker; otherwise the loss is raised as an error."""
        self.failure: GroupError | None = None
        """The error of a failed group, until `model.steps` has handled it."""
        self.loads = 0
        """How often another state was loaded: a checkpoint, or the first weights."""
        self.before_redo: Callable[[], None] = lambda: None
        """Called when the group has failed in a step before its verdict: it is repeated unless another rank has it."""
        self.before_end: Callable[[], None] = lambda: None
        """Called by `model.steps` after the last step, on all ranks together."""
        model.optimizer = self
        model.gather.on_failure = self._gather_failed
        self.rule = self.rule_type(model.arena, *self._assign_parts())
        self.facts = ""
        """What the ranks must agree on besides their bits: configuration, data."""
        self.judge: Judge = halt_unless_sound
        self.stop = Vote(lambda: model.membership.group.stop_wanted())
        self.change = Vote(lambda: model.membership.group.change_wanted())
        """Whether the members of the run change after this step."""
        self.shrink = Vote(lambda: model.membership.group.shrink_wanted())
        """Whether some members leave after this step, with their parts of the state."""
        self.samples: Callable[[], list[int]] = list
        """Checksums of the samples of each slot of the step, for the run's ledger."""
        self.on_halt: Callable[[JidokaHalt], None] = lambda halt: None
        """Called with a halt before it is raised; the same on every rank."""
        model.before_step = self._exit_if_stopped
        for prefix, module in model.module.named_modules():
            module.register_load_state_dict_post_hook(partial(self._weights_loaded, prefix))
        self.checkpoints: object = None
        """What `andon.save` and `andon.load` keep for it."""
        self.passengers: list[Passenger] = [self.stop, self.change, self.shrink]
        self._fingerprints = Fingerprints(model.arena, self.compared_state)
        self._clip, self._options = 0.0, self.options
        """Of the step that began last. A late verdict is carried out with them: `lr` may have changed since."""

    def step(self, clip: float = 0.0) -> Totals:  # type: ignore[override]
        """End a step: agree with all ranks, halt if something is wrong, and only then update.

        `clip` is the largest norm of the mean gradient; 0: it is not clipped."""
        if not isinstance(clip, int | float):
            raise TypeError("step takes no closure: `clip` is the largest norm of the gradient")
        if self.failure:  # forward waited for a gather that has failed, or the script has called load or save
            if not self.goes_on:
                raise self.failure
            return self._not_committed()
        before = self.commit.step
        try:
            return self._step(clip)
        except JidokaHalt as halt:
            self.on_halt(halt)
            raise
        except GroupError as failure:
            if not self.goes_on:
                raise
            self.failure = self.model.gather.failure = failure
            if self.commit.step > before:  # only the gather failed: the step is done, and is not repeated
                return replace(Totals.of(self.commit.verdict[0]), gathered=False)
            return self._not_committed()

    def _not_committed(self) -> Totals:
        """A worker was lost before the verdict on the step: it is repeated."""
        self.before_redo()
        return Totals(math.nan, 0, math.nan, committed=False, gathered=False)

    def _gather_failed(self, failure: GroupError) -> None:
        """Forward has no weights, because a worker was lost in the gather: the step that it begins is repeated."""
        if not (self.goes_on and self.model.trains):
            raise failure
        self.failure = failure

    def _step(self, clip: float) -> Totals:
        model, step = self.model, self.progress.step + 1
        self.commit.begin()
        self._clip, self._options = clip, _checked(self.options)
        with model.phases("fingerprint"):  # while the last units are exchanged
            fingerprints = b""
            if model.exchange.checks and model.membership.world_size > 1:
                facts = f"{step} {self.options} {clip} {self.facts}"
                fingerprints = self._fingerprints.take(facts, model.buffers_of_step.fingerprint())
        with model.phases("exchange"):
            totals = self._reduce(step, fingerprints)
        if self._updates_ahead and not totals.sound:
            self.rule.updates -= 1  # the gated update did not happen
        updated = self.judge(step, totals)
        with model.phases("optimizer"):
            self._update(totals, updated)
            self.commit.decide([asdict(totals), updated], self.record())
            if updated:
                self._gather()
        return totals

    def _reduce(self, step: int, fingerprints: bytes) -> Totals:
        """Wait for the reduced gradients, compare what all ranks hold, and compute the totals of the step."""
        model, exchange = self.model, self.model.exchange
        slots = model.gradients.end_step()
        bad_units = exchange.wait()
        passengers: list[Passenger] = [model.buffers_of_step, *self.passengers]
        # The status of a save waits for its snapshot: nothing may be updated before that.
        statuses = [each.status() for each in passengers]
        measured = torch.stack([each.loss.reshape(()).to(model.arena.device, torch.float64) for each in slots])
        tokens = sum(each.count for each in slots)
        reading = self._update_ahead(measured, tokens) if self._updates_ahead else Reading(measured)
        values = reading.values()
        losses = [(each.slot, value, each.count) for each, value in zip(slots, values, strict=False)]
        report = Report(bad_units, losses, statuses, fingerprints.hex())
        reports = [Report(*each) for each in model.membership.group.all_gather_json(report)]
        for index, passenger in enumerate(passengers):
            passenger.receive([each.statuses[index] for each in reports])
        self._compare(step, [bytes.fromhex(each.fingerprints) for each in reports])
        model.buffers_of_step.gather()
        self.commit.enter_last_exchange()
        totals = Totals.add_up(reports, values[-1] if self._updates_ahead else exchange.norm().item())
        if math.isfinite(totals.norm):
            return totals
        return replace(totals, bad_units=exchange.blame(totals.bad_units, model.gradients.rows))

    def _compare(self, step: int, everyone: list[bytes]) -> None:
        """Halt on every rank if any rank holds wrong bits (C-DDP-001)."""
        self._fingerprints.compare(step, everyone)
        if self.model.exchange.checks and self.ownership.replicas > 1:
            owned = sum(stop - start for start, stop in self.owned_parts)
            state = self.rule.state.values()
            own, replica = [flat[:owned] for flat in state], [flat[owned:] for flat in state]
            compare_replicas(self.model.membership.group, step, own, replica)

    def _update_ahead(self, losses: Tensor, tokens: int) -> Reading:
        """Launch the update before the host knows the norm; the device leaves the weights alone if the step is not
        sound. Gives the losses and the norm, whose reading does not wait for the update."""
        measured = torch.cat([losses, self.model.exchange.norm().view(1)])
        reading = Reading(measured)
        # A GPU divides by a number of the host as a product with 1/x, which rounds differently: it gets tensors.
        numbers = (max(1, tokens), self._clip)
        count, most = (torch.full((), number, dtype=torch.float64, device=measured.device) for number in numbers)
        scale = count * (measured[-1] / count / most).clamp(min=1.0) if self._clip else count
        gate = ~torch.isfinite(measured).all()
        self.rule.update_unless(gate, self.model.gradients.rows[0], scale, self._options)
        return reading

    def _update(self, totals: Totals, updated: bool) -> None:
        """Carry out the verdict: update with the mean gradient, clipped to a global norm. Needs no other rank."""
        if self._updates_ahead:
            assert updated == totals.sound, f"{totals} was updated ahead of its verdict: {updated}"
        elif updated:
            scale = max(1, totals.tokens) * max(1.0, totals.norm / self._clip if self._clip else 1.0)
            self.rule.update(self.model.gradients.rows[0], scale, self._options)
        self.model.end_step(totals.loss, totals.tokens, updated)

    def _gather(self) -> None:
        """Send the updated weights from their owners to every rank; on mixed machines the optimizer state, too."""
        self.model.gather.begin(self._updaters)
        if self._updaters is not self.ownership:
            for flat in self.rule.state.values():
                for unit, bounds in zip(self.model.arena.layout.units, self._updaters.bounds or (), strict=True):
                    self.model.group.all_gather(flat[unit.start : unit.stop], bounds)

    def record(self) -> dict[str, Any]:
        """The ledger's record of the last step."""
        membership = self.model.membership
        return {
            "step": self.progress.step,
            "generation": membership.generation,
            "shares": list(membership.order.bounds),
            "samples": self.samples(),
        }

    def enter(self, membership: Membership, recorded: int) -> Recovery:
        """Enter a generation and recover the newest state that its members hold together; all call it together.

        `recorded` is the last step that the run's ledger has. If the state is lost, a checkpoint has to be loaded."""
        group = membership.group
        self.model.gather.failure = None  # the weights from which a late step is updated are complete
        standing = self.commit.standing(() if self.is_new else self.rule.updated, recorded)
        standings = [Standing.of(fields) for fields in group.all_gather_json(standing.fields())]
        recovery = plan_recovery(standings, self.model.arena.layout.size)
        if group.rank in recovery.late:
            totals, updated = recovery.verdict
            self._update(Totals.of(totals), updated)
        self.schedule_is_old |= group.rank in recovery.late | recovery.new
        self.commit.catch_up(recovery, group.rank, self.record())
        self.model.enter(membership)
        rule, wanted = self.rule, self._assign_parts()
        if recovery.lost or wanted != (rule.parts, rule.updated):
            rule = self.rule_type(self.model.arena, *wanted)
            rule.keeps_gradients = self.rule.keeps_gradients
        if not recovery.lost:
            share_state(self.model, recovery, self.rule, rule)
        if recovery.new or recovery.lost:
            share_common_buffers(self.model, recovery)
        self.rule, self.is_new = rule, recovery.lost
        rule.updates = self.progress.updates
        if not recovery.lost:
            prints = group.all_gather_bytes(self._fingerprints.take(f"{self.progress} {self.facts}"))
            self._fingerprints.compare(self.progress.step, prints)
        return recovery

    def _assign_parts(self) -> tuple[list[Range], list[Range]]:
        """Decide who owns what in this generation; the parts whose state this rank keeps, and those it updates."""
        membership, arena = self.model.membership, self.model.arena
        self.ownership = Ownership.of(arena.layout, membership.world_size, self.zero)
        self.model.exchange.own(self.ownership)
        alone = not TRANSPORTS[membership.group.transport].connects
        self._updates_ahead = alone and arena.device.type == "cuda" and self.rule_type.gated
        """A single worker on a GPU launches the update before it reads the verdict, so that the GPU has work meanwhile.
        The GPU computes the same verdict, and leaves the weights alone if it is bad. Not where a group can fail before
        the step is committed: the step would be repeated, and update twice."""
        self._updaters = self.ownership
        if membership.group.mixed and not self.ownership.sharded:
            self._updaters = Ownership.of(arena.layout, membership.world_size, Zero("even"))
        self.owned_parts = self.ownership.parts(membership.rank)
        parts = self.owned_parts + self.ownership.replica_parts(membership.rank)
        updated = parts if self._updaters is self.ownership else self._updaters.parts(membership.rank)
        return parts, updated

    def go_on_from(self, step: int) -> None:
        """Continue from weights, state and progress of a step: they were loaded, or are the first ones."""
        self.loads += 1
        self.rule.updates = self.progress.updates
        self.commit.go_back(step)
        self.is_new = False

    def compared_state(self) -> dict[str, Tensor]:
        """The flat buffers that are equal on every rank: the weights, and without ZeRO the optimizer's state."""
        weights = {"weights": self.model.arena.weights}
        return weights if self.ownership.sharded else weights | self.rule.state

    def _exit_if_stopped(self) -> None:
        """End the process before a step if a stop was asked for; `andon.load` and `andon.save` replace this."""
        if self.stop.agreed:
            if self.model.membership.rank == 0:
                why = "the script has not called andon.load or andon.save"
                print(f"Stopped after step {self.progress.step}. Nothing was saved: {why}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_STOPPED)

    def _weights_loaded(self, prefix: str, module: nn.Module, _: object) -> None:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        self.rule.weights_changed({f"{prefix}.{name}" if prefix else name for name in names})

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the one group of all trained parameters."""
        # torch's own method loads its compiler: 2 s and 70 MB a worker.
        if self.param_groups:
            raise ValueError("the trained parameters are one group, which has all of them already")
        self.param_groups.append({**self.defaults, **param_group})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: every slot overwrites the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Refused: ranks may hold parts of the state, and a checkpoint has all of it."""
        raise RuntimeError("the optimizer's state may be divided among the ranks: save it with andon.save")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: ranks may hold parts of the state, and a checkpoint has all of it."""
        raise RuntimeError("the optimizer's state may be divided among the ranks: load it with andon.load")


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse options that would put NaN or Inf into the weights; a schedule may set them."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}: no step can be done with it")
    return options


class AdamW(Optimizer):
    """AdamW with weight decay on matrices only; `zero` shares its state among the ranks, by default in even slices."""

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
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: it must be 0 or a positive number")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}: they must be from 0 to below 1")
        super().__init__(model, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, zero)
