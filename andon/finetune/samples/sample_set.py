"""Samples on disk, mapped into memory by every worker, and dealt to the slots of each step.

A *sample set* is a folder of the token cache with four arrays: the tokens of all samples one after another, their
targets, where each sample starts, and the file and line that it comes from. `meta.json` is written last.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from andon.config.finetune import FinetuneConfig, Task
from andon.data.batches import NO_TARGET, Batch, Windows
from andon.data.sources import digest as file_digest
from andon.errors import UserError
from andon.finetune.samples.rows import Columns

FORMAT: Final = 1
ARRAYS: Final = ("ids", "targets", "starts", "places")
FACTS: Final = ("task", "columns", "labels", "files", "context")
"""What meta.json says of them besides."""
PADDING: Final = -1
"""The token that stands where a shorter sample of a batch has ended."""


class SampleSet:
    """Tokenized samples on disk."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.digest: str = meta["digest"]
        self.task: Task = meta["task"]
        self.columns: Columns = meta["columns"]
        self.labels: list[str] = meta["labels"]
        self.ids, self.targets, self.starts, self.places = (
            np.load(array_file(folder, name), mmap_mode="r", allow_pickle=False) for name in ARRAYS
        )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the samples in a folder."""
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT or not meta.keys() >= {"arrays", "digest", *FACTS}:
                raise ValueError("these are no samples of this Andon")
            return cls(folder, meta)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, str(error)) from None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def place(self, number: int) -> str:
        """The file and line of a sample."""
        file, line = self.places[number]
        return f"{self.meta['files'][file]}:{line}"

    def find(self, place: str) -> int | None:
        """The sample at a file and line."""
        file, _, line = place.rpartition(":")
        if file not in self.meta["files"] or not line.isdecimal():
            return None
        (found,) = ((self.places[:, 0] == self.meta["files"].index(file)) & (self.places[:, 1] == int(line))).nonzero()
        return int(found[0]) if len(found) else None

    def texts(self, number: int, tokenizer: Any) -> tuple[str, str]:
        """What the model reads of a sample, and what it must answer."""
        ids, targets = self.tokens(number), self.answer(number)
        if self.task == "classes":
            return tokenizer.decode(ids.tolist(), skip_special_tokens=True), self.labels[int(targets[0])]
        answer = tokenizer.decode(ids[targets != NO_TARGET].tolist(), skip_special_tokens=True)
        return tokenizer.decode(self.prompt(number).tolist(), skip_special_tokens=True), answer.strip()

    def prompt(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens before the first answer of a sample."""
        return self.tokens(number)[: max(1, int((self.answer(number) != NO_TARGET).argmax()))]

    def tokens(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample."""
        return np.array(self.ids[self.starts[number] : self.starts[number + 1]], np.int64)

    def answer(self, number: int) -> npt.NDArray[np.int64]:
        """The targets of a sample: one for each token, or its class."""
        if self.task == "classes":
            return np.array(self.targets[number : number + 1], np.int64)
        return np.array(self.targets[self.starts[number] : self.starts[number + 1]], np.int64)

    def verify(self) -> None:
        """Compare the digest of every array with meta.json, and its own."""
        if digest_of(self.meta) != self.digest:
            raise _damaged(self.folder, "meta.json does not have the digest that it names")
        for name in ARRAYS:
            if file_digest(array_file(self.folder, name)) != self.meta["arrays"][name]:
                raise _damaged(self.folder, f"the BLAKE3 of {name} is not the one in meta.json")


class SampleBatches(Windows):
    """Samples as micro-batches, a pure function of step and slot; a shorter sample is padded."""

    def __init__(self, samples: SampleSet, config: FinetuneConfig) -> None:
        train = config.train
        super().__init__(len(samples), config.seed, train.slots, train.micro_batch, config.data.validation)
        self.samples = samples

    def __call__(self, step: int, slot: int) -> Batch:
        """Inputs and targets of a slot."""
        return self.stack(self.windows(step, slot))

    def name(self, window: int) -> str:
        """The file and line of a sample."""
        return self.samples.place(window)

    def validation(self, count: int) -> Iterator[Batch]:
        """The first held-out samples, in micro-batches."""
        return map(self.stack, self.validation_windows(count))

    def stack(self, numbers: Sequence[int]) -> Batch:
        """Inputs and targets of some samples; the target of a token is the one that follows it."""
        classes = self.samples.task == "classes"
        rows = [self.samples.tokens(number) for number in numbers]
        answers = [self.samples.answer(number) for number in numbers]
        if classes:
            return _padded(rows, PADDING), np.concatenate(answers)
        return _padded([row[:-1] for row in rows], PADDING), _padded([row[1:] for row in answers], NO_TARGET)


def _padded(rows: Sequence[npt.NDArray[np.int64]], filler: int) -> npt.NDArray[np.int64]:
    out = np.full((len(rows), max(map(len, rows))), filler, np.int64)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out


def steps_of(config: FinetuneConfig, samples: SampleSet) -> int:
    """The number of steps: as given, or as many as the epochs take."""
    train = config.train
    training = SampleBatches(samples, config).training
    return train.steps or max(1, math.ceil(train.epochs * training / (train.slots * train.micro_batch)))


def digest_of(meta: Mapping[str, Any]) -> str:
    """BLAKE3 of a sample set: of its arrays, and of what they mean."""
    return blake3(json.dumps([meta["arrays"], {name: meta[name] for name in FACTS}]).encode()).hexdigest()


def array_file(folder: Path, name: str) -> Path:
    """Where an array of a sample set lies."""
    return folder / f"samples-{name}.npy"


def _damaged(folder: Path, cause: str) -> UserError:
    return UserError(f"{folder} is damaged", cause, f"rm -r {folder}, then start again: it will be built again")
