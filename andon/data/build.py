"""Builds token sets (`andon.data.token_set`): from files or stories to shards in the cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from andon.data.cache import find_or_build
from andon.data.sources import Counts, Piece, Progress, digests, documents, find_files, kind_of, quiet, stamp
from andon.data.stories import stories
from andon.data.token_set import FORMAT, TokenSet
from andon.data.tokenizer import Tokenizer, sample
from andon.errors import UserError

SHARD_TOKENS = 128 << 20
BATCH_BYTES = 1 << 20
"""Text that is tokenized at once: the tokenizer needs some hundred bytes of memory per token."""


@dataclass(frozen=True)
class Corpus:
    """The text to tokenize, and its tokenizer."""

    paths: tuple[str, ...] = ("stories",)
    """files, folders and globs, or only `stories` for the built-in corpus"""
    tokenizer: str = "bpe"
    """`bpe` (trained on the corpus), `bytes`, or the path of a tokenizer.json or its folder"""
    vocab_size: int = 4096
    """for `bpe`"""
    stories_count: int = 20_000
    stories_seed: int = 0


def prepare(
    corpus: Corpus,
    cache: Path,
    progress: Progress = quiet,
    shard_tokens: int = SHARD_TOKENS,
    links: list[Path] | None = None,
) -> TokenSet:
    """Take the token set of a corpus from the cache, or build it; progress is in bytes, or in built-in stories.

    Symbolic links that are skipped are added to `links`."""
    files = [] if corpus.paths == ("stories",) else find_files(corpus.paths, links=links)
    given = None if corpus.tokenizer in ("bpe", "bytes") else Tokenizer.load(corpus.tokenizer)

    def key(cache: Path) -> list[Any]:
        kind = given.digest() if given else corpus.tokenizer
        content = _content(corpus, files, cache, progress)
        return [FORMAT, shard_tokens, kind, corpus.vocab_size if kind == "bpe" else 0, content]

    def build(folder: Path) -> None:
        _Builder(corpus, files, folder, progress).build(given, shard_tokens)

    return TokenSet.open(find_or_build(cache, files, "", key, build))


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
            "replaced_in": [len(self.counts.replaced_in), *self.counts.replaced_in[:2]],
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

    def _batches(self) -> Iterator[list[Piece]]:
        batch, flushed = list[Piece](), 0
        for piece in self._read(self.counts, "tokenizing"):
            batch.append(piece)
            if self.counts.bytes - flushed >= BATCH_BYTES:
                yield batch
                batch, flushed = [], self.counts.bytes
        yield batch

    def _read(self, counts: Counts, phase: str) -> Iterator[Piece]:
        shown = 0
        for piece in documents(self.files, counts) if self.files else self._stories(counts):
            if counts.bytes - shown > BATCH_BYTES // 4:
                self.progress(phase, counts.read, self.total)
                shown = counts.bytes
            yield piece
        self.progress(phase, self.total, self.total)

    def _stories(self, counts: Counts) -> Iterator[Piece]:
        for story in stories(self.corpus.stories_seed, self.corpus.stories_count):
            counts.read += 1
            counts.documents += 1
            counts.bytes += len(story.encode())
            yield Piece(story, ends=True)

    def _description(self) -> str:
        if not self.files:
            return f"{self.corpus.stories_count:,} built-in stories, seed {self.corpus.stories_seed}"
        names = ", ".join(file.name for file in self.files[:3])
        return f"{names} and {len(self.files) - 3} more" if len(self.files) > 3 else names


class _Writer:
    """Appends tokens to the current shard, and starts a new shard when it is full."""

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
