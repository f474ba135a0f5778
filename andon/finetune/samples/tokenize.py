"""Making a sample set: the launcher reads the rows and tokenizes them once.

It is named by the digest of what it was made from: the rows, the tokenizer, the context and the share that is held out.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

from andon.config.finetune import FinetuneConfig
from andon.data.batches import Windows
from andon.data.build import publish, remove_stale, temporary
from andon.data.sources import digest as file_digest
from andon.data.sources import digests, quiet, stamp
from andon.errors import UserError
from andon.files import expand
from andon.finetune.base import Base
from andon.finetune.samples.encode import Encoder, Sample, label_of, unknown_class, unseen_label
from andon.finetune.samples.rows import Columns, Row, check_columns, data_files, find_columns, read_rows
from andon.finetune.samples.sample_set import ARRAYS, FORMAT, SampleSet, array_file, digest_of

AT_ONCE: Final = 512
"""Rows that are tokenized together."""


def prepare_samples(config: FinetuneConfig, base: Base) -> SampleSet:
    """The samples of a configuration, tokenized now or taken from the cache."""
    cache, files = expand(config.data.cache).absolute(), data_files(config.data.files)
    context = min(config.train.context, base.positions or config.train.context)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_stale(cache)
        stamps = [stamp(file) for file in files]
        content = digests(files, cache / "digests.json", quiet)
        key = [FORMAT, context, config.data.validation, content, short_names(files), base.digest()]
        folder = cache / f"samples-{blake3(json.dumps(key).encode()).hexdigest(length=16)}"
        if not folder.exists():
            with temporary(cache) as fresh:
                _Builder(files, base, context, config.data.validation).build(fresh)
                if stamps != [stamp(file) for file in files]:
                    what = "The samples changed while they were being tokenized"
                    raise UserError(what, "Another program writes to them", "Wait until they are complete")
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
        tokenizer = self.base.tokenizer_for(columns, self.files[0])
        labels = self._labels() if columns == "text + label" else []
        encode = Encoder(tokenizer, columns, self.context, labels)
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
        own = self.base.own_labels
        known = own or sorted(seen, key=_order)
        classes = {*known, *(str(number) for number in range(len(own)))}
        for place, name in zip(places, named, strict=True):
            if name not in classes:
                raise unknown_class(place, name, known) if own else unseen_label(place, name, known)
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
    """What a halt calls the files: their names, with the folders in which they differ if that is not enough."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([file.absolute() for file in files])
    return [file.absolute().relative_to(shared).as_posix() for file in files]


def _windows(count: int, validation: float) -> list[list[int]]:
    """The held-out samples of `count`; none if there is no share."""
    found = Windows(count, 0, 1, 1, validation)
    return found.validation_windows(count) if found.held_out else []


def _order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, then names."""
    number = label.removeprefix("-")
    return (0, int(label), "") if number.isdecimal() and len(number) < 20 else (1, 0, label)
