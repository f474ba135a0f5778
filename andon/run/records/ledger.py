"""The ledger of a run, `ledger.jsonl`: which steps are committed, by whom, from which samples.

Only the coordinator writes it, and lines are only appended. A line is one of
  {"generation": 3, "hosts": [...]}                           a generation begins, with a worker on each of these hosts
  {"step": 12, "generation": 3, "shares": [0, 3, 8], "samples": [...]}   a step is committed: rank r has computed the
                                                              slots [shares[r], shares[r + 1]), from these samples (a
                                                              checksum of their numbers for each slot)
  {"back": 10, "generation": 4}                               all ranks go on from the checkpoint of this step
A background thread writes, so that nothing waits for a disk that hangs; while the disk fails, lines wait in memory.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from andon.files import no_follow
from andon.run.records.chain import Chain
from andon.run.records.events import cut_last_line, read

FILE = "ledger.jsonl"
RETRY_SECONDS = 1.0  # between attempts to write to a disk that fails
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
        path = folder / FILE
        cut_last_line(path)
        self.generation, self.hosts, self._step = -1, list[str](), step
        last = 0
        for known in read(path) if path.exists() else ():
            self.generation = known["generation"]
            self.hosts = known.get("hosts", self.hosts)
            last = known.get("step", known.get("back", last))
        self.chain = Chain(last)
        self._file = open(path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (closed by close)
        self._lines, self._closing, self._failed = bytearray(), False, False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._flush, name="andon-ledger", daemon=True)
        self._writer.start()

    def start(self) -> None:
        """The run starts or resumes from its checkpoint: no worker of it was still training."""
        if self.chain.step != self._step:
            self._write({"back": self._step, "generation": self.generation})
            self.chain = Chain(self._step)

    def begin(self, generation: int, hosts: list[str]) -> None:
        """Record a generation that is about to begin; waits until it is on disk, but not for long."""
        self.generation, self.hosts = generation, hosts
        self._write({"generation": generation, "hosts": hosts})
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, BEGIN_SECONDS)

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
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(CLOSE_SECONDS)
        if not self._writer.is_alive():
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        with self._changed:
            self._lines += json.dumps(record).encode() + b"\n"
            self._changed.notify_all()

    def _flush(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (self._lines and not self._failed), RETRY_SECONDS)
                lines, closing = bytes(self._lines), self._closing
            count, self._failed = 0, False
            try:
                count = self._file.write(lines) if lines else 0
                if b'"hosts"' in lines:
                    os.fsync(self._file.fileno())
            except OSError:  # if only the sync failed, the lines are written
                self._failed = True
            with self._changed:
                del self._lines[:count]
                self._changed.notify_all()
                if closing and (self._failed or not self._lines):
                    return


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
