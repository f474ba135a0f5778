"""Python values as JSON that keeps their types: the options of an optimizer, the state of a scheduler."""

from collections import Counter, OrderedDict
from typing import Any

MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def to_json(value: Any) -> Any:
    """A value as JSON; a type that JSON does not have is an object that names it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)  # subclasses are refused, because a named tuple would come back without its names
    if kind in (list, tuple):
        return {kind.__name__: [to_json(each) for each in value]}
    for name, mapping in MAPPINGS.items():
        if kind is mapping:
            return {name: [[to_json(key), to_json(each)] for key, each in value.items()]}
    known = "numbers, texts, lists, tuples and dictionaries"
    raise TypeError(f"a {kind.__name__} cannot be saved, because its type would be lost: only {known} can")


def from_json(value: Any) -> Any:
    """The value of which `to_json` made this."""
    if not isinstance(value, dict):
        return value
    (kind, items), *_ = value.items()
    if kind in MAPPINGS:
        return MAPPINGS[kind]({from_json(key): from_json(each) for key, each in items})
    return (list if kind == "list" else tuple)(from_json(each) for each in items)
