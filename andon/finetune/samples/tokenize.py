"""Builds sample sets: the launcher reads the rows and tokenizes them once.

A sample set is named by the digest of its sources: the rows, the tokenizer, the context and the held-out share.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from andon.config.finetune import FinetuneConfig
from andon.data.batches import Windows
from andon.data.cache import find_or_build
from andon.data.sources import digest as file_digest
from andon.data.sources import digests, quiet
from andon.errors import UserError
from andon.finetune.base import Base
from andon.finetune.samples.encode import Encoder, Sample, label_of, unknown_class, unseen_label
from andon.finetune.samples.rows import Columns, Row, check_columns, data_files, find_columns, read_rows
from andon.finetune.samples.sample_set import ARRAYS, FORMAT, SampleSet, array_file, digest_of

BATCH_ROWS: Final = 512
"""Number of rows that are tokenized together."""


def prepare_samples(config: FinetuneConfig, base: Base) -> SampleSet:
    """Take the samples of a configuration from the cache, or tokenize them."""
    files, validation = data_files(config.data.files), config.data.validation
    context = min(config.train.context, base.positions or config.train.context)

    def key(cache: Path) -> list[Any]:
        content = digests(files, cache / "digests.json", quiet)
        return [FORMAT, context, validation, content, short_names(files), base.digest()]

    build = _Builder(files, base, context, validation).build
    found = SampleSet.open(find_or_build(config.data.cache, files, "samples-", key, build))
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
        tokenizer = self.base.tokenizer_for(columns, self.files[0])
        labels = self._labels() if columns == "text + label" else []
        encode = Encoder(tokenizer, columns, self.context, labels)
        samples = [sample for rows in self._batches(columns) for sample in encode(rows)]
        self._write(folder, samples, columns, labels, encode.cut)

    def _batches(self, columns: Columns) -> Iterator[list[Row]]:
        rows = read_rows(self.files)
        while batch := list(islice(rows, BATCH_ROWS)):
            for row in batch:
                check_columns(row, columns)
            yield batch

    def _labels(self) -> list[str]:
        """The classes, in the model's own order if it names them; held-out samples must have one of these, too."""
        places, named = [], []
        for row in read_rows(self.files):
            check_columns(row, "text + label")
            places.append(row.place)
            named.append(label_of(row))
        windows = Windows(len(named), 0, 1, 1, self.validation)
        held_out = {number for (number,) in windows.validation_windows(windows.held_out)}
        seen = {name for number, name in enumerate(named) if number not in held_out}
        own = self.base.own_labels
        known = own or sorted(seen, key=_order)
        classes = {*known, *(str(number) for number in range(len(own)))}
        for place, name in zip(places, named, strict=True):
            if name not in classes:
                raise unknown_class(place, name, known) if own else unseen_label(place, name, known)
        if len(known) < 2:
            remedy = "Give samples of at least two classes"
            raise UserError(f"All samples have the label {known[0]!r}", "There is nothing to distinguish", remedy)
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
            np.save(array_file(folder, name), array, allow_pickle=False)
        made = {name: file_digest(array_file(folder, name)) for name in ARRAYS}
        facts = {
            "task": "classes" if columns == "text + label" else "answers",
            "columns": columns,
            "labels": labels,
            "files": short_names(self.files),
            "context": self.context,
        }
        meta = {"format": FORMAT, **facts, "cut": cut, "arrays": made}
        meta["digest"] = digest_of(meta)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def short_names(files: Sequence[Path]) -> list[str]:
    """The names of files in a halt: without folders, if they differ without them."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([file.absolute() for file in files])
    return [file.absolute().relative_to(shared).as_posix() for file in files]


def _order(label: str) -> tuple[int, int, str]:
    """The sorting key of labels: numbers by their value, then names."""
    number = label.removeprefix("-")
    return (0, int(label), "") if number.isdecimal() and len(number) < 20 else (1, 0, label)
