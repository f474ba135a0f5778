"""Text to token ids and back: byte-level BPE, in the `tokenizer.json` format of Hugging Face.

Every tokenizer is one of the `tokenizers` library. The *bytes* tokenizer is a byte-level BPE without merges:
id = byte, and 256 is the end token. *bpe* learns its merges from a sample of the corpus. Any other is loaded
from a tokenizer.json. The *end token* closes every document. Where a text spells it out, as some published
corpora do between documents, it is read as the end token, as Hugging Face does.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from blake3 import blake3

from andon.errors import UserError
from andon.files import expand

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>")
SMALLEST_VOCAB = 257

# The cost of learning merges grows with the length of a word times the bytes of all distinct words.
LONG_WORD = re.compile(r"(\w{32}|[^\w\s]{32})")
SAMPLE_BYTES = 16 << 20
SAMPLE_WORD_BYTES = 4 << 20


class Tokenizer:
    """One vocabulary with its end token."""

    def __init__(self, inner: "tokenizers.Tokenizer", end: str) -> None:
        self._inner, self._end = inner, end
        self.end: int = inner.get_vocab()[end]
        # Not get_vocab_size(): the ids of a given tokenizer may have gaps, and a model needs a row for the last id.
        self.vocab_size: int = max(inner.get_vocab().values()) + 1

    @classmethod
    def bytes(cls) -> Self:
        """The tokenizer whose ids are the bytes of the text."""
        inner = _byte_level({symbol: byte for byte, symbol in enumerate(_symbols())}, regex=False)
        inner.add_special_tokens([END])
        return cls(inner, END)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn a BPE from texts; its vocabulary is smaller if they have too few distinct pairs."""
        from tokenizers import trainers

        if vocab_size < SMALLEST_VOCAB:
            cause = f"256 bytes and the end token already make {SMALLEST_VOCAB}"
            remedy = f"Ask for {SMALLEST_VOCAB} or more, or use the tokenizer `bytes`"
            raise UserError(f"A vocabulary of {vocab_size} is too small for BPE", cause, remedy)
        inner = _byte_level({}, regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=_symbols(), show_progress=False
        )
        inner.train_from_iterator((_cut_long_words(text.replace(END, "\n")) for text in texts), trainer)
        return cls(inner, END)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a tokenizer.json, or the one in a folder."""
        import tokenizers

        given = expand(path)
        file = given / "tokenizer.json" if given.is_dir() else given
        try:
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            cause = error.strerror if isinstance(error, OSError) else f"it is not a tokenizer.json: {error}"
            remedy = "Give `bpe`, `bytes` or the path of a tokenizer.json"
            raise UserError(f"The tokenizer {file} cannot be read", str(cause), remedy) from error
        inner.no_truncation()
        inner.no_padding()
        if ends := [end for end in (*_own_end(file), *ENDS) if inner.token_to_id(end) is not None]:
            return cls(inner, ends[0])
        cause = f"its vocabulary holds none of {', '.join(ENDS)}"
        raise UserError(f"The tokenizer {file} has no end token", cause, f"Add {END} to its added_tokens")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without added special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, computed on all cores."""
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; the end token is spelled out."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The whole tokenizer, as in tokenizer.json."""
        return self._inner.to_str()

    def digest(self) -> str:
        """BLAKE3 of the JSON."""
        return blake3(self.to_json().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` reads."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _own_end(file: Path) -> list[str]:
    """The end token in the tokenizer_config.json next to a tokenizer, if it names one."""
    try:
        end = json.loads(file.with_name("tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    end = end.get("content") if isinstance(end, dict) else end
    return [end] if isinstance(end, str) else []


def sample(texts: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Choose texts of a corpus to learn merges from; each text comes with the share of the corpus read so far.

    The bytes of text and of distinct words may not exceed that share of their budgets. So the sample is
    spread evenly over the corpus, and text without words (DNA, base64) costs no more memory than prose.
    """
    words: set[str] = set()
    text_bytes = word_bytes = 0
    for text, share in texts:
        if max(text_bytes / SAMPLE_BYTES, word_bytes / SAMPLE_WORD_BYTES) <= share:
            new = set(_cut_long_words(text).split()) - words
            words |= new
            word_bytes += len("".join(new).encode())
            text_bytes += len(text.encode())
            yield text


def _cut_long_words(text: str) -> str:
    return LONG_WORD.sub(r"\1\n", text)


def _byte_level(vocab: dict[str, int], regex: bool) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def _symbols() -> list[str]:
    """The printable character for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(0x100)]
