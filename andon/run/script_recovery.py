"""What a script has to recover, besides weights and optimizer state, when the members of its run change.

Each generation opens the checkpoints again. Options and schedule follow the weights: a worker that has received weights
or a verdict from its peers also takes their schedule. If nobody has it any more, all go back to the newest checkpoint.
"""

from andon.engine.optimizer import Optimizer
from andon.errors import UserError
from andon.run.script import ScriptCheckpoints, checkpoints_of, restore_schedule, schedule_of


def leave_generation(optimizer: Optimizer) -> None:
    """Leave a generation, whatever has become of its group."""
    checkpoints = checkpoints_of(optimizer)
    if checkpoints and checkpoints.is_open:
        checkpoints.checkpointer.close()
    optimizer.model.part()


def enter_generation(optimizer: Optimizer, lost: bool, recorded: int) -> bool:
    """Bring checkpoints, options and schedule of a script into another generation; all its members call it together.

    `lost`: a part of the state is lost. `recorded` is the last step that the run's ledger has. Returns whether all have
    gone back to a checkpoint, or to their first weights."""
    group, checkpoints = optimizer.model.membership.group, checkpoints_of(optimizer)
    scheduler = checkpoints.scheduler if checkpoints else None
    if checkpoints:
        checkpoints.undo()  # before new members copy options and schedule
    schedule = None if optimizer.schedule_is_old else schedule_of(optimizer, scheduler)
    mine = [checkpoints is not None, optimizer.stop.agreed, schedule]
    has, stops, schedules = zip(*group.all_gather_json(mine), strict=True)
    optimizer.stop.agreed = any(stops)  # a worker that joins has no part in what was agreed before
    if len(set(has)) > 1:
        cause = "The other workers have checkpoints, and the one that joins has none"
        raise UserError("A worker cannot take part", cause, "Call andon.load before `for step in model.steps(…)`")
    if checkpoints:
        checkpoints.enter()
    current = next((each for each in schedules if each), None)
    if lost or current is None:
        _go_back(optimizer, checkpoints, recorded)
    elif optimizer.schedule_is_old:
        restore_schedule(optimizer, scheduler, current)
    optimizer.schedule_is_old = False
    if checkpoints:
        checkpoints.checkpointer.after_change()
    return lost or current is None


def _go_back(optimizer: Optimizer, checkpoints: ScriptCheckpoints | None, recorded: int) -> None:
    """A part of the state is lost: all ranks go back to the newest checkpoint, or to their first weights."""
    if checkpoints and checkpoints.load():
        return
    if any(optimizer.model.group.all_gather_json(optimizer.commit.step)) or recorded:
        cause = "Workers were lost that alone had a part of the optimizer's state, and there is no checkpoint"
        remedy = "Save now and then" + (
            ', or make the optimizer with zero="off"' if optimizer.zero.policy != "off" else ""
        )
        raise UserError("The run cannot go on", cause, remedy)
    optimizer.go_on_from(0)  # no rank has committed a step: its weights are the first ones
