"""`andon bench transport`: every transport against gloo, in one run on this machine.

A row is one transport, number of ranks and size: the median time of an all-reduce, its bus bandwidth (the
bytes that a ring would move per rank, 2(N-1)/N of the vector, per second), the processor time that all ranks
together spend per GB of vector, and the ratio of gloo's time to it. The slowest rank counts. Two bounds of
the machine are measured with it: a plain memory copy, and a bare full-duplex TCP connection. All sockets have
the same congestion control (`andon.bench.link`).
"""

import json
import statistics
import threading
from dataclasses import asdict, dataclass

from andon.bench.bounds import Bounds, measure_bounds
from andon.bench.ranks import run_ranks
from andon.errors import UserError
from andon.transport.base import TRANSPORTS

MB = 1 << 20
SIZES = (64 << 10, 1 * MB, 16 * MB, 64 * MB, 256 * MB)
MEAN_FROM = 1 * MB  # geometric means leave out what is smaller: it measures latency


@dataclass
class Row:
    """One transport, number of ranks and size."""

    transport: str
    ranks: int
    mb: float
    ms: float
    gloo_ms: float
    ratio: float
    bus_gb_s: float
    cpu_s_per_gb: float


def run(transports: list[str], ranks: list[int], sizes: list[int], repetitions: int = 7) -> tuple[list[Row], Bounds]:
    """Measure every transport and gloo, for each number of ranks and size in bytes."""
    bounds = measure_bounds()
    rows = []
    for count in ranks:
        for size, timings in _run_ranks(transports, count, sizes, repetitions).items():
            gloo_ms = 1e3 * statistics.median(seconds for seconds, _ in timings["gloo"])
            for name, samples in timings.items():
                ms = 1e3 * statistics.median(seconds for seconds, _ in samples)
                gigabytes = size / 1e9
                bus = 2 * (count - 1) / count * gigabytes / (ms / 1e3)
                processor = statistics.median(processor for _, processor in samples) / gigabytes
                rows.append(Row(name, count, size / MB, ms, gloo_ms, gloo_ms / ms, bus, processor))
    return rows, bounds


def means(rows: list[Row]) -> dict[tuple[str, int], float]:
    """The geometric mean of the ratios over the sizes from 1 MB, per transport and number of ranks."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.mb * MB >= MEAN_FROM:
            ratios.setdefault((row.transport, row.ranks), []).append(row.ratio)
    return {key: statistics.geometric_mean(values) for key, values in ratios.items()}


def main(
    transports: list[str], ranks: list[int], sizes: list[int], repetitions: int = 7, as_json: bool = False
) -> None:
    """Measure and print: a table for people, or one JSON row per line for scripts."""
    rows, bounds = run(transports, ranks, sizes, repetitions)
    if as_json:
        for row in rows:
            print(json.dumps({**asdict(row), **asdict(bounds)}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="all-reduce, f32, one thread per rank")
    for heading in ("ranks", "MB", "transport", "ms", "bus GB/s", "CPU s/GB", "× gloo"):
        table.add_column(heading, justify="left" if heading == "transport" else "right")
    for row in rows:
        cells = (f"{row.ms:.3f}", f"{row.bus_gb_s:.2f}", f"{row.cpu_s_per_gb:.2f}", f"{row.ratio:.2f}")
        table.add_row(str(row.ranks), f"{row.mb:g}", row.transport, *cells)
    console = Console()
    console.print(table)
    for (name, count), ratio in means(rows).items():
        console.print(f"{name}, {count} ranks: {ratio:.2f} × gloo, geometric mean over sizes from 1 MB")
    console.print(
        f"bounds: memory copy {bounds.copy_gb_s:.1f} GB/s, bare full-duplex socket "
        f"{bounds.socket_gb_s:.2f} GB/s each way"
    )


def parse_size(text: str) -> int:
    """Bytes of a size such as 64KB, 1MB or 1.5GB."""
    units = {"KB": 1 << 10, "MB": MB, "GB": 1 << 30}
    number, unit = text[:-2], text[-2:].upper()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{text!r} is not a size", "sizes are written like 64KB, 1MB or 1.5GB", "try --sizes 64KB,1MB,16MB"
        ) from error


def _run_ranks(
    transports: list[str], ranks: int, sizes: list[int], repetitions: int
) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Per size and transport: seconds of the slowest rank and processor seconds of all, per repetition."""
    servers = {name: _serve_star(ranks) for name in transports if TRANSPORTS[name.partition(":")[0]].needs_server}
    task = {"transports": transports, "sizes": sizes, "repetitions": repetitions, "servers": servers}
    by_rank = run_ranks("andon.bench.transport_rank", ranks, task)
    return {
        size: {
            name: [
                (max(seconds for seconds, _ in turn), sum(processor for _, processor in turn))
                for turn in zip(*(timings[str(size)][name] for timings in by_rank), strict=True)
            ]
            for name in ["gloo", *transports]
        }
        for size in sizes
    }


def _serve_star(ranks: int) -> int:
    """Start the server of a star in this process, which is idle while ranks measure; its port."""
    from andon.transport.tcp.star_server import StarServer

    server = StarServer(("127.0.0.1", 0), ranks, timeout=60.0)
    threading.Thread(target=server.serve, daemon=True).start()
    return server.address[1]
