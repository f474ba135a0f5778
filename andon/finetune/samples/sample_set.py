"""Samples on disk, mapped into memory by every worker, and dealt to the slots of each step.

A *sample set* is a folder of the token cache with four arrays: the tokens of all samples one after another, their
targets, the start of each sample, and its file and line. `meta.json` is written last.
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
from andon.data.cache import damaged
from andon.data.sources import digest as file_digest
from andon.finetune.samples.rows import Columns

FORMAT: Final = 1
ARRAYS: Final = ("ids", "targets", "starts", "places")
FACTS: Final = ("task", "columns", "labels", "files", "context")
"""The fields of meta.json that the digest covers besides the arrays."""
PADDING: Final = -1
"""The token that fills up shorter samples of a batch."""


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
                raise ValueError("meta.json is not that of samples in this version's format")
            return cls(folder, meta)
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
            raise damaged(folder, str(error)) from None

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
        """The text that the model reads of a sample, and the expected answer."""
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
        """Compare the digests of all arrays and of meta.json with the recorded ones."""
        if digest_of(self.meta) != self.digest:
            raise damaged(self.folder, "the fields of meta.json do not have the digest in it")
        for name in ARRAYS:
            if file_digest(array_file(self.folder, name)) != self.meta["arrays"][name]:
                raise damaged(self.folder, f"the BLAKE3 of {name} is not the one in meta.json")


class SampleBatches(Windows):
    """Samples as micro-batches, a pure function of step and slot; shorter samples are padded."""

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
        """Inputs and targets of some samples; the target of a token is the token that follows it."""
        rows = [self.samples.tokens(number) for number in numbers]
        answers = [self.samples.answer(number) for number in numbers]
        if self.samples.task == "classes":
            return _padded(rows, PADDING), np.concatenate(answers)
        return _padded([row[:-1] for row in rows], PADDING), _padded([row[1:] for row in answers], NO_TARGET)


def _padded(rows: Sequence[npt.NDArray[np.int64]], filler: int) -> npt.NDArray[np.int64]:
    out = np.full((len(rows), max(map(len, rows))), filler, np.int64)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out


def steps_of(config: FinetuneConfig, samples: SampleSet) -> int:
    """The number of steps: `train.steps`, or as many as `train.epochs` take."""
    train = config.train
    training = SampleBatches(samples, config).training
    return train.steps or max(1, math.ceil(train.epochs * training / (train.slots * train.micro_batch)))


def digest_of(meta: Mapping[str, Any]) -> str:
    """BLAKE3 of a sample set: the digests of its arrays, and the facts about them."""
    return blake3(json.dumps([meta["arrays"], {name: meta[name] for name in FACTS}]).encode()).hexdigest()


def array_file(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"samples-{name}.npy"
