"""The folder of a Hugging Face model, before its weights are loaded: architecture, tokenizer, classes."""

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

POSITION_FIELDS: Final = ("max_position_embeddings", "n_positions", "n_ctx")
CAUSAL_LM: Final = ("ForCausalLM", "LMHeadModel")
CLASSIFIER: Final = "ForSequenceClassification"
"""How the names of architectures end: those of causal language models, and of classifiers."""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken", "tekken.json")
"""A tokenizer has at least one of these files; without any, the library would create an empty tokenizer."""
LOADING: Final = {"local_files_only": True, "trust_remote_code": False}
"""Options of every load: nothing is downloaded, and no code that comes with a model is run."""
UNLIMITED: Final = 1 << 40
"""A tokenizer without a limit gives a larger `model_max_length` than this."""
TOKENIZER_SUFFIXES: Final = (".json", ".jinja", ".txt", ".model")
"""Files that can belong to a tokenizer."""


class Base:
    """A model folder; it needs `transformers`, which is imported here."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = expand(folder).absolute()
        if not (self.folder / "config.json").is_file():
            raise _not_a_model(self.folder)
        self._transformers = _import_transformers()
        self.config = self._read_config()

    def _read_config(self) -> Any:
        try:
            return self._transformers.AutoConfig.from_pretrained(self.folder, **LOADING)
        except Exception as error:  # the library raises many kinds of errors
            cause = first_line(error)
            known = f"transformers {self._transformers.__version__}"
            remedy = f"Use a model that {known} knows; code that comes with a model is not run"
            raise UserError(f"{self.folder / 'config.json'} names no model that {known} knows", cause, remedy) from None

    @property
    def architecture(self) -> str:
        """The name of the model's class in its configuration."""
        return str((getattr(self.config, "architectures", None) or ["?"])[0])

    @property
    def positions(self) -> int | None:
        """The most tokens that the model can read, if it or its tokenizer has a limit."""
        config = self.config.get_text_config()
        found = [getattr(config, name, None) for name in POSITION_FIELDS]
        model = next((value for value in found if isinstance(value, int) and value > 0), None)
        # Some models have fewer usable positions than rows for them, which only the tokenizer states.
        limits = [int(value) for value in (model, self.tokenizer.model_max_length) if value and value < UNLIMITED]
        return min(limits, default=None)

    @property
    def labels(self) -> list[str]:
        """The names of the classes in the configuration, which may be placeholders."""
        return [name for _, name in sorted((self.config.id2label or {}).items())]

    @property
    def own_labels(self) -> list[str]:
        """The names of the classes that a classifier was trained for; empty: it gets a new head."""
        placeholders = [f"LABEL_{number}" for number in range(len(self.labels))]
        return self.labels if self.is_classifier and self.labels != placeholders else []

    @property
    def is_classifier(self) -> bool:
        """Whether the architecture is that of a text classifier."""
        return self.architecture.endswith(CLASSIFIER)

    def check_task(self, task: Task) -> None:
        """Refuse a model that cannot learn this kind of samples."""
        if task == "answers" and self.architecture != "?" and not self.architecture.endswith(CAUSAL_LM):
            remedy = "Give samples with text and label, or a causal language model"
            raise UserError(f"{self.folder} cannot write answers", f"It is a {self.architecture}", remedy)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder."""
        try:
            if not any(file for name in TOKENIZER_FILES for file in self.folder.glob(name)):
                raise ValueError("There is no tokenizer.json")
            return self._transformers.AutoTokenizer.from_pretrained(self.folder, **LOADING)
        except Exception as error:  # the library raises many kinds of errors
            cause = first_line(error)
            remedy = "Copy tokenizer.json and tokenizer_config.json of the model into its folder"
            raise UserError(f"{self.folder} has no tokenizer that can be read", cause, remedy) from None

    def tokenizer_for(self, columns: Columns, file: Path) -> Any:
        """The tokenizer, if it can encode samples of one kind."""
        if columns == "messages" and not self.tokenizer.chat_template:
            what = f"{file}, line 1: messages need a chat template, and the tokenizer of {self.folder} has none"
            cause = "It is the tokenizer of a model that was not trained to chat"
            remedy = "Give prompt and completion, or add a chat_template.jinja to the model's folder"
            raise UserError(what, cause, remedy)
        if columns == "messages" and not self.tokenizer.is_fast:
            what = f"{file}, line 1: the tokenizer of {self.folder} cannot tell which tokens are the answer"
            cause = "It is a slow tokenizer, which does not give the position of each token in the text"
            raise UserError(what, cause, "Give prompt and completion, or add a tokenizer.json to the model's folder")
        return self.tokenizer

    @property
    def padding(self) -> int:
        """The padding token. The model must know it: a classifier on a causal model reads the last token before it."""
        found = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in found if token is not None and token < self._vocab_rows), 0)

    @property
    def _vocab_rows(self) -> int:
        """Rows of the model's embedding."""
        rows = getattr(self.config.get_text_config(), "vocab_size", None)
        return rows if isinstance(rows, int) else UNLIMITED

    def check_tokens(self, largest: int) -> None:
        """Refuse token ids that the model has no row for."""
        if largest >= self._vocab_rows:
            what = f"The tokenizer of {self.folder} is not the model's"
            cause = f"The samples have token {largest:,}, and the model has rows for {self._vocab_rows:,}"
            raise UserError(what, cause, "Copy the model's own tokenizer")

    def digest(self) -> str:
        """BLAKE3 of the files that can change the tokens."""
        files = sorted(file for file in self.folder.iterdir() if file.suffix in TOKENIZER_SUFFIXES and file.is_file())
        return blake3(json.dumps([[file.name, file_digest(file)] for file in files]).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; an empty one if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def first_line(error: Exception) -> str:
    """The first line of a library's error, or the name of its class."""
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
