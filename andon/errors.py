"""Errors for people: what happened, the likely cause, what to try. And the exit codes.

Text from a corpus, a checkpoint or another host may hold control characters, which a terminal would obey: `harmless`
spells them out before the text is shown.
"""

from collections.abc import Iterable
from typing import Final

CONTROL: Final = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
SURROGATES: Final = range(0xD800, 0xE000)
"""Halves of a character: Python uses them for bytes that are not UTF-8, and they cannot be written."""
SPELLED_OUT: Final = {code: f"\\x{code:02x}" for code in CONTROL} | {code: f"\\u{code:x}" for code in SURROGATES}

EXIT_USER_ERROR = 1
EXIT_HALTED = 3
EXIT_STOPPED = 4
"""Stopped on request, and saved."""
EXIT_PEER_LOST = 117
"""A script's worker ends because another one has failed, which the launcher names instead."""


def worst(codes: Iterable[int]) -> int:
    """The exit code of a run from those of its workers: a halt before an error before a stop before 0."""
    order = {0: 0, EXIT_STOPPED: 1, EXIT_HALTED: 3}
    return max(codes, key=lambda code: order.get(code, 2), default=0)


def harmless(text: str) -> str:
    """Spell out the control characters of a text, except newline and tab."""
    return text.translate(SPELLED_OUT)


def sentence(text: object) -> str:
    """A text that begins with a capital letter."""
    return str(text)[:1].upper() + str(text)[1:]


def shown(value: object) -> str:
    """A value as errors show it; a long one is cut short."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}…"


class UserError(ValueError):
    """An error that the user can correct; the command line prints its three lines and exits with 1."""

    def __init__(self, what: str, cause: str, remedy: str) -> None:
        super().__init__(what, cause, remedy)
        self.what, self.cause, self.remedy = what, cause, remedy

    def __str__(self) -> str:
        return f"{self.what}\n{self.cause}\n{self.remedy}"
