"""Peers written from the specification of the wire alone: plain sockets, their own packing, nothing of
`andon.transport.tcp.frames`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

SECONDS = 20.0


class PlainSocket:
    """Frames, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        self.sock = sock

    def send(self, payload: bytes) -> None:
        self.sock.sendall(struct.pack(">I", len(payload)) + payload)

    def receive(self) -> bytes:
        (length,) = struct.unpack(">I", self.exactly(4))
        return self.exactly(length)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the connection was closed"
            data += more
        return data

    def is_closed(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


class PlainWorker(PlainSocket):
    """A version-2 worker as someone else would write it."""

    def __init__(self, address: tuple[str, int], name: str = "plain", join: bool = True) -> None:
        super().__init__(socket.create_connection(address))
        if join:
            text = name.encode()
            self.send(struct.pack("<BI", 1, len(text)) + text + struct.pack("<II", 1, 3) + b"cpu")
            tag, self.worker_id, self.total_workers = struct.unpack("<BII", self.receive())
            assert tag == 2

    def shard(self) -> tuple[int, int, int]:
        tag, step, start, end = struct.unpack("<BQQQ", self.receive())
        assert tag == 3
        return step, start, end

    def send_gradient(self, step: int, values: list[float], loss: float, correct: int, total: int) -> None:
        floats = struct.pack(f"<Q{len(values)}f", len(values), *values)
        head = struct.pack("<BQI", 4, step, self.worker_id)
        self.send(head + floats + struct.pack("<fQQ", loss, correct, total))

    def averaged(self) -> tuple[int, list[float], float]:
        payload = self.receive()
        tag, step, count = struct.unpack_from("<BQQ", payload)
        assert tag == 5
        *values, loss = struct.unpack_from(f"<{count}ff", payload, 17)
        assert len(payload) == 17 + 4 * count + 4
        return step, values, loss

    def send_block(self, step: int, block: int, sizes: list[int], values: list[float]) -> None:
        head = struct.pack("<BQIII", 8, step, self.worker_id, block, 24)
        shape = struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        self.send(head + shape + struct.pack(f"<Q{len(values)}f", len(values), *values))

    def averaged_block(self) -> tuple[int, int, list[int], list[float]]:
        payload = self.receive()
        tag, step, block, components = struct.unpack_from("<BQII", payload)
        assert tag == 9
        *sizes, count = struct.unpack_from(f"<{components}IQ", payload, 17)
        values = struct.unpack_from(f"<{count}f", payload, 17 + 4 * components + 8)
        return step, block, sizes, list(values)

    def send_non_block(self, step: int, component: int, values: list[float]) -> None:
        head = struct.pack("<BQIB", 10, step, self.worker_id, component)
        self.send(head + struct.pack(f"<Q{len(values)}f", len(values), *values))

    def averaged_non_block(self) -> tuple[int, int, list[float]]:
        payload = self.receive()
        tag, step, component, count = struct.unpack_from("<BQBQ", payload)
        assert tag == 11
        return step, component, list(struct.unpack_from(f"<{count}f", payload, 18))

    def beat(self) -> None:
        self.send(struct.pack("<BI", 6, 5) + b"plain" + struct.pack("<Q", 1234))


class PlainServer:
    """One side of a conversation with a `WorkerClient`: does as the test says in a thread."""

    def __init__(self, conversation: Callable[[PlainSocket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._serve, conversation)

    def _serve(self, conversation: Callable[[PlainSocket], None]) -> None:
        sock, _ = self._listener.accept()
        with sock:
            plain = PlainSocket(sock)
            payload = plain.receive()
            assert payload == struct.pack("<BI", 1, 4) + b"ours" + struct.pack("<II", 2, 4) + b"cuda"
            plain.send(struct.pack("<BII", 2, 1, 3))
            conversation(plain)

    def __enter__(self) -> PlainServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._done.result(SECONDS)
        self._pool.shutdown()
