"""The ledger of a run, `ledger.jsonl`: which steps are committed, by whom, from which samples.

Only the coordinator writes it, and lines are only appended. A line is one of
  {"generation": 3, "hosts": [...]}                           a generation begins, with a worker on each of these hosts
  {"step": 12, "generation": 3, "shares": [0, 3, 8], "samples": [...]}   a step is committed: rank r has computed the
                                                              slots [shares[r], shares[r + 1]), from these samples (a
                                                              checksum of their numbers for each slot)
  {"back": 10, "generation": 4}                               all ranks go on from the checkpoint of this step
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from andon.errors import UserError
from andon.run.records.chain import Chain
from andon.run.records.events import cannot_write, damaged_line, read
from andon.run.records.folder import read_mark
from andon.run.records.lines import LineWriter

FILE = "ledger.jsonl"
BEGIN_SECONDS = 1.0  # that a generation waits for the disk
CLOSE_SECONDS = 5.0  # that the end of a run waits for the disk


class LedgerReports(Protocol):
    """How a rank reports to the ledger."""

    def report(self, records: Sequence[Any]) -> None:
        """Report committed steps."""

    def went_back(self, generation: int, step: int) -> None:
        """Report that a generation goes on from the checkpoint of a step."""


class Ledger:
    """Appends to the ledger of a run."""

    def __init__(self, folder: Path, step: int) -> None:
        """`step`: of the checkpoint from which the run starts or resumes, unless its workers are still training."""
        self.generation, self.hosts, self._step = -1, list[str](), step
        self.failure: UserError | None = None
        """Why lines were lost, if any were; complete after `close`."""
        self.chain = Chain(self._read(folder / FILE))
        self._folder, self._mark = folder, read_mark(folder)
        self._lines = LineWriter(folder / FILE, self._hold)

    def _read(self, path: Path) -> int:
        """Read the last generation from a ledger; returns the step at which it ends."""
        last = 0
        for number, known in enumerate(read(path) if path.exists() else (), 1):
            self.generation, last = known.get("generation", ""), known.get("step", known.get("back", last))
            self.hosts = known.get("hosts", self.hosts)
            if not (isinstance(self.generation, int) and isinstance(last, int) and isinstance(self.hosts, list)):
                raise damaged_line(path, number)
        return last

    def _hold(self) -> None:
        """The folder was removed: refuse to write until the run has locked it again, if it had locked it."""
        if read_mark(self._folder) != self._mark:
            raise OSError(f"{self._folder} is not locked by this run any more")
        self._folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """The run starts or resumes from its checkpoint: no worker of it was still training."""
        if self.chain.step != self._step:
            self._write({"back": self._step, "generation": self.generation})
            self.chain = Chain(self._step)

    def begin(self, generation: int, hosts: list[str]) -> None:
        """Record a generation that is about to begin; waits until it is on disk, but not for long."""
        self.generation, self.hosts = generation, hosts
        self._write({"generation": generation, "hosts": hosts}, sync=True)
        self._lines.wait(BEGIN_SECONDS)

    def commit(self, record: dict[str, Any]) -> None:
        """A rank reports a committed step; several may report the same."""
        for each in self.chain.add(record["step"], record):
            self._write(each)

    def go_back(self, generation: int, number: int, step: int) -> None:
        """A rank reports that its generation goes on from a checkpoint; `number` counts its returns in a generation."""
        if self.chain.cut(generation, number, step):
            self._write({"back": step, "generation": generation})

    def close(self) -> None:
        """Write the waiting lines, if the disk answers in time, and close the file."""
        error = self._lines.close(CLOSE_SECONDS)
        if error and not self.failure:
            self.failure = cannot_write(error, "ledger")

    def _write(self, record: dict[str, Any], sync: bool = False) -> None:
        """Append a line; after one was lost, none follows, because the ledger would have a gap."""
        if self.failure:
            return
        try:
            self._lines.append(json.dumps(record), self._lines.sync if sync else None)
        except OSError as error:
            self.failure = cannot_write(error, "ledger")


def check_record(record: object, slots: int) -> dict[str, Any]:
    """Check a record that a rank reports; `ValueError` if it is not valid."""
    if not isinstance(record, dict) or record.keys() != {"step", "generation", "shares", "samples"}:
        raise ValueError("a record with wrong fields")
    numbers = [record["step"], record["generation"]]
    for name in ("shares", "samples"):
        if not isinstance(record[name], list) or len(record[name]) > slots + 1:
            raise ValueError(f"a record whose {name!r} is not a list of at most {slots + 1}")
        numbers += record[name]
    if not all(isinstance(number, int) and 0 <= number < 1 << 53 for number in numbers):
        raise ValueError("a record with a value that is not a number")
    return record
