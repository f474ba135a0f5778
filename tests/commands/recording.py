"""A recording of a real terminal as one animated SVG, which needs neither a network nor a script to be seen.

A *screen* follows what a program writes, as a terminal does; only what rich writes is understood. A *frame* is what the
screen showed from one moment to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple

CHARACTER, LINE, EDGE, BAR = 8.4, 19.0, 14.0, 30.0
COLORS = ["#6e7681", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#e6edf3"]
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)

UNFINISHED = re.compile(r"\x1b(\[[?0-9;]*)?$")


class Style(NamedTuple):
    """How a character looks."""

    color: str = "#c9d1d9"
    bold: bool = False
    dim: bool = False


class Screen:
    """Follows what a program writes."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._lines: list[list[tuple[str, Style]]] = [[]]
        self._line, self._column, self._style = 0, 0, Style()
        self._rest = ""

    def feed(self, text: str) -> None:
        """What the program has written."""
        text, self._rest = self._rest + text, ""
        if cut := UNFINISHED.search(text):
            text, self._rest = text[: cut.start()], cut[0]
        for found in CONTROL.finditer(text):
            numbers, kind, move, plain = found.groups()
            if plain:
                self._put(plain)
            elif move == "\r":
                self._column = 0
            elif move:
                self._line += 1
                self._grow()
            elif kind == "A":
                self._line = max(0, self._line - int(numbers or 1))
            elif kind == "K":
                self._lines[self._line] = [] if numbers == "2" else self._lines[self._line][: self._column]
            elif kind == "m":
                self._look([int(number or 0) for number in numbers.split(";")])

    def visible(self) -> tuple[tuple[tuple[str, Style], ...], ...]:
        """The lines that a person sees."""
        return tuple(tuple(line) for line in self._lines[-self.rows :])

    def _grow(self) -> None:
        while len(self._lines) <= self._line:
            self._lines.append([])

    def _put(self, text: str) -> None:
        for character in text:
            if self._column == self.columns:
                self._line, self._column = self._line + 1, 0
                self._grow()
            line = self._lines[self._line]
            line += [(" ", Style())] * (self._column + 1 - len(line))
            line[self._column] = (character, self._style)
            self._column += 1

    def _look(self, codes: list[int]) -> None:
        while codes:
            code, *codes = codes
            if code == 0:
                self._style = Style()
            elif code in (1, 2):
                self._style = self._style._replace(bold=code == 1, dim=code == 2)
            elif code == 22:
                self._style = self._style._replace(bold=False, dim=False)
            elif code == 39:
                self._style = self._style._replace(color=Style().color)
            elif 30 <= code < 38 or 90 <= code < 98:
                self._style = self._style._replace(color=COLORS[code % 10])
            elif code == 38 and codes[:1] == [5]:
                self._style, codes = self._style._replace(color=_indexed(codes[1])), codes[2:]
            elif code == 38:
                self._style = self._style._replace(color="#{:02x}{:02x}{:02x}".format(*codes[1:4]))
                codes = codes[4:]


def _indexed(number: int) -> str:
    """A color of the table of 256."""
    if number < 16:
        return COLORS[number % 8]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    steps = [0, 95, 135, 175, 215, 255]
    return "#" + "".join(f"{steps[(number - 16) // base % 6]:02x}" for base in (36, 6, 1))


@dataclass(frozen=True)
class Frame:
    """What was seen from a moment on; `caption` is what happened elsewhere."""

    moment: float
    lines: tuple[tuple[tuple[str, Style], ...], ...]
    caption: str = ""


def render(frames: list[Frame], length: float, columns: int, rows: int, title: str) -> str:
    """An SVG that shows the frames one after the other, `length` seconds in all, again and again."""
    width, height = 2 * EDGE + columns * CHARACTER, BAR + EDGE + (rows + 1) * LINE
    known: dict[tuple[tuple[str, Style], ...], int] = {}
    shown, moves = [], []
    for number, frame in enumerate(frames):
        begin = 100 * frame.moment / length
        end = 100 * frames[number + 1].moment / length if number + 1 < len(frames) else 100.0
        moves.append(f"@keyframes k{number}{{0%{{opacity:0}}{begin:.2f}%{{opacity:1}}{end:.2f}%,100%{{opacity:0}}}}")
        moves.append(f".k{number}{{animation-name:k{number}}}")
        used = [(row, known.setdefault(line, len(known))) for row, line in enumerate(frame.lines) if line]
        lines = "".join(f'<use href="#l{each}" y="{row * LINE:g}"/>' for row, each in used)
        note = f'<text class="note" x="{EDGE}" y="{(rows + 1) * LINE:g}">{escape(frame.caption)}</text>'
        shown.append(f'<g class="k k{number}">{lines}{note if frame.caption else ""}</g>')
    colors = {color: number for number, color in enumerate({style.color for line in known for _, style in line})}
    symbols = "".join(f'<g id="l{each}">{"".join(_runs(line, colors))}</g>' for line, each in known.items())
    style = f".k{{opacity:0;animation:{length:g}s step-end infinite}}" + "".join(moves)
    style += "text{font:14px ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace;white-space:pre}"
    style += "".join(f".c{number}{{fill:{color}}}" for color, number in colors.items())
    style += f".b{{font-weight:700}}.d{{opacity:.62}}.note{{fill:{COLORS[3]}}}.title{{fill:#8b949e;font-size:13px}}"
    style += f"@media(prefers-reduced-motion:reduce){{.k{{animation:none}}.k{len(frames) - 1}{{opacity:1}}}}"
    dots = "".join(f'<circle cx="{20 + 18 * i}" cy="17" r="5.5" fill="{c}"/>' for i, c in enumerate(COLORS[1:4]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style><defs>{symbols}</defs>"
        f'<rect width="{width:g}" height="{height:g}" rx="9" fill="#0d1117"/>{dots}'
        f'<text class="title" x="{width / 2:g}" y="22" text-anchor="middle">{escape(title)}</text>'
        f'<g transform="translate(0 {BAR})">{"".join(shown)}</g></svg>\n'
    )


def _runs(line: tuple[tuple[str, Style], ...], colors: dict[str, int]) -> Iterator[str]:
    """Texts of one style each, at their place, as wide as in a terminal whatever the font."""
    column = 0
    for style, group in groupby(line, lambda cell: cell[1]):
        text = "".join(character for character, _ in group)
        if text.strip():
            kind = f"c{colors[style.color]}" + " b" * style.bold + " d" * style.dim
            before = len(text) - len(text.lstrip())
            place = f'x="{EDGE + (column + before) * CHARACTER:.1f}" y="{LINE:g}"'
            width = len(text.strip()) * CHARACTER
            yield f'<text class="{kind}" {place} textLength="{width:.1f}">{escape(text.strip())}</text>'
        column += len(text)
