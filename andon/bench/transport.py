"""`andon bench transport`: every transport against gloo, in one run on this machine.

A row is one transport, number of ranks and size. It has the median time of an all-reduce on the slowest rank, its bus
bandwidth (the bytes per second that a ring would move per rank, 2(N-1)/N of the vector), the processor time of all
ranks per GB of vector, and the ratio of gloo's time to its own. Two bounds of the machine are measured too: a plain
memory copy and a bare full-duplex TCP connection. All sockets have the same congestion control (`bench.kit.link`).
"""

import statistics
from typing import Any

from andon.bench.kit.bounds import measure_bounds
from andon.bench.kit.processes import run_ranks
from andon.bench.kit.report import ratio, show
from andon.bench.kit.servers import start_server
from andon.control.token import new_token
from andon.errors import UserError

MB = 1 << 20
MEAN_FROM = 1 * MB  # bytes; smaller vectors measure latency and are not in the geometric means


def run(transports: list[str], ranks: list[int], sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Measure every transport and gloo; returns a row for each number of ranks, size and transport."""
    rows = []
    for count in ranks:
        for size, timings in _run_ranks(transports, count, sizes, repetitions).items():
            gloo = [seconds for seconds, _ in timings["gloo"]]
            for name, samples in timings.items():
                seconds = [seconds for seconds, _ in samples]
                median, gigabytes = statistics.median(seconds), size / 1e9
                rows.append(
                    {
                        "transport": name,
                        "ranks": count,
                        "mb": size / MB,
                        "ms": 1e3 * median,
                        "gloo_ms": 1e3 * statistics.median(gloo),
                        "ratio": ratio(gloo, seconds),
                        "bus_gb_s": 2 * (count - 1) / count * gigabytes / median,
                        "cpu_s_per_gb": statistics.median(processor for _, processor in samples) / gigabytes,
                    }
                )
    return rows


def means(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The geometric mean of the ratios over the sizes from 1 MB, per transport and number of ranks."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["mb"] * MB >= MEAN_FROM:
            ratios.setdefault((row["transport"], row["ranks"]), []).append(row["ratio"])
    return {key: statistics.geometric_mean(values) for key, values in ratios.items()}


def main(transports: list[str], ranks: list[int], sizes: list[int], repetitions: int, as_json: bool) -> None:
    """Measure, and print the rows; JSON rows include the bounds."""
    bounds = measure_bounds()
    rows = run(transports, ranks, sizes, repetitions)
    notes = [
        f"{name}, {count} ranks: {mean:.2f} × gloo, geometric mean over sizes from 1 MB"
        for (name, count), mean in means(rows).items()
        if name != "gloo"
    ]
    notes.append("bounds: memory copy {copy_gb_s:.1f} GB/s, socket {socket_gb_s:.2f} GB/s each way".format(**bounds))
    rows = [{**row, **bounds} for row in rows] if as_json else rows
    show("all-reduce, f32, one thread per rank, against gloo", rows, as_json, notes)


def parse_size(text: str) -> int:
    """Parse a size such as 64KB, 1MB or 1.5GB into bytes."""
    units = {"KB": 1 << 10, "MB": MB, "GB": 1 << 30}
    number, unit = text[:-2], text[-2:].upper()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError) as error:
        cause = "Sizes are written like 64KB, 1MB or 1.5GB"
        raise UserError(f"{text!r} is not a size", cause, "For example --sizes 64KB,1MB,16MB") from error


def _run_ranks(
    transports: list[str], ranks: int, sizes: list[int], repetitions: int
) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Per size, transport and repetition: seconds of the slowest rank, processor seconds of all ranks."""
    token = new_token()
    servers = {name: port for name in transports if (port := start_server(name, ranks, token)) is not None}
    task = {"transports": transports, "sizes": sizes, "repetitions": repetitions, "servers": servers}
    by_rank = run_ranks("andon.bench.ranks.transport", ranks, task, token)
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
