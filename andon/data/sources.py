"""The user's text files, read as a stream of documents in bounded memory.

A *document* is one .txt or .md file, one line of a .jsonl file (field `text`), one element of a .json file (the same),
or one row of a .parquet file (column `text`). All but .parquet may be compressed (.gz).
Documents are read in *pieces* of at most 64 KiB, cut after a newline if there is one and never inside a UTF-8
sequence: small pieces keep the tokenizer's memory small and its threads busy. Invalid UTF-8 becomes U+FFFD and is
counted.
"""

import gzip
import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from andon.errors import UserError
from andon.files import expand, write_whole

PIECE_BYTES = 1 << 16
COMPRESSIBLE = (".txt", ".md", ".jsonl", ".json")
SUFFIXES = (*COMPRESSIBLE, ".parquet", *(f"{suffix}.gz" for suffix in COMPRESSIBLE))
NAMED_ONLY = (".json", ".json.gz")
"""Files that are read only if they are named: those found in a folder are as often settings as text."""
BOM = b"\xef\xbb\xbf"

Progress = Callable[[str, int, int], None]
"""Called with the phase, the amount done and the total."""


def quiet(phase: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass
class Piece:
    """A part of a document's text; `ends` marks the last one."""

    text: str
    ends: bool


@dataclass
class Counts:
    """How much has been read so far."""

    documents: int = 0
    bytes: int = 0
    """of text, in UTF-8"""
    replaced: int = 0
    """invalid UTF-8 sequences"""
    replaced_in: list[str] = field(default_factory=list)
    """the files with such sequences"""
    read: int = 0
    """progress through the input: bytes of its files, or stories"""


def find_files(
    paths: Sequence[str], suffixes: Sequence[str] = SUFFIXES, holding: str = "text", links: list[Path] | None = None
) -> list[Path]:
    """Find the files with these suffixes that files, folders and globs name, sorted and without duplicates.

    A symbolic link is followed only if it is named itself; those found in a folder or by a glob are added to `links`:
    the author of a corpus could have any file of this machine read."""
    links = [] if links is None else links
    found = sorted(file for path in paths for file in _matches(path, suffixes, holding, links))
    for file in found:
        if kind_of(file) not in suffixes:
            cause = f"its name does not end in {', '.join(suffixes)}"
            raise UserError(f"{file} is not a kind of {holding} file that can be read", cause, "Rename or convert it")
        if not os.access(file, os.R_OK):
            raise UserError(f"{file} cannot be read", "this user has no permission to read it", f"chmod +r {file}")
    unique: dict[Path, Path] = {}
    for file in found:
        # Keep the given name, not the resolved one: a link may have the suffix that its target lacks.
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _matches(path: str, suffixes: Sequence[str], holding: str, links: list[Path]) -> list[Path]:
    given, in_folders = expand(path), [suffix for suffix in suffixes if suffix not in NAMED_ONLY]
    names = [given] if given.exists() else _glob(given, links)
    inside = [[name] if name.is_file() else _walk(name, in_folders, links) for name in names]
    files = [file.absolute() for each in inside for file in each]
    if not files:
        what = f"No {holding} found at {path}"
        if not given.is_dir():
            raise UserError(what, "There is no such file or folder", f"ls {given.parent}")
        cause = f"The folder has no file whose name ends in {', '.join(in_folders)}"
        cause += "; symbolic links in it are not followed" if links else ""
        named = "; a .json file is read if it is named itself" if in_folders != list(suffixes) else ""
        raise UserError(what, cause, f"Rename the files to NAME{suffixes[0]}{named}")
    return files


def _glob(pattern: Path, links: list[Path]) -> Iterator[Path]:
    fixed = next(parent for parent in (pattern, *pattern.parents) if not has_magic(str(parent)))
    # Not Path.glob, which does not skip hidden files.
    for name in map(Path, glob(str(pattern), recursive=True)):  # noqa: PTH207
        below = [each for each in (name, *name.parents) if each != fixed and each.is_relative_to(fixed)]
        if any(each.is_symlink() for each in below):
            links.append(name)
        else:
            yield name


def _walk(folder: Path, suffixes: Sequence[str], links: list[Path]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links += [Path(root, name) for name in folders if Path(root, name).is_symlink()]
        for file in (Path(root, name) for name in names if not name.startswith(".")):
            if kind_of(file) in suffixes and file.is_symlink():
                links.append(file)
            elif kind_of(file) in suffixes and file.is_file():
                yield file


def documents(files: Sequence[Path], counts: Counts) -> Iterator[Piece]:
    """Read the documents of these files, piece by piece, and update `counts` on the way."""
    readers = {".txt": _txt, ".md": _txt, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    for file in files:
        before, replaced = counts.read, counts.replaced
        with reading(file):
            yield from readers[kind_of(file).removesuffix(".gz")](file, counts)
            counts.read = before + file.stat().st_size
        if counts.replaced > replaced:
            counts.replaced_in.append(str(file))


def _txt(file: Path, counts: Counts) -> Iterator[Piece]:
    before = counts.read
    with open_decompressed(file) as stream:
        for piece in _pieces(stream, counts):
            counts.read = before + _position(stream)
            yield piece


def _jsonl(file: Path, counts: Counts) -> Iterator[Piece]:
    before = counts.read
    with open_decompressed(file) as stream:
        for number, line in enumerate(stream, 1):
            counts.read = before + _position(stream)
            if not line.strip():
                continue
            try:
                row = json.loads(_decode(line, counts))
            except (ValueError, RecursionError) as error:
                raise _bad_row(file, f"line {number}", f"it is not JSON: {error}") from error
            yield from _row(row, file, f"line {number}", counts)


def _row(row: Any, file: Path, place: str, counts: Counts) -> Iterator[Piece]:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise _bad_row(file, place, 'it has no string "text"')
    # JSON can hold half of a surrogate pair, which UTF-8 cannot: it is replaced as invalid.
    yield from _pieces(io.BytesIO(text.encode("utf-8", "surrogatepass")), counts)


def _json(file: Path, counts: Counts) -> Iterator[Piece]:
    """Read a list of rows, one row, or lines as in a .jsonl file; a list is held in memory as a whole."""
    whole = Counts()
    with open_decompressed(file) as stream:
        try:
            found = json.loads(_decode(stream.read(), whole))
        except (ValueError, RecursionError):
            found = None
    if found is None:
        yield from _jsonl(file, counts)
        return
    counts.replaced += whole.replaced
    for number, row in enumerate(found if isinstance(found, list) else [found], 1):
        given = {"text": row} if isinstance(row, str) else row
        yield from _row(given, file, f"element {number}", counts)


def _parquet(file: Path, counts: Counts) -> Iterator[Piece]:
    pyarrow = import_pyarrow(file)
    size, before, row = file.stat().st_size, counts.read, 0
    try:
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
            if "text" not in table.schema_arrow.names:
                raise _bad_row(file, "the table", f"its columns are {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(batch_size=64, columns=["text"]):
                for value in batch.column(0).cast(pyarrow.large_binary()):
                    row += 1
                    if not value.is_valid:
                        raise _bad_row(file, f"row {row}", "its text is null")
                    counts.read = before + size * row // table.metadata.num_rows
                    yield from _pieces(io.BytesIO(value.as_py()), counts)
    except pyarrow.ArrowException as error:
        raise _bad_row(file, f"the table after row {row}", str(error).splitlines()[0]) from error


def import_pyarrow(file: Path) -> Any:
    """Import pyarrow and its module `parquet`, which reading this file needs."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file} cannot be read", "pyarrow is not installed", "pip install 'andon[parquet]'") from error
    return pyarrow


def _pieces(stream: BinaryIO, counts: Counts) -> Iterator[Piece]:
    data = b""
    # One byte more than a piece tells whether the document continues.
    while len(data := data + stream.read(PIECE_BYTES + 1 - len(data))) > PIECE_BYTES:
        end = _cut(data)
        counts.bytes += end
        yield Piece(_decode(data[:end], counts), ends=False)
        data = data[end:]
    if data:
        counts.bytes += len(data)
        counts.documents += 1
        yield Piece(_decode(data, counts), ends=True)


def _cut(data: bytes) -> int:
    end = data.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
    while end > PIECE_BYTES - 3 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _decode(data: bytes, counts: Counts) -> str:
    text = data.decode("utf-8", "replace")
    counts.replaced += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    return text


def stamp(file: Path) -> tuple[str, int, int]:
    """Path, size and modification time: different once the file has changed."""
    with reading(file):
        stat = file.stat()
    return str(file), stat.st_size, stat.st_mtime_ns


def digests(files: Sequence[Path], index: Path, progress: Progress) -> list[str]:
    """BLAKE3 of each file; the file `index` caches those of unchanged files, so that a second start is quick."""
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):  # without a usable index the files are read
        known = dict(json.loads(index.read_text()))
    cached, found, done = dict(known), [], 0
    stamps = [stamp(file) for file in files]
    total = sum(size for _, size, _ in stamps)
    for file, (path, size, modified) in zip(files, stamps, strict=True):
        mark = f"{path} {size} {modified}"
        found.append(known.get(mark) or digest(file, progress, done, total))
        done += size
        # A file can change within one tick of the clock and keep its stamp: cache only older ones.
        if time.time_ns() - modified > 2_000_000_000:
            cached[mark] = found[-1]
    if cached != known:
        with suppress(OSError):  # a cache that cannot be written is reported when tokens are written
            write_whole(index, json.dumps(cached, indent=1))
    return found


def digest(file: Path, progress: Progress = quiet, done: int = 0, total: int = 0, whole: blake3 | None = None) -> str:
    """BLAKE3 of a file; its bytes are also added to `whole`."""
    hasher = blake3()
    with reading(file), file.open("rb") as stream:
        while data := stream.read(1 << 20):
            hasher.update(data)
            if whole:
                whole.update(data)
            progress("reading", done + stream.tell(), total)
    return hasher.hexdigest()


def kind_of(file: Path) -> str:
    """The suffix that decides how a file is read; .gz together with the suffix before it."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def _position(stream: BinaryIO) -> int:
    """The position in the file on disk, compressed or not."""
    on_disk: BinaryIO = getattr(stream, "fileobj", stream)
    return on_disk.tell()


def open_decompressed(file: Path) -> BinaryIO:
    """Open a file without its compression and after its byte-order mark."""
    stream: Any = gzip.GzipFile(file) if kind_of(file).endswith(".gz") else file.open("rb")
    if stream.peek(len(BOM))[: len(BOM)] == BOM:
        stream.seek(len(BOM))
    opened: BinaryIO = stream
    return opened


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors while a file is read into a `UserError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(f"{file} cannot be read", reason, f"ls -l {file}")


def _bad_row(file: Path, place: str, cause: str) -> UserError:
    return UserError(f"{file}: {place} has no text", cause, 'Give every row a string named "text"')
