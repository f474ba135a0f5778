"""Link keys: each pair of ranks has a separate key, so that no rank can impersonate another."""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

SERVER: Final = -1
"""The rank of a star's server."""


@dataclass(frozen=True)
class LinkKeys:
    """The keys of one rank (or of a star's server), one for each peer, bound to a generation."""

    generation: int
    keys: Mapping[int, bytes]

    @classmethod
    def derive(cls, secret: bytes, rank: int, world_size: int, generation: int = 0) -> Self:
        """The keys of a rank; both ends of a link derive the same one."""
        peers = (peer for peer in range(SERVER, world_size) if peer != rank)
        return cls(generation, {peer: _pair_key(secret, generation, rank, peer) for peer in peers})

    def sealed(self, token: str) -> Self:
        """The keys mixed with the run's token, so that reading the keys in transit is not enough to know these."""
        return replace(self, keys={peer: hmac.digest(token.encode(), key, "sha256") for peer, key in self.keys.items()})

    def of(self, peer: int) -> bytes:
        """The key of the link to a peer; `KeyError` if there is none."""
        return self.keys[peer]


def _pair_key(secret: bytes, generation: int, *ranks: int) -> bytes:
    return hmac.digest(secret, json.dumps(["andon link", generation, *sorted(ranks)]).encode(), "sha256")
