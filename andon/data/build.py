"""Building token sets: from files or stories to shards in a cache on disk.

A token set (`andon.data.token_set`) is named by the digest of what it was built from, so the same text under
another path finds it again. It is built in a temporary folder and renamed at the end: a folder with such a
name is complete. If two processes build the same one, the slower discards its own.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from andon.data.sources import Counts, Document, Progress, digests, documents, find_files, kind_of, quiet, stamp
from andon.data.stories import stories
from andon.data.token_set import FORMAT, TokenSet
from andon.data.tokenizer import Tokenizer, sample
from andon.errors import UserError
from andon.files import expand, sync
from andon.machine import machine_id

SHARD_TOKENS = 128 << 20
BATCH_BYTES = 1 << 20
"""Text that is encoded at once: the encoder needs some hundred bytes of memory per token."""
DAY = 86_400


@dataclass(frozen=True)
class Corpus:
    """What to tokenize, and how."""

    paths: tuple[str, ...] = ("stories",)
    """files, folders and globs, or only `stories` for the built-in corpus"""
    tokenizer: str = "bpe"
    """`bpe` (trained on the corpus), `bytes`, or the path of a tokenizer.json or its folder"""
    vocab_size: int = 4096
    """for `bpe`"""
    stories_count: int = 20_000
    stories_seed: int = 0


def prepare(corpus: Corpus, cache: Path, progress: Progress = quiet, shard_tokens: int = SHARD_TOKENS) -> TokenSet:
    """The token set of a corpus, from the cache or built now; progress is in bytes, or in built-in stories."""
    cache = expand(cache).absolute()
    files = [] if corpus.paths == ("stories",) else find_files(corpus.paths)
    stamps = [stamp(file) for file in files]
    given = None if corpus.tokenizer in ("bpe", "bytes") else Tokenizer.load(corpus.tokenizer)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_stale(cache)
        content = _content(corpus, files, cache, progress)
        kind = given.digest() if given else corpus.tokenizer
        key = [FORMAT, shard_tokens, kind, corpus.vocab_size if kind == "bpe" else 0, content]
        folder = cache / blake3(json.dumps(key).encode()).hexdigest(length=16)
        if not folder.exists():
            with temporary(cache) as fresh:
                _Builder(corpus, files, fresh, progress).build(given, shard_tokens)
                if stamps != [stamp(file) for file in files]:
                    what, cause = "The corpus changed while it was being tokenized", "another program is writing to it"
                    raise UserError(what, cause, "Wait until it is complete, then start again")
                publish(fresh, folder)
    except OSError as error:
        cause = f"{error.strerror or error} ({error.filename or 'while writing'})"
        remedy = "Free some space there, make it writable, or choose another folder: --data.cache FOLDER"
        raise UserError(f"The token cache {cache} cannot be written", cause, remedy) from error
    return TokenSet.open(folder)


class Prepared(Protocol):
    """What workers train on: a folder of the cache with a digest; a token set, for instance."""

    folder: Path
    digest: str

    def verify(self) -> None:
        """Compare the digest of every file."""
        ...


D = TypeVar("D", bound=Prepared)


def find(cache: Path, digest: str, open_folder: Callable[[Path], D]) -> D | None:
    """What has this digest in a cache, if it is there and sound."""
    for meta in sorted(expand(cache).absolute().glob("*/meta.json")):
        if found := open_sound(meta.parent, digest, open_folder):
            return found
    return None


def open_sound(folder: Path, digest: str, open_folder: Callable[[Path], D]) -> D | None:
    """What is in a folder, if it can be read, has this digest and is sound."""
    with suppress(UserError, OSError):
        found = open_folder(folder)
        if found.digest == digest:
            found.verify()
            return found
    return None


def receive(cache: Path, digest: str, fill: Callable[[Path], object], open_folder: Callable[[Path], D]) -> D:
    """What has this digest, whose files `fill` brings into a folder; it is kept in the cache."""
    cache = expand(cache).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_stale(cache)
        folder = cache / f"received-{digest[:32]}"
        with temporary(cache) as fresh:
            fill(fresh)
            if open_sound(fresh, digest, open_folder) is None:
                cause = "What was received does not have the digest that the coordinator named"
                raise UserError("The data did not arrive intact", cause, "Start the worker again")
            shutil.rmtree(folder, ignore_errors=True)  # one that is damaged, or it would have been found
            publish(fresh, folder)
    except OSError as error:
        cause = f"{error.strerror or error} ({error.filename or 'while writing'})"
        raise UserError(f"The token cache {cache} cannot be written", cause, "Free some space there") from error
    return open_folder(folder)


def _content(corpus: Corpus, files: list[Path], cache: Path, progress: Progress) -> list[str]:
    if files:
        contents = digests(files, cache / "digests.json", progress)
        return [kind_of(file) + digest for file, digest in zip(files, contents, strict=True)]
    hasher = blake3()
    for story in stories(corpus.stories_seed, corpus.stories_count):
        hasher.update(story.encode() + b"\0")
    return ["stories" + hasher.hexdigest()]


class _Builder:
    """Builds the files of one token set."""

    def __init__(self, corpus: Corpus, files: list[Path], folder: Path, progress: Progress) -> None:
        self.corpus, self.files, self.folder, self.progress = corpus, files, folder, progress
        self.total = max(1, sum(stamp(file)[1] for file in files) if files else corpus.stories_count)
        self.counts = Counts()

    def build(self, given: Tokenizer | None, shard_tokens: int) -> None:
        tokenizer = given or self._make_tokenizer()
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        writer = _Writer(self.folder, shard_tokens)
        for batch in self._batches():
            rows = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, row in zip(batch, rows, strict=True):
                row += [tokenizer.end] if piece.ends else []
            writer.write(np.array(list(chain.from_iterable(rows)), dtype))
        if not self.counts.bytes:
            what = f"There is no text in {self._description()}"
            raise UserError(what, "every document is empty", "Give a file with text")
        tokenizer.save(self.folder)
        meta = {
            "format": FORMAT,
            "source": self._description(),
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "tokens": sum(shard["tokens"] for shard in writer.shards),
            "bytes": self.counts.bytes,
            "documents": self.counts.documents,
            "replaced": self.counts.replaced,
            "tokenizer": tokenizer.digest(),
            "digest": writer.whole.hexdigest(),
            "shards": writer.shards,
        }
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")

    def _make_tokenizer(self) -> Tokenizer:
        if self.corpus.tokenizer == "bytes":
            return Tokenizer.bytes()
        counts = Counts()
        texts = ((piece.text, counts.read / self.total) for piece in self._read(counts, "training the tokenizer"))
        return Tokenizer.train(sample(texts), self.corpus.vocab_size)

    def _batches(self) -> Iterator[list[Document]]:
        batch, flushed = list[Document](), 0
        for piece in self._read(self.counts, "tokenizing"):
            batch.append(piece)
            if self.counts.bytes - flushed >= BATCH_BYTES:
                yield batch
                batch, flushed = [], self.counts.bytes
        yield batch

    def _read(self, counts: Counts, phase: str) -> Iterator[Document]:
        shown = 0
        for piece in documents(self.files, counts) if self.files else self._stories(counts):
            if counts.bytes - shown > BATCH_BYTES // 4:
                self.progress(phase, counts.read, self.total)
                shown = counts.bytes
            yield piece
        self.progress(phase, self.total, self.total)

    def _stories(self, counts: Counts) -> Iterator[Document]:
        for story in stories(self.corpus.stories_seed, self.corpus.stories_count):
            counts.read += 1
            counts.documents += 1
            counts.bytes += len(story.encode())
            yield Document(story, ends=True)

    def _description(self) -> str:
        if not self.files:
            return f"{self.corpus.stories_count:,} built-in stories, seed {self.corpus.stories_seed}"
        names = ", ".join(file.name for file in self.files[:3])
        return f"{names} and {len(self.files) - 3} more" if len(self.files) > 3 else names


class _Writer:
    """Appends tokens to the current shard, and starts a new one when it is full."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.whole, self.current = blake3(), blake3()

    def write(self, ids: npt.NDArray[Any]) -> None:
        while len(ids):
            if not self.shards or self.shards[-1]["tokens"] == self.shard_tokens:
                self.shards.append({"name": f"tokens-{len(self.shards):05}.bin", "tokens": 0})
                self.current = blake3()
            shard = self.shards[-1]
            part, ids = np.split(ids, [self.shard_tokens - shard["tokens"]])
            data = part.tobytes()
            with (self.folder / shard["name"]).open("ab") as file:
                file.write(data)
            self.whole.update(data)
            self.current.update(data)
            shard["tokens"] += len(part)
            shard["blake3"] = self.current.hexdigest()


@contextmanager
def temporary(cache: Path) -> Iterator[Path]:
    """A folder of the cache to build something in; it is gone at the end, unless it was published."""
    folder = cache / f".tmp-{_machine()}-{os.getpid()}-{token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(fresh: Path, folder: Path) -> None:
    """Give a folder that is complete its name."""
    for path in (*fresh.iterdir(), fresh):
        sync(path)
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # these two mean that another process has published the same content
    sync(folder.parent)


def remove_stale(cache: Path) -> None:
    """Remove what interrupted builds have left."""
    for folder in cache.glob(".tmp-*-*-*"):
        _, machine, pid, _ = folder.name.split("-")
        # A process on another machine can only be judged by whether it still writes.
        if not _alive(int(pid)) if machine == _machine() else _untouched(folder) > DAY:
            shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    """The machine's id, as part of a file name."""
    return blake3(machine_id().encode()).hexdigest(length=6)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _untouched(folder: Path) -> float:
    """Seconds since the last write in a folder."""
    with suppress(FileNotFoundError):  # another process has just removed it
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return 0.0
