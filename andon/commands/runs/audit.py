"""`andon audit`: proves from a run's ledger that every committed step used each of its samples exactly once.

It reads the ledger once, in constant memory. Every line must continue the chain of steps, and a step must name each of
its slots once, with the samples that (seed, step, slot) determine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from andon.cluster.kinds import prepare, samples_of
from andon.commands.data import check_data
from andon.config.load import load_run
from andon.data.batches import Windows, checksum
from andon.errors import UserError
from andon.run.records.events import read
from andon.run.records.ledger import FILE, check_record
from andon.run.screen.terminal import counted


class Audit:
    """The state of an audit: the last step of the chain, and totals."""

    def __init__(self, batches: Windows) -> None:
        self.batches = batches
        self.first = self.step = self.committed = self.undone = self.returns = 0
        self.generations = 0
        self.generation, self.workers = -1, 0

    def add_line(self, fields: dict[str, Any]) -> None:
        """Check one line of the ledger; `ValueError` if it is wrong."""
        if "hosts" in fields:
            if fields["generation"] <= self.generation:
                raise ValueError(f"generation {fields['generation']} begins after {self.generation}")
            self.generation, self.workers = fields["generation"], len(fields["hosts"])
            self.generations += 1
        elif "back" in fields and not self.committed:  # the run starts from a checkpoint of another run
            self.first = self.step = fields["back"]
        elif "back" in fields:
            if not 0 <= fields["back"] <= self.step:
                raise ValueError(f"it goes back to step {fields['back']}, from step {self.step}")
            self.undone += self.step - fields["back"]
            self.step, self.returns = fields["back"], self.returns + 1
        else:
            self._add_step(check_record(fields, self.batches.slots))

    def _add_step(self, record: dict[str, Any]) -> None:
        step, shares, slots = record["step"], record["shares"], self.batches.slots
        if step != self.step + 1:
            raise ValueError(f"step {step} follows step {self.step}")
        if record["generation"] > self.generation:
            raise ValueError(f"step {step} is of generation {record['generation']}, which has not begun")
        if shares[0] != 0 or shares[-1] != slots or sorted(shares) != shares:
            raise ValueError(f"the slots of step {step} are not all computed once: {shares}")
        if len(record["samples"]) != slots:
            raise ValueError(f"step {step} names the samples of {len(record['samples'])} slots, not of {slots}")
        for slot, found in enumerate(record["samples"]):
            if found != checksum(self.batches.windows(step, slot)):
                raise ValueError(f"slot {slot} of step {step} was computed from the wrong samples")
        self.step, self.committed = step, self.committed + 1


def audit(run: Path, console: Console) -> None:
    """Check the ledger of a run and print what it proves; an error names the first wrong line."""
    # The run may be another user's: nothing is written to the cache that its configuration names.
    config = load_run(run / "config.yaml").with_own_cache()
    data = prepare(config, console)
    check_data(run, data.digest)
    found = Audit(samples_of(config, data))
    for number, fields in _lines(run / FILE):
        try:
            found.add_line(fields)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            remedy = "Compare with the checkpoints: `andon checkpoint verify` finds the good ones"
            raise UserError(f"{run / FILE} is wrong at line {number}", str(error), remedy) from None
    steps = found.step - found.first
    samples = steps * config.train.slots * config.train.micro_batch
    console.print(
        f"{steps:,} steps are committed, none missing and none twice, in {counted(found.generations, 'generation')}; "
        f"each of their {samples:,} samples was used exactly once",
        soft_wrap=True,
    )
    if found.returns:
        times = "once" if found.returns == 1 else f"{found.returns} times"
        text = f"The run went back to a checkpoint {times}, and did {counted(found.undone, 'step')} again"
        console.print(text, soft_wrap=True)
    _compare_with_summary(run, found.step)


def _compare_with_summary(run: Path, step: int) -> None:
    """Check that the ledger of a finished run ends with its last step."""
    try:
        done = json.loads((run / "summary.json").read_text(encoding="utf-8"))["step"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        done = None
    if done != step:
        remedy = "Start the same command again: it resumes from the newest checkpoint"
        raise UserError(f"The ledger ends at step {step}, summary.json says {done}", "A line of it is missing", remedy)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from enumerate(read(path), 1)
    except FileNotFoundError:
        cause = "The run was trained under torchrun or by an earlier version, or it is not a run"
        raise UserError(f"{path} does not exist", cause, "Name the folder of a run of `andon train`") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error), "Name the folder of a run") from None
