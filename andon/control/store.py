"""The coordinator's small store: rendezvous values by topic, and the keys of torch's store. All of it is limited, so
that no worker can make the coordinator grow."""

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from andon.transport.base import ProtocolError

MOST_TOPICS: Final = 16
LONGEST_NAME: Final = 300
LONGEST_VALUE: Final = 1 << 16
MOST_BYTES: Final = 64 << 20
ENTRY_BYTES: Final = 200
"""What an entry takes besides its key and value."""
LARGEST: Final = 1 << 62


class Topics:
    """Values that every rank gives for a topic, until all have given theirs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: dict[str, dict[int, str]] = {}

    def add(self, rank: int, topic: str, value: str) -> list[str] | None:
        """Keep a rank's value; everyone's, by rank, once all have arrived."""
        _check_sizes(topic, value)
        if topic not in self._values and len(self._values) >= MOST_TOPICS:
            raise ProtocolError(f"it opened more than {MOST_TOPICS} topics")
        values = self._values.setdefault(topic, {})
        values[rank] = value
        if len(values) < self.world_size:
            return None
        del self._values[topic]
        return [values[each] for each in sorted(values)]


class KeyValues:
    """Keys and values of torch's store; whoever asks for a key that is missing is answered when it is set."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[Callable[[str], None]]] = defaultdict(list)
        self._bytes = 0

    def request(self, operation: str, key: str, value: str, answer: Callable[[str], None]) -> None:
        """Do what a rank asks for, and answer it, at once or when the key is there."""
        _check_sizes(key, value)
        if operation == "set":
            self._set(key, value)
            answer("")
        elif operation == "get":
            if key in self._values:
                answer(self._values[key])
            else:
                self._waiting[key].append(answer)
                self._grow(len(key))
        elif operation == "check":
            answer("1" if key in self._values else "")
        elif operation == "add":
            answer(self._add(key, value))
        else:
            raise ProtocolError("it asked the store for something that it cannot do")

    def _add(self, key: str, value: str) -> str:
        try:
            total = int(bytes.fromhex(self._values.get(key, "30"))) + int(value)
        except ValueError:
            raise ProtocolError("it added to a key that holds no number") from None
        if abs(total) >= LARGEST:
            raise ProtocolError("it added up more than a number holds")
        self._set(key, str(total).encode().hex())
        return str(total)

    def _set(self, key: str, value: str) -> None:
        self._grow(len(key) + len(value))
        self._values[key] = value
        for answer in self._waiting.pop(key, ()):
            answer(value)

    def _grow(self, size: int) -> None:
        self._bytes += size + ENTRY_BYTES
        if self._bytes > MOST_BYTES:
            raise ProtocolError(f"the store would hold more than {MOST_BYTES:,} bytes")


def _check_sizes(name: str, value: str) -> None:
    if len(name) > LONGEST_NAME or len(value) > LONGEST_VALUE:
        raise ProtocolError("it gave a name or a value that is too long")
