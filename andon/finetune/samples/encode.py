"""Rows to tokens: what the model reads, and which tokens it must answer.

A sample of the task *classes* is a text and its class. A sample of the task *answers* is a sequence of tokens, each
with its *target*: itself where it belongs to the answer, and otherwise `NO_TARGET`. Loss and accuracy count targets
alone.

A sample with more than `context` tokens is cut and counted: the end of a text, and the beginning of a prompt or of a
conversation, so that the answer stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from andon.data.batches import NO_TARGET
from andon.errors import UserError, shown
from andon.finetune.base import first_line
from andon.finetune.samples.rows import Columns, Place, Row, bad_row, plain


@dataclass(frozen=True)
class Sample:
    """The tokens of one sample; `targets` has as many, or is the one class."""

    place: Place
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]

    @classmethod
    def of(cls, place: Place, ids: Sequence[int], targets: Sequence[int]) -> Self:
        """A sample in four bytes a token, because all of them are in memory at once."""
        return cls(place, np.array(ids, np.int32), np.array(targets, np.int32))


class Encoder:
    """Turns rows of one kind into samples; `classes` are the names of the classes, in their order."""

    def __init__(self, tokenizer: Any, columns: Columns, context: int, classes: Sequence[str]) -> None:
        self.tokenizer, self.columns, self.context = tokenizer, columns, context
        self.cut = 0
        """Samples that were longer than the context."""
        # A model's own classes may be given by their numbers.
        self._numbers = {str(number): number for number in range(len(classes))}
        self._numbers |= {name: number for number, name in enumerate(classes)}

    def __call__(self, rows: Sequence[Row]) -> list[Sample]:
        """The samples of some rows, tokenized together."""
        encode = {"text + label": self._texts, "prompt + completion": self._prompts, "messages": self._chats}
        return encode[self.columns](rows)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        return found

    def _texts(self, rows: Sequence[Row]) -> list[Sample]:
        texts = [row.text("text") for row in rows]
        found = []
        for row, ids in zip(rows, self._ids(texts, special=True), strict=True):
            if not ids or not row.text("text").strip():
                raise bad_row(row.place, "the text is empty", "It has no words", "Remove the line, or give it a text")
            if len(ids) > self.context:
                self.cut += 1
                ids = self.tokenizer(row.text("text"), truncation=True, max_length=self.context)["input_ids"]
            found.append(Sample.of(row.place, ids, [self._numbers[label_of(row)]]))
        return found

    def _prompts(self, rows: Sequence[Row]) -> list[Sample]:
        prompts = self._ids([row.text("prompt") for row in rows], special=True)
        answers = self._ids([row.text("completion") for row in rows], special=False)
        found = []
        for row, before, answer in zip(rows, prompts, answers, strict=True):
            if not row.text("completion").strip() or not answer:
                raise _empty_answer(row.place, "`completion`")
            found.append(self._answer(row.place, before, answer))
        return found

    def _answer(self, place: Place, before: list[int], answer: list[int]) -> Sample:
        end, first = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if len(before) > 1 and before[-1] == end:
            before = before[:-1]  # some tokenizers close every text, and the answer goes on from here
        if not before:
            before = [first if first is not None else end] if (first, end) != (None, None) else []
        answer = answer if end is None else [*answer, end]
        if not before:
            raise bad_row(place, "the prompt is empty", "The tokenizer has no token to begin with", "Give it a prompt")
        self.cut += len(before) + len(answer) > self.context
        answer = answer[: self.context - 1]
        kept = before[-(self.context - len(answer)) :]
        return Sample.of(place, kept + answer, [NO_TARGET] * len(kept) + answer)

    def _chats(self, rows: Sequence[Row]) -> list[Sample]:
        return [self._chat(row.place, check_messages(row)) for row in rows]

    def _chat(self, place: Place, messages: list[dict[str, str]]) -> Sample:
        """The conversation as the template writes it; each token of an assistant's message is a target."""
        whole = self._render(place, messages)
        spans = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(place, messages[:at], answering=True) if at else ""
                after = self._render(place, messages[: at + 1])
                # Some templates write earlier answers otherwise than the last one: those do not count.
                if after.startswith(before) and whole.startswith(after):
                    spans.append((len(before), len(after)))
        if not spans:
            cause = "What it writes before the answer is not the beginning of what it writes with it"
            raise bad_row(place, "the chat template hides the answer", cause, "Give prompt and completion instead")
        coded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, targets = list(coded["input_ids"]), []
        for token, (start, stop) in zip(ids, coded["offset_mapping"], strict=True):
            answered = any(lo <= start and stop <= hi and start < stop for lo, hi in spans)
            targets.append(token if answered else NO_TARGET)
        self.cut += len(ids) > self.context
        ids, targets = ids[-self.context :], targets[-self.context :]
        if all(target == NO_TARGET for target in targets[1:]):
            raise _empty_answer(place, "the last answer")
        return Sample.of(place, ids, targets)

    def _render(self, place: Place, messages: list[dict[str, str]], answering: bool = False) -> str:
        try:
            return render(self.tokenizer, messages, answering)
        except TemplateRefuses as error:
            remedy = "Give the roles that it knows, in its order, or mend the template"
            raise bad_row(place, "the chat template refuses it", str(error), remedy) from None


class TemplateRefuses(ValueError):
    """What a chat template says of messages that it does not take."""


def render(tokenizer: Any, messages: list[dict[str, str]], answering: bool = False) -> str:
    """Messages as the model reads them; `answering`: up to where its next answer begins."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    except Exception as error:  # templates are programs of their own, and raise what they like
        raise TemplateRefuses(first_line(error)) from None
    return text


def label_of(row: Row) -> str:
    """The label of a row, as the name of its class."""
    value = row.fields["label"]
    if not isinstance(value, str | int) or value == "":
        raise bad_row(row.place, "`label` is no class", f"It is {shown(value)}", "Make it a name or a whole number")
    return plain(str(value))


def unknown_class(place: Place, label: str, known: Sequence[str]) -> UserError:
    """The error for a label that is no class of a classifier."""
    remedy = "Give these names or their numbers; without id2label in its config.json the model learns new classes"
    return bad_row(place, f"the model has no class {shown(label)}", f"Its classes: {_some(known)}", remedy)


def unseen_label(place: Place, label: str, known: Sequence[str]) -> UserError:
    """The error for a label that the model cannot learn."""
    remedy = "Correct the label, or give samples of it to train on (--data.validation 0 holds none out)"
    return bad_row(place, f"no training sample has the label {shown(label)}", f"Known labels: {_some(known)}", remedy)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")


def check_messages(row: Row) -> list[dict[str, str]]:
    """The messages of a conversation up to its last answer."""
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise bad_row(row.place, "`messages` is no list of messages", f"It is {shown(messages)}")
    found = []
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            remedy = 'Write {"role": "user", "content": "…"}'
            raise bad_row(row.place, f"message {number} has no role and content", f"It is {shown(message)}", remedy)
        if role == "assistant" and not content.strip():
            raise _empty_answer(row.place, f"message {number}")
        found.append({"role": role, "content": plain(content)})
    while found and found[-1]["role"] != "assistant":
        found.pop()
    if not found:
        raise _empty_answer(row.place, "the conversation")
    return found


def _empty_answer(place: Place, where: str) -> UserError:
    cause = f"There is nothing to learn in {where}"
    return bad_row(place, "the answer is empty", cause, "Give it an answer, or remove the line")
