"""The manifest of a checkpoint, and its verification: only what was verified is loaded (C-CKPT-001).

`manifest.json` is written last. It holds the *record* of every other file (its size and BLAKE3, and the position and
BLAKE3 of each tensor in it), the digest of every unit that all ranks agreed on, and a BLAKE3 of itself. It must be byte
for byte what `render` makes of its content, so that a flipped bit in white space is found too. A checkpoint is *good*
when its manifest is, and every file has the recorded size and digest. Verifying takes constant memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from andon.checkpoint.disk.listing import step_of
from andon.errors import UserError

NAME = "manifest.json"
FORMAT = 1
REQUIRED = ("model.safetensors", "state.json")
ADAPTER = "adapter_model.safetensors"
"""The file that the folder of an adapter has in place of the model."""
MAX_BYTES = 256 << 20  # of a manifest
CHUNK_BYTES = 4 << 20
Progress = Callable[[int], None]
"""Called with the number of bytes that have been verified since the last call."""


@dataclass(frozen=True)
class Damage:
    """What is wrong with a checkpoint: the file, the tensor (or nothing), and how it is damaged."""

    file: str
    tensor: str
    how: str

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        return f"{self.file}{tensor}: {self.how}"


class Damaged(Exception):
    """A checkpoint is not what was saved."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


@dataclass(frozen=True)
class Record:
    """What a file must be: size, BLAKE3, and (first byte, end, BLAKE3) of each tensor in it."""

    size: int
    blake3: str
    tensors: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        fields: dict[str, Any] = {"size": self.size, "blake3": self.blake3}
        if self.tensors:
            fields["tensors"] = {name: list(place) for name, place in self.tensors.items()}
        return fields


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    step: int
    files: Mapping[str, Record]
    units: Mapping[str, str]
    digest: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def tensors(self) -> Iterator[tuple[str, str, str]]:
        """(file, tensor, digest) of every tensor."""
        for name, file in self.files.items():
            for tensor, (_, _, digest) in file.tensors.items():
                yield name, tensor, digest


def render(step: int, files: Mapping[str, Any], units: Mapping[str, str]) -> bytes:
    """The bytes of a manifest."""
    body = {"format": FORMAT, "step": step, "files": files, "units": units}
    digest = blake3(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**body, "blake3": digest}, indent=1).encode() + b"\n"


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and check it, but not the files; `Damaged` if it is not what was written."""
    path = folder / NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes are too many")
        data = path.read_bytes()
        body = json.loads(data)
        digest = body.pop("blake3")
        whole = render(body["step"], body["files"], body["units"])
        if body["format"] != FORMAT or whole != data:
            raise ValueError("it is not what was written")
        files = {name: parse_record(name, fields) for name, fields in body["files"].items()}
    except OSError as error:
        raise Damaged(Damage(NAME, "", error.strerror or str(error))) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(Damage(NAME, "", "it is not what was written")) from None
    except ValueError as error:
        raise Damaged(Damage(NAME, "", str(error))) from None
    return Manifest(body["step"], files, body["units"], digest)


def parse_record(name: str, fields: Mapping[str, Any]) -> Record:
    """The record of a file from JSON; `ValueError`, `KeyError` or `TypeError` if it is none."""
    if name != Path(name).name or "\\" in name or name in (NAME, ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file")
    size, at = fields["size"], 0
    places: dict[str, tuple[int, int, str]] = {}
    for tensor, (lo, hi, digest) in fields.get("tensors", {}).items():
        if not (isinstance(lo, int) and isinstance(hi, int) and at <= lo <= hi <= size):
            raise ValueError(f"{tensor!r} cannot be at {lo} to {hi} in {name}")
        places[tensor] = (lo, hi, str(digest))
        at = hi
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{name} cannot have {size!r} bytes")
    return Record(size, str(fields["blake3"]), places)


def find_damage(folder: Path, progress: Progress = lambda count: None, sizes_only: bool = False) -> Iterator[Damage]:
    """Everything that is wrong with a checkpoint, as it is found; a good checkpoint yields nothing.

    With `sizes_only` it checks the manifest and the sizes of the files, and does not read them."""
    try:
        manifest = read(folder)
    except Damaged as error:
        yield error.damage
        return
    if step_of(folder) not in (-1, manifest.step):
        yield Damage(NAME, "", f"it is the manifest of checkpoint-{manifest.step}")
    for name in REQUIRED:
        if name not in manifest.files and not (name == "model.safetensors" and ADAPTER in manifest.files):
            yield Damage(name, "", "the manifest does not list it")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            yield Damage(path.name, "", "the manifest does not list it")
    for name, file in manifest.files.items():
        try:
            yield from _damage_of(folder / name, file, progress, sizes_only)
        except OSError as error:
            yield Damage(name, "", error.strerror or str(error))


def _damage_of(path: Path, expected: Record, progress: Progress, sizes_only: bool) -> Iterator[Damage]:
    with open(path, "rb", buffering=0) as file:
        size = path.stat().st_size
        if size != expected.size:
            cut = (tensor for tensor, (_, end, _) in expected.tensors.items() if end > size)
            yield Damage(path.name, next(cut, ""), f"it has {size:,} bytes, not {expected.size:,}")
        if size != expected.size or sizes_only:
            return
        whole, buffer, at, found = blake3(), memoryview(bytearray(CHUNK_BYTES)), 0, False
        for tensor, start, end, digest in _regions(expected):
            part = blake3()
            while at < end:
                count = file.readinto(buffer[: min(CHUNK_BYTES, end - at)]) or 0
                if not count:
                    yield Damage(path.name, tensor, f"it ends after {at:,} bytes")
                    return
                whole.update(buffer[:count])
                if tensor:
                    part.update(buffer[:count])
                at += count
                progress(count)
            if tensor and part.hexdigest() != digest:
                found = True
                yield Damage(path.name, tensor, f"bytes {start:,} to {end:,} are not what was saved")
        if whole.hexdigest() != expected.blake3 and not found:
            place = "its header is" if expected.tensors else "its bytes are"
            yield Damage(path.name, "", f"{place} not what was saved")


def _regions(file: Record) -> Iterator[tuple[str, int, int, str]]:
    """(tensor or nothing, start, end, digest) of every region, from the first byte of the file to the last."""
    at = 0
    for tensor, (lo, hi, digest) in file.tensors.items():
        if at < lo:
            yield "", at, lo, ""
        yield tensor, lo, hi, digest
        at = hi
    if at < file.size:
        yield "", at, file.size, ""


def verify(folder: Path, progress: Progress = lambda count: None) -> Manifest:
    """Verify every byte of a checkpoint; returns its manifest, or raises `Damaged` with the first damage."""
    for damage in find_damage(folder, progress):
        raise Damaged(damage)
    return read(folder)


def verify_named(folder: Path) -> Manifest | None:
    """Verify a checkpoint that the user has named, and refuse a damaged one; None: Andon did not write it."""
    if not (folder / NAME).exists() and not (folder / "state.json").exists():
        return None
    try:
        return verify(folder)
    except Damaged as error:
        raise damage_error(folder, str(error)) from error


def damage_error(folder: Path, how: str) -> UserError:
    """The error for a checkpoint that is damaged."""
    remedy = f"`andon checkpoint verify {folder}` shows all of it, `andon checkpoint ls {folder.parent}` the others"
    return UserError(f"{folder} is damaged", how, remedy)
