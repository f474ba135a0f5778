"""Makes text and numbers from untrusted files harmless: invisible and control characters are spelled out."""

import re
from typing import Any

from andon.errors import SPELLED_OUT

BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that change the direction of the text around them."""
HIDDEN = (0x200B, 0x2028, 0x2029, 0x2060, 0xFEFF)
TABLE = SPELLED_OUT | {code: f"\\u{code:04x}" for code in (*BIDI, *HIDDEN)}
MOST_CHARACTERS = 4_000
MOST_LEVELS = 8


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of a JSON value with harmless texts of limited length; numbers that are not finite become None."""
    if isinstance(value, str):
        cut = value[:MOST_CHARACTERS] + ("…" if len(value) > MOST_CHARACTERS else "")
        return cut.translate(TABLE)
    if isinstance(value, float | int | None):
        return value if value is None or abs(value) < 1e300 else None
    if depth == MOST_LEVELS:
        return None
    if isinstance(value, dict):
        return {plain(str(key)): plain(each, depth + 1) for key, each in value.items()}
    return [plain(each, depth + 1) for each in value] if isinstance(value, list | tuple) else None


def number(value: Any) -> float:
    """The value if it is a number, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    return float(value) if abs(value) < 1e300 else float("nan")


def integer(value: Any) -> int:
    """The value if it is an integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else 0


def rank_named(cause: str) -> int | None:
    """The rank that the text of a halt's cause names, if any."""
    found = re.search(r"\brank (\d{1,6})\b", cause)
    return int(found[1]) if found else None
