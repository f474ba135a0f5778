"""Draws a curve as braille characters, or as a PNG without a drawing library: a PNG is four chunks and zlib."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from andon.board.curves import Floats, buckets, mean

WIDTH, HEIGHT, MARGIN = 1200, 600, 76  # pixels
DOT = 2  # pixels of a dot in a digit
PAPER, LINE, INK, POINT, GRID = (255, 254, 251), (38, 83, 196), (26, 25, 21), (194, 98, 10), (224, 221, 211)
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""
ROWS = "75557 26227 71747 71717 55711 74717 74757 71244 75757 75717 00002 00700 06742 00024"
DIGITS = dict(zip("0123456789.-e,", ROWS.split(), strict=True))
"""Five rows of three dots for each character of a number."""


def draw_text(console: Console, title: str, steps: Floats, values: Floats) -> None:
    """Print a curve as wide as the terminal."""
    columns, rows = max(20, min(console.width, 120) - 12), 16
    points = mean(values, buckets(len(values), 2 * columns))
    low, high = float(np.min(points)), float(np.max(points))
    span = high - low or 1.0
    cells = [[0] * columns for _ in range(rows)]
    before = None
    for x, value in enumerate(points.tolist()):
        y = round((high - value) / span * (4 * rows - 1))
        above, below = sorted((y, y if before is None else before))
        for each in range(above, below + 1):
            cells[each // 4][x // 2] |= BRAILLE[each % 4][x % 2]
        before = y
    console.print(title, markup=False, style="bold")
    for number, row in enumerate(cells):
        label = f"{high - span * number / (rows - 1):>10.4g}" if number % 5 == 0 else " " * 10
        console.print(f"{label} {''.join(chr(0x2800 + cell) for cell in row)}", markup=False, highlight=False)
    first, last = f"{steps[0]:,.0f}", f"{steps[-1]:,.0f}"
    console.print(f"{' ' * 11}{first}{last.rjust(max(1, columns - len(first)))}", markup=False, style="dim")


def draw_png(path: Path, title: str, curve: tuple[Floats, Floats], evals: Sequence[tuple[float, float]]) -> None:
    """Write a curve as a PNG, with validation as points; the title is in the file's metadata."""
    picture = np.full((HEIGHT, WIDTH, 3), PAPER, np.uint8)
    steps, values = curve
    starts = buckets(len(values), WIDTH - 2 * MARGIN)
    points, numbers = mean(values, starts), steps[starts]
    everything = np.append(points, [value for _, value in evals])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))

    def pixel(step: float, value: float) -> tuple[int, int]:
        x = MARGIN + (step - steps[0]) / max(1.0, steps[-1] - steps[0]) * (WIDTH - 2 * MARGIN - 1)
        y = MARGIN + (high - value) / ((high - low) or 1.0) * (HEIGHT - 2 * MARGIN - 1)
        return round(float(x)), round(float(y))

    for part in range(6):
        y = MARGIN + part * (HEIGHT - 2 * MARGIN - 1) // 5
        picture[y, MARGIN:-MARGIN] = GRID
        label = f"{high - (high - low) * part / 5:.4g}"
        _draw_number(picture, label, MARGIN - 12 - 4 * DOT * len(label), y - 2 * DOT)
        below = f"{steps[0] + (steps[-1] - steps[0]) * part / 5:,.0f}"
        x = MARGIN + part * (WIDTH - 2 * MARGIN) // 5
        _draw_number(picture, below, x - 2 * DOT * len(below), HEIGHT - MARGIN + 16)
    picture[HEIGHT - MARGIN, MARGIN:-MARGIN] = INK
    places = [pixel(float(step), float(value)) for step, value in zip(numbers, points, strict=True)]
    for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        xs = np.linspace(x0, x1, length + 1).round().astype(int)
        ys = np.linspace(y0, y1, length + 1).round().astype(int)
        for thick in (0, 1):
            picture[np.minimum(ys + thick, HEIGHT - 1), xs] = LINE
    for step, value in evals:
        x, y = pixel(step, value)
        picture[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = POINT
    path.write_bytes(png(picture, title))


def _draw_number(picture: npt.NDArray[np.uint8], number: str, left: int, top: int) -> None:
    """Draw a number into a picture."""
    for place, character in enumerate(number):
        for row, bits in enumerate(DIGITS.get(character, "00000")):
            for column in range(3):
                if int(bits) >> (2 - column) & 1:
                    x, y = max(0, left + DOT * (4 * place + column)), max(0, top + DOT * row)
                    picture[y : y + DOT, x : x + DOT] = INK


def png(picture: npt.NDArray[np.uint8], title: str) -> bytes:
    """Encode a picture."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    text = chunk(b"iTXt", b"Title\0\0\0\0\0" + title.encode("utf-8", "replace"))
    return b"\x89PNG\r\n\x1a\n" + header + text + chunk(b"IDAT", zlib.compress(rows, 6)) + chunk(b"IEND", b"")
