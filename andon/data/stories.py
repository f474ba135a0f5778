"""The built-in corpus: a seeded grammar of small stories, and a checker for its sentences.

A *plot* is a fixed sequence of sentences, and each sentence has a few alternative *templates*. A template is a sequence
of words, some of which are *slots*. A slot of the *cast* (the hero, the colour) is chosen once and keeps its value in
the whole story. A *follower* is determined by a member of the cast (Mia is a "she" and has Pip the dog; the red toy is
a car). A *local* slot (the weather, a feeling) is chosen each time. All choices are uniform. They are the digits
of one large number, the hash of seed and index: it is divided by the number of options, and the remainder picks one.

The checker uses the same templates. Every value is one word, no two templates of a sentence can produce the same words,
and no two plots the same story, so a text has at most one derivation. Therefore checking takes linear time, and the
entropy of a story is the sum of the entropies of its choices.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from math import log
from typing import NamedTuple, TypeVar

from andon.data import story_words
from andon.data.story_words import CAST, FOLLOWERS, LOCAL

T = TypeVar("T")
VALUES = CAST | {slot: values for slot, (_, values) in FOLLOWERS.items()} | LOCAL


class Word(NamedTuple):
    """One word of a template: its slot ("" for a plain word), and the slot's value for each spelling."""

    slot: str
    values: dict[str, str]


class Template(NamedTuple):
    """One form of a sentence: its words for the checker, its pattern and slots for the writer."""

    words: tuple[Word, ...]
    pattern: str
    slots: tuple[str, ...]


class Plot(NamedTuple):
    """The cast that a plot needs, and the templates of each of its sentences."""

    cast: tuple[str, ...]
    sentences: tuple[tuple[Template, ...], ...]


def compile_word(text: str) -> Word:
    """Compile a word such as `{hero},` with every value that its slot can take."""
    before, _, rest = text.partition("{")
    slot, _, after = rest.partition("}")
    return Word(slot, {before + value + after: value for value in VALUES[slot]} if slot else {text: ""})


def compile_template(text: str) -> Template:
    """Compile a template from its text with slots in braces."""
    words = tuple(compile_word(word) for word in text.split(" "))
    return Template(words, re.sub(r"{\w+}", "%s", text), tuple(word.slot for word in words if word.slot))


def compile_plot(sentences: story_words.Sentences) -> Plot:
    """Compile a plot from the texts of its templates, with only the cast that they mention."""
    compiled = tuple(tuple(compile_template(text) for text in texts) for texts in sentences)
    slots = {slot for templates in compiled for template in templates for slot in template.slots}
    leaders = {FOLLOWERS[slot][0] for slot in slots & FOLLOWERS.keys()}
    return Plot(tuple(slot for slot in CAST if slot in slots | leaders), compiled)


SENTENCES = story_words.read_sentences()
OPENING, CLOSING = SENTENCES.pop("opening"), SENTENCES.pop("closing")
PLOTS = tuple(compile_plot(OPENING + middle + CLOSING) for middle in SENTENCES.values())

# What each value of the cast determines: itself and its followers.
FOLLOWING = {
    value: {member: value, **{slot: values[place] for slot, (leader, values) in FOLLOWERS.items() if leader == member}}
    for member, options in CAST.items()
    for place, value in enumerate(options)
}


def compose(number: int) -> str:
    """Write the story whose choices are the digits of a number."""

    def choose(options: Sequence[T]) -> T:
        nonlocal number
        number, choice = divmod(number, len(options))
        return options[choice]

    plot, cast = choose(PLOTS), dict[str, str]()
    for slot in plot.cast:
        cast |= FOLLOWING[choose(CAST[slot])]
    sentences = []
    for templates in plot.sentences:
        template = choose(templates)
        values = (cast[slot] if slot in cast else choose(LOCAL[slot]) for slot in template.slots)
        sentences.append(template.pattern % tuple(values))
    return " ".join(sentences)


def story(seed: int, index: int) -> str:
    """The index-th story of a seed."""
    digest = blake2b(f"{seed} {index}".encode(), digest_size=16).digest()
    return compose(int.from_bytes(digest, "little"))


def stories(seed: int, count: int) -> Iterator[str]:
    """The first stories of a seed."""
    return (story(seed, index) for index in range(count))


def match(template: Template, words: list[str]) -> bool:
    """Whether the words fit this template with any cast."""
    return len(words) == len(template.words) and all(
        word in expected.values for word, expected in zip(words, template.words, strict=True)
    )


def contradicts(template: Template, words: list[str], cast: dict[str, str]) -> bool:
    """Whether a word contradicts the cast; a member that appears for the first time is added to it."""
    for word, (slot, values) in zip(words, template.words, strict=True):
        if not slot or slot in LOCAL:
            continue
        if cast.setdefault(slot, values[word]) != values[word]:
            return True
        if slot in CAST:
            cast |= FOLLOWING[values[word]]
    return False


def follows(plot: Plot, sentences: list[str]) -> bool:
    """Whether sentences are a whole story of a plot."""
    if len(sentences) != len(plot.sentences):
        return False
    cast: dict[str, str] = {}
    for sentence, templates in zip(sentences, plot.sentences, strict=True):
        words = sentence.split(" ")
        template = next((template for template in templates if match(template, words)), None)
        if template is None or contradicts(template, words, cast):
            return False
    return True


def is_valid(text: str) -> bool:
    """Whether a text is exactly a story of the grammar."""
    sentences = re.split(r"(?<=\.) ", text)
    return any(follows(plot, sentences) for plot in PLOTS)


@cache
def entropy() -> float:
    """The exact entropy of one story in nats."""
    return log(len(PLOTS)) + sum(plot_entropy(plot) for plot in PLOTS) / len(PLOTS)


def plot_entropy(plot: Plot) -> float:
    """The entropy of one story of a plot: its cast, then each sentence's template and local slots."""
    total = sum(log(len(CAST[slot])) for slot in plot.cast)
    for templates in plot.sentences:
        slots = [slot for template in templates for slot in template.slots if slot in LOCAL]
        total += log(len(templates)) + sum(log(len(LOCAL[slot])) for slot in slots) / len(templates)
    return total
