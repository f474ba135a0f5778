"""Reads a configuration: presets, then a YAML file, then dotted overrides; later values win.

An error names the key, the value and what is allowed.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from andon.config.finetune import FinetuneConfig
from andon.config.presets import with_preset
from andon.config.schema import Config, RunSettings
from andon.errors import UserError, shown

LISTS = ("data.corpus", "data.files", "lora.targets")
"""Keys whose values are separated by commas."""
C = TypeVar("C", bound=RunSettings)


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file and dotted overrides on top of the presets."""
    return build(read_yaml(path) if path else {}, overrides or {})


def load_run(path: Path) -> RunSettings:
    """Read the config.yaml of a run of either kind."""
    if not path.exists():
        cause = "It has no config.yaml: a script's run has none, and any other gets it with its first step"
        cause = cause if path.parent.is_dir() else "There is no such folder"
        remedy = "Name the folder of a run of `andon train` or `andon finetune`: `andon status` lists them"
        raise UserError(f"{path.parent} has no configuration of a run", cause, remedy)
    values = read_yaml(path)
    return validate(values, FinetuneConfig) if is_finetuning(values) else build(values, {})


def is_finetuning(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of `andon finetune`."""
    return "lora" in values


def build(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Build a configuration of `andon train` from nested values and dotted overrides, on top of the presets."""
    return validate(with_preset(merge(values, overrides, Config)), Config)


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any], schema: type[RunSettings]) -> dict[str, Any]:
    """Put dotted overrides into nested values."""
    nested: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in overrides.items():
        check_key(key, schema)
        section, _, name = key.rpartition(".")
        target = nested.setdefault(section, {}) if section else nested
        if not isinstance(target, dict):
            what = f"{section} = {shown(target)} is not a section"
            raise UserError(what, f"{key} is given too", "Remove one of them")
        target[name] = value
    return nested


def validate(nested: Mapping[str, Any], schema: type[C]) -> C:
    """Turn nested values into a checked configuration; an error names the key."""
    try:
        return schema.model_validate(nested)
    except ValidationError as error:
        raise _explain(error, schema) from None


def keys(schema: type[RunSettings] = Config) -> dict[str, str]:
    """Every key with its help text."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
        for attribute, field in section.model_fields.items():
            name = field.alias or attribute
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.description or ""

    return dict(walk(schema, ""))


class UsageError(UserError):
    """An option that does not exist, or has no value: the command ends with 2."""


def check_key(key: str, schema: type[RunSettings] = Config) -> None:
    """Raise an error for an unknown key; it suggests the keys that are meant, if some are similar."""
    known = keys(schema)
    if key in known:
        return
    hint = f"Did you mean {' or '.join(near)}?" if (near := _similar(key, known)) else "No key has a similar name"
    if section := [name for name in known if name.startswith(f"{key}.")]:
        hint = f"It is a section: its keys are {', '.join(section)}"
    raise UserError(f"There is no configuration key '{key}'", hint, f"{show_command(schema)} lists all keys")


def _similar(key: str, known: Mapping[str, str]) -> list[str]:
    """The keys with the same last part; or else the section or the key with the most similar name."""
    parts: dict[str, list[str]] = {}
    for name in known:
        section, _, last = name.rpartition(".")
        parts.setdefault(last, []).append(name)
        parts[name] = [name]
        parts |= {section: [section]} if section else {}
    for each in (key.rpartition(".")[2], *difflib.get_close_matches(key, parts, n=1, cutoff=0.7)):
        if each in parts:
            return parts[each]
    return []


def show_command(schema: type[RunSettings]) -> str:
    """The command that prints all keys of a kind of configuration."""
    return "`andon config show`" if schema is Config else "`andon config show --finetune`"


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error.strerror), "Check the path of the configuration") from None
    except Exception as error:  # PyYAML's parsers of numbers, dates and tags raise many kinds of errors
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} is not valid YAML", cause, "`andon config show` prints a valid file") from None
    if not isinstance(values, dict | None):
        raise UserError(f"{path} is not a configuration", "The top level must be keys", "Try `andon config show`")
    return _nested(values or {}, path)


def _nested(values: dict[Any, Any], path: Path) -> dict[str, Any]:
    """The values with those of dotted keys, such as `train.steps`, in their sections."""
    result = {key: value for key, value in values.items() if "." not in str(key)}
    for key, value in values.items():
        section, dot, name = str(key).rpartition(".")
        if not dot:
            continue
        target = result.setdefault(section, {})
        if not isinstance(target, dict) or name in target:
            raise UserError(f"{path} gives {key} twice", f"Once by its full name, once under {section}", "Remove one")
        result[section] = {**target, name: value}
    return result


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses keys given twice, and aliases: a few lines of them can expand to more values than fit
    in memory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = key.value, key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"line {line} gives {name} again, after line {lines[name]}: remove one")
            lines[name] = line
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias is not allowed: write its value")
        return super().compose_node(parent, index)


def _explain(error: ValidationError, schema: type[RunSettings]) -> UserError:
    """Turn pydantic's first error into one that names the key, the value and the allowed values."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    if first["type"] == "extra_forbidden":
        try:
            check_key(key, schema)
        except UserError as unknown:
            return unknown
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    if not key or first["type"] == "value_error":
        remedy = f"Change one of the values: {show_command(schema)} prints them"
        return UserError(f"{message}{more}", f"The configuration is not valid{' at ' + key if key else ''}", remedy)
    return UserError(f"{key} = {shown(first['input'])} is not valid{more}", message, _help_for(key, schema))


def _help_for(key: str, schema: type[RunSettings]) -> str:
    text = keys(schema).get(key, "")
    return f"{key}: {text}" if text else f"{show_command(schema)} lists all keys"


def parse_arguments(arguments: Sequence[str], schema: type[RunSettings] = Config) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into positional arguments and overrides (`--key value`, `--key=value`)."""
    positional: list[str] = []
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            if argument.startswith("-") and argument != "-":
                remedy = f"Options begin with two hyphens; a file of that name is ./{argument}"
                raise UsageError(
                    f"{argument} is not an option", f"{show_command(schema)} lists all keys, which are options", remedy
                )
            positional.append(argument)
            continue
        key, equals, value = argument[2:].partition("=")
        key = {"compile": "train.compile"}.get(key, key)
        try:
            check_key(key, schema)
        except UserError as error:
            raise UsageError(*error.args) from None
        if key == "train.compile" and not equals and (not rest or rest[0].lower() not in ("true", "false")):
            value = "true"
        elif not equals:
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"--{key} needs a value", _help_for(key, schema), f"Write --{key}=VALUE")
            value = rest.pop(0)
        if key == "fault":
            overrides.setdefault(key, []).append(value)
        else:
            overrides[key] = value.split(",") if key in LISTS else value
    return positional, overrides
