"""The coordinator's small store: rendezvous values by topic, and the keys of torch's store. Their number and size are
limited, so that no worker can exhaust the coordinator's memory."""

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from andon.transport.base import ProtocolError

MOST_TOPICS: Final = 16
LONGEST_NAME: Final = 300
LONGEST_VALUE: Final = 1 << 16
MOST_BYTES: Final = 64 << 20
ENTRY_BYTES: Final = 200
"""Memory of an entry in addition to its key and value."""
LARGEST_NUMBER: Final = 1 << 62


class Topics:
    """Collects one value of every rank for each topic."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: dict[str, dict[int, str]] = {}

    def add(self, rank: int, topic: str, value: str) -> list[str] | None:
        """Keep a rank's value; returns all values by rank once the last one has arrived."""
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
    """The keys and values of torch's store; a `get` of a missing key is answered when the key is set."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[Callable[[str], None]]] = defaultdict(list)
        self._bytes = 0

    def request(self, operation: str, key: str, value: str, answer: Callable[[str], None]) -> None:
        """Handle a request; `answer` is called with the result, at once or when the key is set."""
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
            raise ProtocolError("it asked the store for an operation that it cannot do")

    def _add(self, key: str, value: str) -> str:
        try:
            total = int(bytes.fromhex(self._values.get(key, "30"))) + int(value)
        except ValueError:
            raise ProtocolError("it added to a key that holds no number") from None
        if abs(total) >= LARGEST_NUMBER:
            raise ProtocolError("it added up to more than a number holds")
        self._set(key, str(total).encode().hex())
        return str(total)

    def _set(self, key: str, value: str) -> None:
        if key in self._values:
            self._bytes -= ENTRY_BYTES + len(key) + len(self._values[key])
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
