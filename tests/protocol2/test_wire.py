"""C-WIRE-002: every message to the byte, and nothing but valid messages."""

from __future__ import annotations

import struct
from dataclasses import fields

import numpy as np
import pytest

from andon.protocol2.wire import messages
from andon.protocol2.wire.extension import EXTENDED, Abilities, AveragedPiece, GradientPiece, Halted, WorkerLost
from andon.protocol2.wire.heads import Head, decode_head, decode_tail
from andon.transport.base import ProtocolError
from andon.transport.tcp import frames as wire

VECTORS = {
    "00000011 01 01000000 77 01000000 03000000 637075": messages.JoinRequest("w", 1, "cpu"),
    "00000009 02 00000000 02000000": messages.JoinAccepted(0, 2),
    "00000001 07": messages.Shutdown(),
    "00000019 03 0500000000000000 0a00000000000000 1400000000000000": messages.ShardAssignment(5, 10, 20),
    "0000000e 06 01000000 6e 0100000000000000": messages.Heartbeat("n", 1),
}
EVERY = {**wire.TRANSPORT, **EXTENDED}
FLOATS = np.array([1.5, -2.0, 3.25], np.float32)
MESSAGES: list[wire.Message] = [
    *VECTORS.values(),
    messages.JoinRequest("Wörker №1", 2**32 - 1, ""),
    messages.GradientPayload(2**64 - 1, 3, FLOATS, 0.5, 7, 9),
    messages.GradientPayload(0, 0, FLOATS[:0], 0.0, 0, 0),
    messages.AveragedGradient(1, FLOATS, 0.25),
    messages.BlockGradientPayload(1, 2, 3, 24, (1, 2), FLOATS),
    messages.AveragedBlockGradient(1, 3, (1, 2), FLOATS),
    messages.NonBlockGradientPayload(1, 2, 0, FLOATS),
    messages.AveragedNonBlockGradient(1, 2, FLOATS),
    Abilities(1024),
    WorkerLost(1, "gone"),
    Halted(3, "NaN"),
    GradientPiece(1, 2, 8, 3, 24, (4, 2), 3, 6, FLOATS, 0.5, 1, 2),
    AveragedPiece(1, 8, 3, 3, FLOATS, 0.0),
    wire.Hello(1, 4, 3, "data", "nonce", "proof"),
    wire.Challenge("nonce"),
    wire.Accepted("proof"),
    wire.Operation("all-reduce", 10, "float32", (0, 5, 10), 2, (0, 1, 2)),
    wire.Alive(7),
    wire.Broken("lost", 1, "gone"),
    wire.Leaving(),
]


def same(one: wire.Message, other: wire.Message) -> bool:
    return type(one) is type(other) and all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(one)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("text", VECTORS)
def test_the_vectors_of_the_specification(text: str) -> None:
    assert wire.frame(VECTORS[text]) == bytes.fromhex(text)


def test_a_gradient_payload_is_laid_out_as_specified() -> None:
    expected = struct.pack("<BQIQ3ffQQ", 4, 11, 1, 3, 1.5, -2.0, 3.25, 0.5, 7, 9)
    frame = wire.frame(messages.GradientPayload(11, 1, FLOATS, 0.5, 7, 9))
    assert frame == struct.pack(">I", len(expected)) + expected


def test_block_gradients_are_laid_out_as_specified() -> None:
    payload = struct.pack("<BQIIIIIIQ3f", 8, 11, 1, 2, 24, 2, 1, 2, 3, 1.5, -2.0, 3.25)
    assert wire.frame(messages.BlockGradientPayload(11, 1, 2, 24, (1, 2), FLOATS))[4:] == payload
    averaged = struct.pack("<BQIIIIQ3f", 9, 11, 2, 2, 1, 2, 3, 1.5, -2.0, 3.25)
    assert wire.frame(messages.AveragedBlockGradient(11, 2, (1, 2), FLOATS))[4:] == averaged


def test_non_block_gradients_are_laid_out_as_specified() -> None:
    payload = struct.pack("<BQIBQ3f", 10, 11, 1, 2, 3, 1.5, -2.0, 3.25)
    assert wire.frame(messages.NonBlockGradientPayload(11, 1, 2, FLOATS))[4:] == payload
    averaged = struct.pack("<BQBQ3f", 11, 11, 2, 3, 1.5, -2.0, 3.25)
    assert wire.frame(messages.AveragedNonBlockGradient(11, 2, FLOATS))[4:] == averaged


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: wire.Message) -> None:
    frame = wire.frame(message)
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert same(wire.decode(frame[4:], EVERY), message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_is_refused(message: wire.Message) -> None:
    payload = wire.frame(message)[4:]
    for length in range(len(payload)):
        with pytest.raises(ProtocolError, match="cut short"):
            wire.decode(payload[:length], EVERY)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_bytes_too_many_are_refused(message: wire.Message) -> None:
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        wire.decode(wire.frame(message)[4:] + b"\0", EVERY)


def test_floats_are_views_and_not_copies() -> None:
    payload = bytearray(wire.frame(messages.AveragedGradient(1, FLOATS, 0.0))[4:])
    message = wire.decode(payload, EVERY)
    assert isinstance(message, messages.AveragedGradient)
    struct.pack_into("<f", payload, 17, 99.0)
    assert message.gradients[0] == 99.0


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(ProtocolError, match="0x0c"):
        wire.decode(b"\x0c", EVERY)
    with pytest.raises(ProtocolError, match="cut short"):
        wire.decode(b"", EVERY)


def test_text_that_is_not_utf_8_is_refused() -> None:
    payload = wire.frame(messages.Heartbeat("node", 1))[4:].replace(b"node", b"\xff\xfeab")
    with pytest.raises(ProtocolError, match="UTF-8"):
        wire.decode(payload, EVERY)


def test_a_count_beyond_the_payload_is_refused_before_anything_is_allocated() -> None:
    for payload in (
        struct.pack("<BQQ", 5, 1, 2**64 - 1) + bytes(8),
        struct.pack("<BQIIIIIQ", 8, 1, 0, 0, 1, 2**32 - 1, 1, 0),
        struct.pack("<BI", 1, 2**32 - 1) + b"w",
    ):
        with pytest.raises(ProtocolError, match="cut short"):
            wire.decode(payload, EVERY)


def test_a_gradient_above_the_cap_of_version_2_is_not_sent() -> None:
    with pytest.raises(ValueError, match="100,000,000"):
        wire.encode(messages.AveragedGradient(1, np.empty(25_000_000, np.float32), 0.0))


@pytest.mark.parametrize(
    "message", [message for message in MESSAGES if message.tag in EXTENDED], ids=lambda message: type(message).__name__
)
def test_a_head_says_how_much_of_it_is_missing_and_then_what_follows(message: wire.Message) -> None:
    payload = wire.frame(message)[4:]
    needed: int | Head = 0
    while isinstance(needed, int):
        needed = decode_head(payload[:needed], len(payload))
    floats = getattr(message, "gradients", None)
    assert needed.message is type(message)
    assert needed.count == (0 if floats is None else len(floats))
    if needed.tail:
        values = [getattr(message, field.name) for field in fields(message)]  # type: ignore[arg-type]
        assert decode_tail(needed.message, payload[-needed.tail :]) == tuple(values[len(needed.values) + 1 :])


def test_a_head_whose_floats_do_not_fill_the_frame_is_refused() -> None:
    payload = wire.frame(messages.GradientPayload(1, 0, FLOATS, 0.5, 1, 1))[4:]
    for length in (len(payload) - 1, len(payload) + 4):
        with pytest.raises(ProtocolError, match="announces 3 floats"):
            decode_head(payload[:21], length)
