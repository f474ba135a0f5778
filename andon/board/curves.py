"""Reduces curves of any length to a few hundred points. Each point is a bucket of steps, with its mean, lowest and
highest value, so that a spike of one step among a million is still visible."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = dict[str, list[float | None]]


def buckets(count: int, points: int) -> npt.NDArray[np.intp]:
    """Where each of at most `points` buckets of `count` rows begins."""
    edges = np.linspace(0, count, min(points, count) + 1).astype(np.intp)[:-1]
    return np.unique(edges)


def mean(values: Floats, starts: npt.NDArray[np.intp]) -> Floats:
    """The mean of the finite values of each bucket; NaN if it has none."""
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    count = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count)


def downsample(steps: Floats, columns: dict[str, Floats], points: int) -> Curve:
    """Reduce the columns to at most `points` buckets, `loss` and `grad_norm` with their bounds. The step of a bucket is
    its last one."""
    if not len(steps):
        return {"step": [], **{name: [] for name in columns}}
    starts = buckets(len(steps), points)
    last = np.append(starts[1:], len(steps)) - 1
    result = {"step": as_list(steps[last], 17)}
    for name, values in columns.items():
        result[name] = as_list(mean(values, starts))
        if name in ("loss", "grad_norm") and len(starts) < len(steps):
            finite = np.where(np.isfinite(values), values, np.nan)
            result[f"{name}_low"] = as_list(np.fmin.reduceat(finite, starts))
            result[f"{name}_high"] = as_list(np.fmax.reduceat(finite, starts))
    return result


def as_list(values: Floats, digits: int = 6) -> list[float | None]:
    """Numbers for JSON: rounded to significant digits, and None where not finite."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
