"""torch.distributed's store over the control link: ranks find each other through the coordinator, without another
port."""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from andon.control.worker.client import CoordinatorClient


class ControlStore(Store):
    """The store of one rank."""

    def __init__(self, client: CoordinatorClient, seconds: float) -> None:
        super().__init__()
        self._client, self._seconds = client, seconds

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._client.ask_store("set", key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value."""
        return bytes.fromhex(self._client.ask_store("get", key, seconds=self._seconds))

    def add(self, key: str, value: int) -> int:
        """Add to the number under a key and return the sum."""
        return int(self._client.ask_store("add", key, str(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(self._client.ask_store("check", key) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self._client.ask_store("get", key, seconds=timeout.total_seconds() if timeout else self._seconds)
