"""Python values as JSON that keeps their types: the options of an optimizer, the state of a scheduler."""

from collections import Counter
from typing import Any


def to_json(value: Any) -> Any:
    """A value as JSON; a type that JSON does not have is an object that names it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Counter():
            return {"counter": [[to_json(key), count] for key, count in value.items()]}
        case dict():
            return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [to_json(each) for each in value]}
    raise TypeError(f"a {type(value).__name__} cannot be saved: only numbers, texts, lists and dictionaries can")


def from_json(value: Any) -> Any:
    """The value of which `to_json` made this."""
    if not isinstance(value, dict):
        return value
    (kind, items), *_ = value.items()
    if kind in ("dict", "counter"):
        found = {from_json(key): from_json(each) for key, each in items}
        return Counter(found) if kind == "counter" else found
    return (tuple if kind == "tuple" else list)(from_json(each) for each in items)
