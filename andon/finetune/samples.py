"""Samples on disk: tokenized once by the launcher, mapped into memory by every worker.

A *sample set* is a folder of the token cache, named by the digest of what it was made from: the rows, the tokenizer,
the context and the share that is held out. Its arrays lie one after another: the tokens of all samples, their targets,
where each sample starts, and the file and line that it comes from. `meta.json` is written last.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from andon.config.finetune import FinetuneConfig, Task
from andon.data.batches import NO_TARGET, Batch, Windows
from andon.data.build import publish, remove_stale, temporary
from andon.data.sources import digest as file_digest
from andon.data.sources import digests, quiet
from andon.errors import UserError
from andon.files import expand
from andon.finetune.base import Base
from andon.finetune.encode import Encoder, Sample, label_of, unseen_label
from andon.finetune.rows import Columns, Row, check_columns, data_files, find_columns, read_rows

FORMAT: Final = 1
ARRAYS: Final = ("ids", "targets", "starts", "places")
PADDING: Final = -1
"""The token that stands where a shorter sample of a batch has ended."""
AT_ONCE: Final = 512
"""Rows that are tokenized together."""
LARGEST_SMALL_FILE: Final = 64 << 20


class SampleSet:
    """Tokenized samples on disk."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.digest: str = meta["digest"]
        self.task: Task = meta["task"]
        self.columns: Columns = meta["columns"]
        self.labels: list[str] = meta["labels"]
        self.ids, self.targets, self.starts, self.places = (
            np.load(_array(folder, name), mmap_mode="r", allow_pickle=False) for name in ARRAYS
        )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the samples in a folder."""
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT or meta.keys() < {"digest", "task", "columns", "labels", "arrays", "files"}:
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

    def tokens(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample."""
        return np.array(self.ids[self.starts[number] : self.starts[number + 1]], np.int64)

    def answer(self, number: int) -> npt.NDArray[np.int64]:
        """The targets of a sample: one for each token, or its class."""
        if self.task == "classes":
            return np.array(self.targets[number : number + 1], np.int64)
        return np.array(self.targets[self.starts[number] : self.starts[number + 1]], np.int64)

    def verify(self) -> None:
        """Compare the digest of every array with meta.json."""
        for name in ARRAYS:
            if file_digest(_array(self.folder, name)) != self.meta["arrays"][name]:
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

    def sources(self, step: int, slot: int) -> list[str]:
        """The files and lines of a slot, for a halt to name."""
        return [self.samples.place(number) for number in self.windows(step, slot)]

    def validation(self, count: int) -> list[Batch]:
        """The first held-out samples, in micro-batches."""
        return [self.stack(numbers) for numbers in self.validation_windows(count)]

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


def prepare_samples(config: FinetuneConfig, base: Base) -> SampleSet:
    """The samples of a configuration, tokenized now or taken from the cache."""
    cache, files = expand(config.data.cache).absolute(), data_files(config.data.files)
    context = min(config.train.context, base.positions or config.train.context)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_stale(cache)
        content = digests(files, cache / "digests.json", quiet)
        key = [FORMAT, context, config.data.validation, content, [file.name for file in files], base.digest()]
        folder = cache / f"samples-{blake3(json.dumps(key).encode()).hexdigest(length=16)}"
        if not folder.exists():
            with temporary(cache) as fresh:
                _Builder(files, base, context, config.data.validation).build(fresh)
                publish(fresh, folder)
    except OSError as error:
        cause = f"{error.strerror or error} ({error.filename or 'while writing'})"
        remedy = "Free some space there, make it writable, or choose another folder: --data.cache FOLDER"
        raise UserError(f"The token cache {cache} cannot be written", cause, remedy) from error
    found = SampleSet.open(folder)
    found.verify()
    return found


class _Builder:
    """Builds the files of one sample set."""

    def __init__(self, files: list[Path], base: Base, context: int, validation: float) -> None:
        self.files, self.base, self.context, self.validation = files, base, context, validation

    def build(self, folder: Path) -> None:
        first = next(read_rows(self.files), None)
        if first is None:
            cause = "Every line is empty"
            raise UserError(f"There are no samples in {self.files[0]}", cause, "Give a file with samples")
        columns = find_columns(first)
        encode = Encoder(self.base.tokenizer_for(columns, self.files[0]), columns, self.context)
        labels = self._labels() if columns == "text + label" else []
        encode.know_classes(labels)
        samples = [sample for rows in self._batches(columns) for sample in encode(rows)]
        self._write(folder, samples, columns, labels, encode.cut)

    def _batches(self, columns: Columns) -> Iterator[list[Row]]:
        rows = read_rows(self.files)
        while batch := list(islice(rows, AT_ONCE)):
            for row in batch:
                check_columns(row, columns)
            yield batch

    def _labels(self) -> list[str]:
        """The classes, in the model's own order if it has names for them; held-out samples must be of these."""
        places, named = [], []
        for row in read_rows(self.files):
            check_columns(row, "text + label")
            places.append(row.place)
            named.append(label_of(row))
        held_out = {number for batch in _windows(len(named), self.validation) for number in batch}
        seen = {name for number, name in enumerate(named) if number not in held_out}
        known = self.base.own_labels or sorted(seen, key=_order)
        for place, name in zip(places, named, strict=True):
            if name not in known:
                raise unseen_label(place, name, known)
        if len(known) < 2:
            remedy = "Give samples of at least two classes"
            raise UserError(f"All samples have the label {known[0]!r}", "There is nothing to tell apart", remedy)
        return known

    def _write(self, folder: Path, samples: list[Sample], columns: Columns, labels: list[str], cut: int) -> None:
        numbers = {file: number for number, file in enumerate(self.files)}
        lengths = [len(sample.ids) for sample in samples]
        arrays = {
            "ids": np.concatenate([sample.ids for sample in samples]),
            "targets": np.concatenate([sample.targets for sample in samples]),
            "starts": np.cumsum([0, *lengths], dtype=np.int64),
            "places": np.array([(numbers[each.place.file], each.place.line) for each in samples], np.int64),
        }
        self.base.check_tokens(int(arrays["ids"].max()))
        for name, array in arrays.items():
            np.save(_array(folder, name), array, allow_pickle=False)
        made = {name: file_digest(_array(folder, name)) for name in ARRAYS}
        facts = {
            "task": "classes" if columns == "text + label" else "answers",
            "columns": columns,
            "labels": labels,
            "files": [file.name for file in self.files],
            "context": self.context,
        }
        digest = blake3(json.dumps([made, facts]).encode()).hexdigest()
        meta = {"format": FORMAT, "digest": digest, **facts, "cut": cut, "arrays": made}
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _windows(count: int, validation: float) -> list[list[int]]:
    """The held-out samples of `count`; none if there is no share."""
    found = Windows(count, 0, 1, 1, validation)
    return found.validation_windows(count) if found.held_out else []


def _order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, then names."""
    return (0, int(label), "") if label.lstrip("-").isdecimal() else (1, 0, label)


def _array(folder: Path, name: str) -> Path:
    return folder / f"samples-{name}.npy"


def _damaged(folder: Path, cause: str) -> UserError:
    return UserError(f"{folder} is damaged", cause, f"rm -r {folder}, then start again: it will be built again")
