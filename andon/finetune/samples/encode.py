"""Rows to tokens: the tokens that the model reads, and the targets that it must predict.

A sample of the task *classes* is a text and its class. A sample of the task *answers* is a sequence of tokens, each
with its *target*: the token itself if it belongs to the answer, else `NO_TARGET`, which loss and accuracy ignore.

A sample with more than `context` tokens is cut, and the number of cut samples is kept: a text loses its end, a prompt
or a conversation its beginning, so that the answer stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from andon.data.batches import NO_TARGET
from andon.errors import UserError, shown
from andon.finetune.base import first_line
from andon.finetune.samples.rows import Columns, Place, Row, bad_row, replace_surrogates


@dataclass(frozen=True)
class Sample:
    """The tokens of one sample, with a target for each of them, or the class as the only target."""

    place: Place
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]

    @classmethod
    def of(cls, place: Place, ids: Sequence[int], targets: Sequence[int]) -> Self:
        """A sample with four bytes per token, because all samples are in memory at once."""
        return cls(place, np.array(ids, np.int32), np.array(targets, np.int32))


class Encoder:
    """Turns rows of one kind into samples; `classes` are the names of the classes in order."""

    def __init__(self, tokenizer: Any, columns: Columns, context: int, classes: Sequence[str]) -> None:
        self.tokenizer, self.columns, self.context = tokenizer, columns, context
        self.cut = 0
        """Number of samples that were longer than the context."""
        # A label may be the name of a class or its number.
        self._numbers = {str(number): number for number in range(len(classes))}
        self._numbers |= {name: number for number, name in enumerate(classes)}

    def __call__(self, rows: Sequence[Row]) -> list[Sample]:
        """Encode some rows together."""
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
            before = before[:-1]  # some tokenizers end every text, but the answer continues this one
        if not before:
            before = [token for token in (first, end) if token is not None][:1]
        answer = answer if end is None else [*answer, end]
        if not before:
            raise bad_row(place, "the prompt is empty", "The tokenizer has no token to start with", "Give it a prompt")
        self.cut += len(before) + len(answer) > self.context
        answer = answer[: self.context - 1]
        kept = before[-(self.context - len(answer)) :]
        return Sample.of(place, kept + answer, [NO_TARGET] * len(kept) + answer)

    def _chats(self, rows: Sequence[Row]) -> list[Sample]:
        return [self._chat(row.place, check_messages(row)) for row in rows]

    def _chat(self, place: Place, messages: list[dict[str, str]]) -> Sample:
        """Encode a conversation as the template renders it; each token of an assistant's message is a target."""
        whole = self._render(place, messages)
        spans = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(place, messages[:at], generation_prompt=True) if at else ""
                after = self._render(place, messages[: at + 1])
                # Some templates render earlier answers differently from the last one: those are not targets.
                if after.startswith(before) and whole.startswith(after):
                    spans.append((len(before), len(after)))
        if not spans:
            cause = "The text that it renders for an answer does not start with the text before the answer"
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

    def _render(self, place: Place, messages: list[dict[str, str]], generation_prompt: bool = False) -> str:
        try:
            return render(self.tokenizer, messages, generation_prompt)
        except TemplateError as error:
            remedy = "Give the roles that it knows, in its order, or correct the template"
            raise bad_row(place, "the chat template refuses it", str(error), remedy) from None


class TemplateError(ValueError):
    """A chat template refused messages."""


def render(tokenizer: Any, messages: list[dict[str, str]], generation_prompt: bool = False) -> str:
    """Render messages with the chat template; the generation prompt is the beginning of the next answer."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # a template is a program, which can raise any error
        raise TemplateError(first_line(error)) from None
    return text


def label_of(row: Row) -> str:
    """The label of a row as the name of its class."""
    value = row.fields["label"]
    if not isinstance(value, str | int) or value == "":
        raise bad_row(row.place, "`label` is not a class", f"It is {shown(value)}", "Make it a name or a whole number")
    return replace_surrogates(str(value))


def unknown_class(place: Place, label: str, known: Sequence[str]) -> UserError:
    """The error for a label that a trained classifier does not have."""
    remedy = "Give these names or their numbers; without id2label in its config.json the model learns new classes"
    return bad_row(place, f"the model has no class {shown(label)}", f"Its classes: {_some(known)}", remedy)


def unseen_label(place: Place, label: str, known: Sequence[str]) -> UserError:
    """The error for a label that no training sample has, so that the model cannot learn it."""
    remedy = "Correct the label, or give samples of it to train on (--data.validation 0 holds none out)"
    return bad_row(place, f"no training sample has the label {shown(label)}", f"Known labels: {_some(known)}", remedy)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")


def check_messages(row: Row) -> list[dict[str, str]]:
    """Check the messages of a conversation, and return them up to the last answer."""
    messages = row.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise bad_row(row.place, "`messages` is not a list of messages", f"It is {shown(messages)}")
    found = []
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            remedy = 'Write {"role": "user", "content": "…"}'
            raise bad_row(row.place, f"message {number} has no role and content", f"It is {shown(message)}", remedy)
        if role == "assistant" and not content.strip():
            raise _empty_answer(row.place, f"message {number}")
        found.append({"role": role, "content": replace_surrogates(content)})
    while found and found[-1]["role"] != "assistant":
        found.pop()
    if not found:
        raise _empty_answer(row.place, "the conversation")
    return found


def _empty_answer(place: Place, where: str) -> UserError:
    cause = f"There is nothing to learn in {where}"
    return bad_row(place, "the answer is empty", cause, "Give it an answer, or remove the line")
