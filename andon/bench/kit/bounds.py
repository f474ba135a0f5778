"""Upper bounds of the machine: a plain memory copy, and a bare TCP connection with both directions busy.

The connection goes to a child process, `python -m andon.bench.kit.bounds PORT`. Each end sends from one thread and
receives in another.
"""

import socket
import subprocess
import sys
import threading
import time

SIZE_BYTES = 64 << 20
REPETITIONS = 5
START_SECONDS = 60.0


def measure_bounds() -> dict[str, float]:
    """GB/s, the connection each way; the best of several repetitions."""
    copy_seconds = min(_copy() for _ in range(REPETITIONS))
    return {"copy_gb_s": SIZE_BYTES / copy_seconds / 1e9, "socket_gb_s": SIZE_BYTES / _duplex() / 1e9}


def _copy() -> float:
    source, target = bytearray(b"1") * SIZE_BYTES, bytearray(b"0") * SIZE_BYTES
    started = time.perf_counter()
    target[:] = source
    return time.perf_counter() - started


def _duplex() -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(START_SECONDS)
        child = subprocess.Popen([sys.executable, "-m", "andon.bench.kit.bounds", str(listener.getsockname()[1])])
        with listener.accept()[0] as connection:
            seconds = _exchange(connection)
        child.wait()
        return seconds


def _exchange(connection: socket.socket) -> float:
    outgoing, incoming = bytes(SIZE_BYTES), bytearray(SIZE_BYTES)

    def receive() -> None:
        view = memoryview(incoming)
        while view:
            count = connection.recv_into(view)
            assert count, "the child process has closed the connection"
            view = view[count:]

    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        receiver = threading.Thread(target=receive)
        receiver.start()
        connection.sendall(outgoing)
        receiver.join()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as _connection:
        _exchange(_connection)
