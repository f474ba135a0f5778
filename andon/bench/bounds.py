"""What the machine can do at best: a plain memory copy, and a bare TCP connection with both directions busy.

The connection goes to a child process, `python -m andon.bench.bounds PORT BYTES`. Each end sends from one
thread and receives in another.
"""

import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

SIZE = 64 << 20


@dataclass
class Bounds:
    """In GB/s; the connection: each way."""

    copy_gb_s: float
    socket_gb_s: float


def measure_bounds(size: int = SIZE, repetitions: int = 5) -> Bounds:
    """Measure both; the best of several repetitions."""
    copy = min(_copy(size) for _ in range(repetitions))
    return Bounds(size / copy / 1e9, size / _socket_pair(size, repetitions) / 1e9)


def _copy(size: int) -> float:
    source, target = bytearray(b"1") * size, bytearray(b"0") * size
    started = time.perf_counter()
    target[:] = source
    return time.perf_counter() - started


def _socket_pair(size: int, repetitions: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "andon.bench.bounds", str(port), str(size), str(repetitions)]
        child = subprocess.Popen(command)
        with listener.accept()[0] as connection:
            seconds = _exchange(connection, size, repetitions)
        child.wait()
        return seconds


def _exchange(connection: socket.socket, size: int, repetitions: int) -> float:
    outgoing, incoming = bytes(size), bytearray(size)

    def receive() -> None:
        view = memoryview(incoming)
        while view:
            count = connection.recv_into(view)
            assert count, "the other end of the socket pair is gone"
            view = view[count:]

    best = float("inf")
    for _ in range(repetitions):
        started = time.perf_counter()
        receiver = threading.Thread(target=receive)
        receiver.start()
        connection.sendall(outgoing)
        receiver.join()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    _port, _size, _repetitions = map(int, sys.argv[1:])
    with socket.create_connection(("127.0.0.1", _port)) as _connection:
        _exchange(_connection, _size, _repetitions)
