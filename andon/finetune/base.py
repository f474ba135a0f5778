"""The folder of a Hugging Face model, before its weights are loaded: what it is, its tokenizer, its classes."""

import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from andon.config.finetune import Task
from andon.data.sources import digest as file_digest
from andon.errors import UserError
from andon.files import expand
from andon.finetune.samples.rows import Columns

POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx")
WRITERS: Final = ("ForCausalLM", "LMHeadModel")
"""How the architectures of causal language models are called."""
SORTER: Final = "ForSequenceClassification"
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken", "tekken.json")
"""Files of which a tokenizer has at least one; without them the library would make an empty one."""
UNLIMITED: Final = 1 << 40
"""What a tokenizer gives as its longest text if it knows of none is larger than this."""
SMALL: Final = (".json", ".jinja", ".txt", ".model")
"""Files that are read with a tokenizer or a configuration."""


class Base:
    """A model folder; `transformers` is imported here and needed from here on."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = expand(folder).absolute()
        if not (self.folder / "config.json").is_file():
            raise _not_a_model(self.folder)
        self._transformers = _import_transformers()
        self.config = self._read_config()

    def _read_config(self) -> Any:
        try:
            return self._transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the library raises nearly everything
            cause = first_line(error)
            known = f"transformers {self._transformers.__version__}"
            remedy = f"Use a model that {known} knows; code that comes with a model is not run"
            raise UserError(f"{self.folder / 'config.json'} names no model that {known} knows", cause, remedy) from None

    @property
    def architecture(self) -> str:
        """The class of the model, as its configuration names it."""
        return str((getattr(self.config, "architectures", None) or ["?"])[0])

    @property
    def positions(self) -> int | None:
        """The most tokens that the model can read, if it or its tokenizer says so."""
        config = self.config.get_text_config()
        found = [getattr(config, name, None) for name in POSITIONS]
        model = next((value for value in found if isinstance(value, int) and value > 0), None)
        # Some models have fewer usable positions than rows for them, and only the tokenizer says so.
        limits = [int(value) for value in (model, self.tokenizer.model_max_length) if value and value < UNLIMITED]
        return min(limits, default=None)

    @property
    def own_labels(self) -> list[str]:
        """The names of the classes that a classifier knows already; none: it gets a new head."""
        names = [name for _, name in sorted((self.config.id2label or {}).items())]
        if not self.architecture.endswith(SORTER) or names == [f"LABEL_{at}" for at in range(len(names))]:
            return []
        return names

    def check_task(self, task: Task) -> None:
        """Refuse a model that cannot learn this kind of samples."""
        writes = self.architecture == "?" or self.architecture.endswith(WRITERS)
        if task == "answers" and not writes:
            remedy = "Give samples with text and label, or a causal language model"
            raise UserError(f"{self.folder} writes no answers", f"It is a {self.architecture}", remedy)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        try:
            if not any(file for name in TOKENIZERS for file in self.folder.glob(name)):
                raise ValueError("There is no tokenizer.json")
            return self._transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the library raises nearly everything
            cause = first_line(error)
            remedy = "Copy tokenizer.json and tokenizer_config.json of the model into its folder"
            raise UserError(f"{self.folder} has no tokenizer that can be read", cause, remedy) from None

    def tokenizer_for(self, columns: Columns, file: Path) -> Any:
        """The tokenizer for samples of one kind."""
        if columns == "messages" and not self.tokenizer.chat_template:
            what = f"{file}, line 1: messages need a chat template, and the tokenizer of {self.folder} has none"
            cause = "It is the tokenizer of a model that was not trained to chat"
            raise UserError(
                what, cause, "Give prompt and completion, or add a chat_template.jinja to the model's folder"
            )
        if columns == "messages" and not self.tokenizer.is_fast:
            what = f"{file}, line 1: the tokenizer of {self.folder} cannot tell which tokens are the answer"
            cause = "It is a slow tokenizer, without the place of each token in the text"
            raise UserError(what, cause, "Give prompt and completion, or add a tokenizer.json to the model's folder")
        return self.tokenizer

    @property
    def padding(self) -> int:
        """A token for places that do not count; the model must know it, because a classifier of a causal model reads
        the last token that is another one."""
        found = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        rows = self._rows
        return next((token for token in found if token is not None and token < rows), 0)

    @property
    def _rows(self) -> int:
        """The tokens that the model knows."""
        rows = getattr(self.config.get_text_config(), "vocab_size", None)
        return rows if isinstance(rows, int) else UNLIMITED

    def check_tokens(self, largest: int) -> None:
        """Refuse a tokenizer that has more tokens than the model has rows."""
        if largest >= self._rows:
            cause = f"The samples have token {largest:,}, and the model has rows for {self._rows:,}"
            raise UserError(
                f"The tokenizer of {self.folder} is not the model's", cause, "Copy the model's own tokenizer"
            )

    def digest(self) -> str:
        """BLAKE3 of what decides on the tokens: every small file of the folder."""
        files = sorted(file for file in self.folder.iterdir() if file.suffix in SMALL and file.is_file())
        return blake3(json.dumps([[file.name, file_digest(file)] for file in files]).encode()).hexdigest()


def read_small(path: Path) -> dict[str, Any]:
    """A small JSON file; nothing if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def first_line(error: Exception) -> str:
    """The first line of a library's error, or its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _not_a_model(folder: Path) -> UserError:
    cause = "It has no config.json" if folder.is_dir() else "There is no such folder"
    remedy = "Download the model first (`hf download NAME --local-dir FOLDER`) and name its folder"
    for adapter in (folder, folder / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            cause, remedy = f"{adapter} is an adapter", f"`andon merge {adapter}`, then name the merged model"
    return UserError(f"{folder} is not a model", cause, remedy)


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        cause = "Fine-tuning needs transformers and peft, which are not installed"
        raise UserError("Hugging Face models cannot be read", cause, "pip install 'andon[finetune]'") from None
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    return transformers
