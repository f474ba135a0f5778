"""The tokenizer gives back every text, and Hugging Face reads it the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from andon.data import tokenizer as module
from andon.data.stories import stories
from andon.data.tokenizer import Tokenizer, sample
from andon.errors import UserError

KINDS = ["bytes", "bpe"]
TEXTS = ["", "Once upon a time", "  a\r\n\n\tb  ", "naïve 日本語 🙂‍↔️\x00\ufffd", "it's <|endoftext|> x", "1234567"]


@cache
def made(kind: str) -> Tokenizer:
    return Tokenizer.bytes() if kind == "bytes" else Tokenizer.train(stories(0, 300), 600)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=200)
@given(text=st.text() | st.text("<|>endoftx '\n日"))
@example(text="it's <|endoftext|>")
def test_every_text_comes_back(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


@settings(derandomize=True, deadline=None)
@given(text=st.text().filter(lambda text: module.END not in text))
def test_ids_of_the_byte_tokenizer_are_the_bytes(text: str) -> None:
    assert made("bytes").encode(text) == list(text.encode())
    assert (made("bytes").vocab_size, made("bytes").end) == (257, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_reads_the_saved_folder_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    made(kind).save(tmp_path)
    for loader in (AutoTokenizer, PreTrainedTokenizerFast):
        theirs = loader.from_pretrained(tmp_path)
        assert theirs.eos_token_id == made(kind).end
        assert len(theirs) == made(kind).vocab_size
        for text in TEXTS:
            ids = made(kind).encode(text)
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_from_its_file_and_its_folder(kind: str, tmp_path: Path) -> None:
    made(kind).save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.digest() == made(kind).digest()
        assert (loaded.end, loaded.vocab_size) == (made(kind).end, made(kind).vocab_size)


def test_training_gives_the_same_tokenizer_with_any_number_of_threads() -> None:
    program = (
        "from andon.data.stories import stories; from andon.data.tokenizer import Tokenizer;"
        "print(Tokenizer.train(stories(0, 300), 600).digest())"
    )
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        output = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
        assert output.strip() == made("bpe").digest()


def test_a_vocabulary_that_the_text_does_not_support_is_smaller() -> None:
    assert 257 < Tokenizer.train(["some words, some words"], 5_000).vocab_size < 300


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    assert Tokenizer.train(["a b a b"], 257).vocab_size == 257
    with pytest.raises(UserError, match="of 256 is too small"):
        Tokenizer.train(["a b a b"], 256)


def test_the_end_token_of_a_given_tokenizer_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    llama = json.loads(made("bytes").to_json().replace(module.END, "</s>"))
    llama["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(llama))
    assert Tokenizer.load(file).end == 256
    assert Tokenizer.load(file).encode("four") == [*b"four"]

    file.write_text(made("bytes").to_json().replace(module.END, "<stop>"))
    with pytest.raises(UserError, match="has no end token"):
        Tokenizer.load(file)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere cannot be read\nNo such file"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"it is not a tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_the_sample_is_bounded_and_spread_over_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1_000)
    texts = [f"{number:03}" + " word" * 20 for number in range(1_000)]
    taken = list(sample((text, number / 1_000) for number, text in enumerate(texts)))
    assert [int(text[:3]) for text in taken] == list(range(0, 1_000, len(texts[0])))


def test_text_without_words_is_sampled_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_WORD_BYTES", 1_000)
    distinct = (f"{number:0100}" for number in range(1_000))
    taken = list(sample((text, number / 1_000) for number, text in enumerate(distinct)))
    # The leading zeros are cut into equal words of 32 and are counted once.
    assert sum(map(len, taken)) < 30_000


def test_a_given_tokenizer_neither_cuts_nor_pads(tmp_path: Path) -> None:
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(Tokenizer.bytes().to_json())
    inner.enable_truncation(5)
    inner.enable_padding(length=40)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode_batch(["a long text", "ab"]) == [[*b"a long text"], [*b"ab"]]
