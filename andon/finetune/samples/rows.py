"""The user's samples as rows: lines of .jsonl files, also .gz, and rows of .parquet files, each with its place.

The columns of the first row decide the kind of all samples: `text` and `label`, `prompt` and `completion`, or
`messages`. An error in a row names its file and line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from andon.data.sources import find_files, import_pyarrow, kind_of, open_decompressed, reading
from andon.errors import UserError, shown

Columns = Literal["text + label", "prompt + completion", "messages"]
COLUMNS: Final[Mapping[Columns, tuple[str, ...]]] = {
    "text + label": ("text", "label"),
    "prompt + completion": ("prompt", "completion"),
    "messages": ("messages",),
}
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
NEEDED: Final = "Give every row text and label, prompt and completion, or messages"


@dataclass(frozen=True)
class Place:
    """The file and line, or row, of a sample; both count from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}"


def bad_row(place: Place, what: str, cause: str, remedy: str = NEEDED) -> UserError:
    """The error for a row that cannot be used."""
    word = "row" if place.file.suffix.lower() == ".parquet" else "line"
    return UserError(f"{place.file}, {word} {place.line}: {what}", cause, remedy)


@dataclass(frozen=True)
class Row:
    """One sample as the user wrote it."""

    place: Place
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """The value of a column that must be text."""
        value = self.fields[name]
        if not isinstance(value, str):
            raise bad_row(self.place, f"`{name}` is not text", f"It is {shown(value)}", f"Make `{name}` a string")
        return replace_surrogates(value)


def replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def data_files(paths: Sequence[str]) -> list[Path]:
    """Find the sample files that files, folders and globs name."""
    return find_files(paths, SUFFIXES, "sample")


def read_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Read the rows of all files in order."""
    for file in files:
        with reading(file):
            yield from (_parquet if kind_of(file) == ".parquet" else _jsonl)(file)


def find_columns(row: Row) -> Columns:
    """Find the kind of samples from the columns of the first row."""
    names = row.fields.keys()
    fitting = [kind for kind, columns in COLUMNS.items() if names >= set(columns)]
    if len(fitting) != 1:
        known = ", ".join(map(str, names)) or "no columns"
        what = "these are columns of several kinds of samples" if fitting else "these are not the columns of a sample"
        raise bad_row(row.place, what, f"It has {known}")
    return fitting[0]


def check_columns(row: Row, kind: Columns) -> None:
    """Refuse a row that lacks a column."""
    for name in COLUMNS[kind]:
        if row.fields.get(name) is None:
            raise bad_row(row.place, f"`{name}` is missing", f"The rows before it have {kind}", f"Give it `{name}`")


def _jsonl(file: Path) -> Iterator[Row]:
    with open_decompressed(file) as stream:
        for number, line in enumerate(stream, 1):
            place = Place(file, number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise bad_row(place, "this is not JSON", str(error), "Write one JSON object per line") from None
            if not isinstance(fields, dict):
                raise bad_row(place, "this is not a JSON object", f"It is {shown(fields)}")
            yield Row(place, fields)


def _parquet(file: Path) -> Iterator[Row]:
    pyarrow, number = import_pyarrow(file), 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(Place(file, number), fields)
    except pyarrow.ArrowException as error:
        raise bad_row(Place(file, number + 1), "the table ends", str(error).splitlines()[0]) from None
