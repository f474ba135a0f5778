"""A checkpoint on disk, byte by byte: what is written when, what each file says, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from andon.engine.trainer import Trainer
from andon.run.records.events import Event
from tests.checkpoint.saving import quick_config, run_alone
from tests.kit import oracle
from tests.kit.runs import andon
from tests.kit.training import small_tokens

FILES = [
    *("config.json", "manifest.json", "model.safetensors", "optimizer-00000-of-00001.safetensors"),
    *("state.json", "tokenizer.json", "tokenizer_config.json"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one worker with checkpoints 1 to 6."""
    cwd = tmp_path_factory.mktemp("saved")
    (cwd / "text.txt").write_text(oracle.TEXT)
    code, output = andon("train", *oracle.OPTIONS, "--run.dir=run", cwd=cwd)
    assert code == 0, output
    return cwd / "run"


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoint 4 that a test may spoil."""
    copy: Path = shutil.copytree(run / "checkpoints" / "checkpoint-4", tmp_path / "checkpoint-4")
    return copy


def resume(checkpoint: Path) -> tuple[int, str]:
    """Go on from a checkpoint in a folder of its own."""
    cwd = checkpoint.parent
    (cwd / "text.txt").write_text(oracle.TEXT)
    return andon("train", *oracle.OPTIONS, "--run.dir=new", f"--resume={checkpoint}", cwd=cwd)


def write_manifest(checkpoint: Path, body: dict[str, Any]) -> None:
    """The manifest's bytes as its format has them: its own digest is that of the rest without blanks."""
    body.pop("blake3", None)
    digest = blake3(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({**body, "blake3": digest}, indent=1) + "\n")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return body


# What is on disk


def test_the_manifest_knows_every_file_its_size_and_its_digest(checkpoint: Path) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    body = read_manifest(checkpoint)
    assert (body["format"], body["step"]) == (1, 4)
    assert sorted([*body["files"], "manifest.json"]) == FILES
    for name, record in body["files"].items():
        data = (checkpoint / name).read_bytes()
        assert (record["size"], record["blake3"]) == (len(data), blake3(data).hexdigest())
        for lo, hi, digest in record.get("tensors", {}).values():
            assert blake3(data[lo:hi]).hexdigest() == digest
    before = (checkpoint / "manifest.json").read_bytes()
    write_manifest(checkpoint, body)
    assert (checkpoint / "manifest.json").read_bytes() == before


def test_the_digest_of_a_unit_is_over_the_names_and_digests_of_its_parameters(checkpoint: Path) -> None:
    body = read_manifest(checkpoint)
    tensors = body["files"]["model.safetensors"]["tensors"]
    assert list(body["units"]) == [*("lm_head", "model.norm", "model.layers.1", "model.layers.0", "model.embed_tokens")]
    for unit in ("lm_head", "model.norm", "model.embed_tokens"):
        text = f"{unit}.weight {tensors[f'{unit}.weight'][2]}\n"
        assert body["units"][unit] == blake3(text.encode()).hexdigest()


def test_the_moments_of_every_parameter_are_there_once(checkpoint: Path) -> None:
    tensors = read_manifest(checkpoint)["files"]["optimizer-00000-of-00001.safetensors"]["tensors"]
    sizes = {name: weight.numel() for name, weight in oracle.first_weights(7).items()}
    assert tensors.keys() == {
        f"{kind}.{name}[0:{size}]" for kind in ("first", "second") for name, size in sizes.items()
    }


def test_tensors_begin_on_eight_bytes_and_lie_where_the_header_says(checkpoint: Path) -> None:
    data = (checkpoint / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    places = read_manifest(checkpoint)["files"]["model.safetensors"]["tensors"]
    assert header.pop("__metadata__") == {"format": "pt"} and header.keys() == places.keys()
    for name, field in header.items():
        assert [8 + length + offset for offset in field["data_offsets"]] == places[name][:2]


def test_a_configuration_for_hugging_face_has_these_fields(checkpoint: Path) -> None:
    found = json.loads((checkpoint / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLM"] and found["model_type"] == "llama"
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [found[key] for key in sizes] == [257, 16, 2, 2, 1]
    assert (found["intermediate_size"], found["max_position_embeddings"], found["head_dim"]) == (24, 16, 8)
    assert (found["rms_norm_eps"], found["rope_theta"], found["eos_token_id"]) == (1e-5, 10_000.0, 256)


# What is refused


def test_bytes_that_were_appended_are_found(checkpoint: Path) -> None:
    for name in FILES:
        with open(checkpoint / name, "ab") as file:
            file.write(b"\0")
        code, output = andon("checkpoint", "verify", str(checkpoint), cwd=checkpoint.parent)
        assert code == 1 and name in output, output
        os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - 1)
    code, output = andon("checkpoint", "verify", str(checkpoint), cwd=checkpoint.parent)
    assert code == 0, output


def test_weights_that_are_not_those_the_ranks_agreed_on_are_refused(checkpoint: Path) -> None:
    """Every file has the digest that the manifest says, but one unit is not what was agreed on."""
    body = read_manifest(checkpoint)
    record, path = body["files"]["model.safetensors"], checkpoint / "model.safetensors"
    lo, hi, _ = record["tensors"]["model.norm.weight"]
    data = bytearray(path.read_bytes())
    data[lo] ^= 1
    path.write_bytes(data)
    record["blake3"] = blake3(data).hexdigest()
    record["tensors"]["model.norm.weight"] = [lo, hi, blake3(data[lo:hi]).hexdigest()]
    write_manifest(checkpoint, body)
    code, output = andon("checkpoint", "verify", str(checkpoint), cwd=checkpoint.parent)
    assert code == 0, output
    code, output = resume(checkpoint)
    assert code == 1 and "the weights of model.norm are not those that were saved" in output, output


def test_a_manifest_of_another_format_or_with_another_digest_is_refused(checkpoint: Path) -> None:
    good = (checkpoint / "manifest.json").read_text()
    body = read_manifest(checkpoint)
    write_manifest(checkpoint, {**body, "format": 2})
    assert resume(checkpoint)[0] == 1
    digest = body["blake3"]
    (checkpoint / "manifest.json").write_text(good.replace(digest, hashlib.sha256(b"").hexdigest()))
    assert resume(checkpoint)[0] == 1
    (checkpoint / "manifest.json").write_text(good)
    code, output = resume(checkpoint)
    assert code == 0, output


def test_moments_that_do_not_cover_a_parameter_are_refused(checkpoint: Path) -> None:
    body = read_manifest(checkpoint)
    tensors = body["files"]["optimizer-00000-of-00001.safetensors"]["tensors"]
    tensors["first.model.norm.weight[0:15]"] = tensors.pop("first.model.norm.weight[0:16]")
    body["files"]["optimizer-00000-of-00001.safetensors"]["tensors"] = dict(
        sorted(tensors.items(), key=lambda item: item[1][0])
    )
    write_manifest(checkpoint, body)
    code, output = resume(checkpoint)
    assert code == 1 and "does not have its 16 elements" in output, output


# The order in which it is written


def test_no_weight_changes_before_it_has_been_copied(tmp_path: Path) -> None:
    """Copying takes far longer than a step: what is saved is still one step's state, and the same as ever."""
    tokens, units = small_tokens(tmp_path / "cache"), []

    def copy_slowly(said: Event, trainer: Trainer) -> None:
        if said["event"] == "start":
            trainer.model.phases.on_enter = lambda place, step: time.sleep(0.01 * (place == "snapshot"))

    for name, on_event in (("quick", None), ("slow", copy_slowly)):
        run_alone(tokens, quick_config(tmp_path / name), *([on_event] if on_event else []))
        manifest = read_manifest(tmp_path / name / "checkpoints" / "checkpoint-2")
        units.append((manifest["units"], manifest["files"]["optimizer-00000-of-00001.safetensors"]["blake3"]))
    assert units[0] == units[1]


def test_files_are_on_disk_before_the_manifest_and_the_manifest_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure a checkpoint that has its name has its bytes, too."""
    tokens = small_tokens(tmp_path / "cache")
    calls: list[tuple[str, str]] = []
    at_rename: list[list[str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115
        fsync(descriptor)

    def recorded_rename(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == "checkpoint-4":
            at_rename.append(sorted(path.name for path in Path(source).iterdir()))
            calls.append(("rename", str(source)))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    run_alone(tokens, quick_config(tmp_path / "run", train__steps=4, checkpoint__every=4))
    assert at_rename == [FILES]
    (at,) = [index for index, (call, _) in enumerate(calls) if call == "rename"]
    temporary = calls[at][1]
    synced = [path for _, path in calls[:at]]
    for name in FILES:
        assert f"{temporary}/{name}" in synced, name
    last = max(synced.index(f"{temporary}/{name}") for name in FILES if name != "manifest.json")
    manifest, folder = synced.index(f"{temporary}/manifest.json"), synced.index(temporary)
    assert last < manifest < folder
    assert ("fsync", str(tmp_path / "run" / "checkpoints")) in calls[at:]
