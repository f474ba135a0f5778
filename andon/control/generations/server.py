"""The star's server for the next generation: told in a thread which generation it has to serve.

A server process that has died is started again, which may take longer than a worker waits for a sign of life from the
coordinator. So the coordinator's loop only asks whether the server is ready, and is woken when it is.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

Address = tuple[str, int]
Serve = Callable[[int, int], Address]
"""(generation, world size): make the server serve a generation; returns its host and port."""


class NextServer:
    """Calls `serve` in a thread, and then `wake`. Without `serve` the transport has no server."""

    def __init__(self, serve: Serve | None, wake: Callable[[], None]) -> None:
        self._serve, self._wake = serve, wake
        self._asked = (-1, 0)
        self._answer: Future[Address] | None = None
        self.address: Address | None = None
        """Of the generation that was last found ready."""

    def is_ready(self, generation: int, world_size: int) -> bool:
        """Whether the server serves this generation; it is asked to if it does not. Raises what `serve` has raised."""
        if self._serve is None:
            return True
        asked = generation, world_size
        if self._answer is None or (self._answer.done() and self._asked != asked):
            self._asked, self._answer = asked, Future()
            threading.Thread(target=self._call, args=[self._serve, asked, self._answer], daemon=True).start()
        if not self._answer.done():
            return False
        self.address = self._answer.result()
        return True

    def _call(self, serve: Serve, asked: tuple[int, int], answer: Future[Address]) -> None:
        try:
            answer.set_result(serve(*asked))
        except Exception as error:  # raised again in the thread that asks
            answer.set_exception(error)
        self._wake()
