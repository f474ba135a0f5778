"""Peers written from the specification of the wire alone: plain sockets, their own packing, nothing of
`andon.transport.tcp.frames`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

SECONDS = 20.0
Values = Sequence[float] | npt.NDArray[np.float32]


def floats(values: Values) -> bytes:
    """A count and the floats."""
    array = np.asarray(values, "<f4")
    return struct.pack("<Q", array.size) + array.tobytes()


def sequential_mean(vectors: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """The mean as the specification has it: from 0.0, worker by worker, divided by their number, in f32."""
    total = np.zeros(len(vectors[0]), np.float32)
    for vector in vectors:
        total = total + vector
    mean: npt.NDArray[np.float32] = total / np.float32(len(vectors))
    return mean


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
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            received = self.sock.recv_into(rest)
            assert received, "the connection was closed"
            rest = rest[received:]
        return bytes(data)

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

    def send_gradient(self, step: int, values: Values, loss: float, correct: int, total: int) -> None:
        head = struct.pack("<BQI", 4, step, self.worker_id)
        self.send(head + floats(values) + struct.pack("<fQQ", loss, correct, total))

    def averaged(self) -> tuple[int, npt.NDArray[np.float32], float]:
        payload = self.receive()
        tag, step, count = struct.unpack_from("<BQQ", payload)
        assert tag == 5 and len(payload) == 17 + 4 * count + 4
        (loss,) = struct.unpack_from("<f", payload, 17 + 4 * count)
        return step, np.frombuffer(payload, "<f4", count, 17), loss

    def send_block(self, step: int, block: int, sizes: list[int], values: Values, blocks: int = 24) -> None:
        head = struct.pack("<BQIII", 8, step, self.worker_id, block, blocks)
        shape = struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        self.send(head + shape + floats(values))

    def averaged_block(self) -> tuple[int, int, list[int], npt.NDArray[np.float32]]:
        payload = self.receive()
        tag, step, block, components = struct.unpack_from("<BQII", payload)
        assert tag == 9
        *sizes, count = struct.unpack_from(f"<{components}IQ", payload, 17)
        assert len(payload) == 17 + 4 * components + 8 + 4 * count
        return step, block, sizes, np.frombuffer(payload, "<f4", count, 17 + 4 * components + 8)

    def send_non_block(self, step: int, component: int, values: Values) -> None:
        self.send(struct.pack("<BQIB", 10, step, self.worker_id, component) + floats(values))

    def averaged_non_block(self) -> tuple[int, int, npt.NDArray[np.float32]]:
        payload = self.receive()
        tag, step, component, count = struct.unpack_from("<BQBQ", payload)
        assert tag == 11 and len(payload) == 18 + 4 * count
        return step, component, np.frombuffer(payload, "<f4", count, 18)

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
            assert payload == struct.pack("<BI", 1, 4) + b"ours" + struct.pack("<II", 2, 10) + b"cuda+andon"
            plain.send(struct.pack("<BII", 2, 1, 3))
            conversation(plain)

    def __enter__(self) -> PlainServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._done.result(SECONDS)
        self._pool.shutdown()


class PlainGradientServer:
    """A server as someone else would write it: it accepts one worker after the other, reads from one after the other,
    knows only the dialogue of pretraining, and ends at the first thing that it does not expect."""

    def __init__(self, workers: int, blocks: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._workers, self._blocks = workers, blocks
        self._pool = ThreadPoolExecutor(1)
        self.steps = 0
        self._done: Future[None] = self._pool.submit(self._serve)

    def _serve(self) -> None:
        socks = []
        for number in range(self._workers):
            sock, _ = self._listener.accept()
            plain = PlainSocket(sock)
            assert plain.receive()[0] == 1
            plain.send(struct.pack("<BII", 2, number, self._workers))
            socks.append(plain)
        while self._one_step(socks):
            self.steps += 1
        for plain in socks:
            plain.sock.close()

    def _one_step(self, socks: list[PlainSocket]) -> bool:
        for block in reversed(range(self._blocks)):
            heads = []
            for plain in socks:
                try:
                    heads.append(plain.receive())
                except AssertionError:
                    assert block == self._blocks - 1 and not heads, "a worker left in the middle of a step"
                    return False
            head = struct.Struct("<BQIIII")
            shapes = [head.unpack_from(payload) for payload in heads]
            assert [each[:5] for each in shapes] == [
                (8, self.steps, number, block, self._blocks) for number in range(len(socks))
            ]
            at = head.size + 4 * shapes[0][5]
            mean = self._mean(heads, at)
            sizes = heads[0][head.size - 4 : at]
            for plain in socks:
                plain.send(struct.pack("<BQI", 9, self.steps, block) + sizes + floats(mean))
        for component in range(3):
            payloads = [plain.receive() for plain in socks]
            for number, payload in enumerate(payloads):
                assert struct.unpack_from("<BQIB", payload) == (10, self.steps, number, component)
            mean = self._mean(payloads, 14)
            for plain in socks:
                plain.send(struct.pack("<BQB", 11, self.steps, component) + floats(mean))
        return True

    def _mean(self, payloads: list[bytes], at: int) -> npt.NDArray[np.float32]:
        (count,) = struct.unpack_from("<Q", payloads[0], at)
        return sequential_mean([np.frombuffer(payload, "<f4", count, at + 8) for payload in payloads])

    def __enter__(self) -> PlainGradientServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._done.result(SECONDS)
        self._pool.shutdown()
