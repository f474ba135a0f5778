"""A token set: a tokenized corpus on disk, one long sequence of ids.

A *shard* is a file of little-endian ids: uint16, or uint32 for vocabularies above 65,536. A token set is a
folder of shards with their tokenizer and `meta.json`, which is written last and names them all.
"""

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from andon.data.cache import damaged
from andon.data.sources import digest
from andon.data.tokenizer import Tokenizer
from andon.errors import UserError

FORMAT = 1


class TokenSet:
    """A tokenized corpus on disk."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.token_count: int = meta["tokens"]
        self.vocab_size: int = meta["vocab_size"]
        self.bytes_per_token: float = meta["bytes"] / meta["tokens"]
        self.digest: str = meta["digest"]
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in meta["shards"])])
        self._shards = [
            np.memmap(folder / shard["name"], dtype=np.dtype(meta["dtype"]), mode="r") for shard in meta["shards"]
        ]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the token set in a folder; the sizes of its files are checked against meta.json."""
        try:
            meta = json.loads((folder / "meta.json").read_text())
            if meta["format"] != FORMAT:
                raise damaged(folder, f"its format is {meta['format']}, this Andon's is {FORMAT}", "meta.json")
            for shard in meta["shards"]:
                size = (folder / shard["name"]).stat().st_size
                expected = shard["tokens"] * np.dtype(meta["dtype"]).itemsize
                if size != expected:
                    raise damaged(folder, f"it has {size:,} bytes instead of {expected:,}", shard["name"])
            return cls(folder, meta)
        except OSError as error:
            raise damaged(folder, error.strerror or str(error), Path(error.filename or "").name) from error
        except UserError:  # it is a ValueError, too
            raise
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise damaged(folder, f"its content is not valid: {error!r}", "meta.json") from error

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the tokens were made with."""
        return Tokenizer.load(self.folder)

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + count)."""
        assert 0 <= start <= start + count <= self.token_count, (start, count, self.token_count)
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            shard = int(np.searchsorted(self._starts, start + done, side="right")) - 1
            part = self._shards[shard][start + done - self._starts[shard] :][: count - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def verify(self) -> None:
        """Compare the digests of every file and of all tokens with those in meta.json."""
        whole = blake3()
        for shard in self.meta["shards"]:
            if digest(self.folder / shard["name"], whole=whole) != shard["blake3"]:
                raise damaged(self.folder, "its BLAKE3 is not the one in meta.json", shard["name"])
        if whole.hexdigest() != self.digest:
            raise damaged(self.folder, "its digest is not that of the tokens", "meta.json")
        if self.tokenizer().digest() != self.meta["tokenizer"]:
            raise damaged(self.folder, "its BLAKE3 is not the one in meta.json", "tokenizer.json")
