"""Writing the files of a checkpoint: every byte is hashed once, while it is written in chunks.

The tensor files are safetensors: eight bytes with the length of a JSON header, the header (padded to eight bytes), then
the tensors one after another. Writing a file returns its *record* (`andon.checkpoint.disk.manifest`).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from andon.checkpoint.disk.manifest import Record
from andon.integrity.fingerprint import as_bytes

CHUNK_BYTES = 8 << 20
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
At = Callable[[str], None]
"""Called with the name of each place where an injected fault or a cancellation may stop a save, by an exception."""


def tensor_blake3(tensor: Tensor) -> str:
    """BLAKE3 of a tensor's bytes."""
    return blake3(as_bytes(tensor)).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], known: Mapping[str, str], at: At) -> Record:
    """Write a safetensors file and wait until it is on disk; tensors in `known` must have these digests."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places: dict[str, tuple[int, int, str]] = {}

    def chunks() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        end = 8 + len(text)
        for name, tensor in tensors.items():
            start, data, digest = end, as_bytes(tensor), blake3()
            end += len(data)
            for lo in range(0, len(data), CHUNK_BYTES):
                chunk = data[lo : lo + CHUNK_BYTES]
                digest.update(chunk)
                yield chunk
            places[name] = (start, end, digest.hexdigest())
            if known.get(name, places[name][2]) != places[name][2]:
                raise OSError(f"{name} has changed in memory since it was copied")

    size, digest = _write(path, chunks(), at)
    return Record(size, digest, places)


def write_text(path: Path, text: str, at: At) -> Record:
    """Write a small file and wait until it is on disk."""
    return Record(*_write(path, [memoryview(text.encode())], at))


def _write(path: Path, chunks: Iterable[memoryview], at: At) -> tuple[int, str]:
    """Write a file and wait until it is on disk; returns its size and BLAKE3."""
    size, digest = 0, blake3()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in chunks:
            size += len(chunk)
            digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(descriptor, chunk) :]
            at("write")
        at("sync")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def record_of(path: Path) -> Record:
    """The record of a file that another library has written."""
    places: dict[str, tuple[int, int, str]] = {}
    whole = blake3()
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            header = file.read(8)
            header += file.read(int.from_bytes(header, "little"))
            whole.update(header)
            fields = json.loads(header[8:])
            fields.pop("__metadata__", None)
            for name, field in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
                start, stop = (len(header) + offset for offset in field["data_offsets"])
                digest = blake3()
                for lo in range(start, stop, CHUNK_BYTES):
                    chunk = file.read(min(CHUNK_BYTES, stop - lo))
                    digest.update(chunk)
                    whole.update(chunk)
                places[name] = (start, stop, digest.hexdigest())
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
        return Record(file.tell(), whole.hexdigest(), places)
