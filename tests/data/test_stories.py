"""The built-in stories: reproducible, never repeated, and checked to the letter."""

from __future__ import annotations

import re
import time
from collections import Counter
from itertools import combinations
from math import lcm, log

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from andon.data import stories
from andon.data.stories import PLOTS, Plot, Template, compile_plot, is_valid, story
from andon.data.story_words import CAST, FOLLOWERS, LOCAL

STORY = (
    "Mia was a kind girl who had a small dog named Pip. "
    "One sunny morning, she took Pip to the park. "
    "She brought along a red car from home. "
    "But the red car fell on a log and broke. "
    "Mia felt sad, and Pip sat beside her. "
    "Grandpa heard her and came with some glue. "
    "Together Mia and Grandpa slowly fixed the red car. "
    "Pip the dog danced around the car, and Mia was happy. "
    "That night, Mia and Pip fell asleep with a smile."
)

seeds = st.integers(0, 2**63)
indices = st.integers(0, 10**6)
unhurried = settings(deadline=None, max_examples=60)


def sentences_of(text: str) -> list[str]:
    return re.findall(r"[^.]+\.", text)


def disjoint(one: Template, other: Template) -> bool:
    """Whether no text fits both templates, whoever the cast is."""
    return len(one.words) != len(other.words) or any(
        not a.values.keys() & b.values.keys() for a, b in zip(one.words, other.words, strict=True)
    )


def distinct(one: Plot, other: Plot) -> bool:
    """Whether no text fits both plots."""
    return len(one.sentences) != len(other.sentences) or any(
        all(disjoint(a, b) for a in ours for b in theirs)
        for ours, theirs in zip(one.sentences, other.sentences, strict=True)
    )


def test_the_story_of_a_seed_never_changes() -> None:
    assert story(7, 3) == story(7, 3)
    assert story(7, 3) != story(8, 3)
    assert story(1, 23) != story(12, 3)
    assert story(0, 0).startswith("Once upon a time, Zoe had a funny goat named Button. One quiet afternoon, ")
    assert story(0, 0).endswith("From that day on, Zoe and Button always helped each other.")


def test_random_access_equals_iteration() -> None:
    assert list(stories.stories(5, 50)) == [story(5, index) for index in range(50)]


def test_every_generated_story_is_valid() -> None:
    assert all(map(is_valid, stories.stories(11, 2000)))


@unhurried
@given(seeds, indices)
def test_a_story_is_one_line_of_60_to_110_words_in_plain_ascii(seed: int, index: int) -> None:
    text = story(seed, index)
    assert is_valid(text)
    assert text.isascii() and text.isprintable()
    assert 60 <= len(text.split(" ")) <= 110
    assert len(sentences_of(text)) == 9


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[("she took", "he took"), ("kind girl", "kind boy"), ("Mia felt", "Zoe felt"), ("the dog", "the cat")],
        *[("took Pip", "took Bo"), ("and Grandpa", "and Mom"), ("fixed the red", "fixed the blue")],
        *[("around the car", "around the kite"), ("Mia was a", "Max was a"), ("sunny", "snowy")],
        *[(" That night, Mia and Pip fell asleep with a smile.", ""), ("a smile.", "a smile. The end.")],
    ],
)
def test_a_broken_story_is_refused(old: str, new: str) -> None:
    assert is_valid(STORY)
    assert STORY.count(old) == 1
    assert not is_valid(STORY.replace(old, new))


@pytest.mark.parametrize("text", ["", " ", ".", " " + STORY, STORY + " ", STORY + "\n", STORY[:-1], STORY.lower()])
def test_nothing_near_a_story_is_one(text: str) -> None:
    assert not is_valid(text)


def test_no_beginning_of_a_story_is_one() -> None:
    assert not any(is_valid(STORY[:end]) for end in range(len(STORY)))


@unhurried
@given(seeds, indices)
def test_a_story_with_a_sentence_dropped_doubled_or_swapped_is_refused(seed: int, index: int) -> None:
    parts = re.split(r"(?<=\.) ", story(seed, index))
    for at in range(len(parts)):
        assert not is_valid(" ".join(parts[:at] + parts[at + 1 :]))
        assert not is_valid(" ".join(parts[: at + 1] + parts[at:]))
    for at in range(len(parts) - 1):
        swapped = [*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]]
        assert not is_valid(" ".join(swapped))


@unhurried
@given(seeds, indices, st.data())
def test_one_word_of_the_cast_replaced_in_one_place_is_refused(seed: int, index: int, data: st.DataObject) -> None:
    text = story(seed, index)
    families = [CAST["hero"], CAST["colour"], *(values for _, values in FOLLOWERS.values())]
    words = [found for found in re.finditer(r"\w+", text) if any(found.group() in family for family in families)]
    word = data.draw(st.sampled_from(words))
    assume(word.group() not in CAST["colour"] or text.count(word.group()) > 1)
    others = {other for family in families if word.group() in family for other in family} - {word.group()}
    other = data.draw(st.sampled_from(sorted(others)))
    assert not is_valid(text[: word.start()] + other + text[word.end() :])


@unhurried
@given(st.text(max_size=300))
def test_no_other_text_is_a_story(text: str) -> None:
    assert not is_valid(text)


@pytest.mark.parametrize("unit", ["a", ".", " ", ". ", "Mia ", "Mia was a kind girl. ", '"', STORY + " "])
def test_ten_kilobytes_of_garbage_are_refused_quickly(unit: str) -> None:
    garbage = (unit * 10_000)[:10_000]
    start = time.process_time()
    assert not is_valid(garbage)
    assert time.process_time() - start < 0.1


def test_every_value_is_one_word_and_every_template_ends_with_its_only_full_stop() -> None:
    assert all(re.fullmatch("[A-Za-z]+", value) for values in stories.VALUES.values() for value in values)
    assert all(len(set(values)) == len(values) for values in (CAST | LOCAL).values())
    templates = [template for plot in PLOTS for sentence in plot.sentences for template in sentence]
    assert all(template.pattern.find(".") == len(template.pattern) - 1 for template in templates)


def test_a_text_has_at_most_one_derivation() -> None:
    for plot in PLOTS:
        for sentence in plot.sentences:
            assert all(disjoint(one, other) for one, other in combinations(sentence, 2))
        for slot in plot.cast:
            always_named = any(all(slot in way.slots for way in sentence) for sentence in plot.sentences)
            assert always_named, f"{slot} may stay unsaid, so two casts would tell the same story"
    assert all(distinct(one, other) for one, other in combinations(PLOTS, 2))


def test_a_follower_never_comes_before_the_one_it_follows() -> None:
    for plot in PLOTS:
        named: set[str] = set()
        for sentence in plot.sentences:
            for way in sentence:
                for place, slot in enumerate(way.slots):
                    assert slot not in FOLLOWERS or FOLLOWERS[slot][0] in named | set(way.slots[:place])
            named |= set.intersection(*(set(way.slots) for way in sentence))


TINY = (
    (
        ("{hero} saw a {colour} {toy}.", "A {colour} {toy} was with {hero} the {child}."),
        ("{He} was {sad} and {sad}.", "{pal} was {happy}."),
        ("{hero} met a {pet}.",),
    ),
    (("It was a {dark} {time} for {hero}.",), ("{He} slept.", "{hero} slept {softly}.")),
)


def test_entropy_equals_that_of_a_small_grammar_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting through all numbers below a common multiple of the options tells each derivation fairly."""
    tiny = tuple(compile_plot(sentences) for sentences in TINY)
    monkeypatch.setattr(stories, "PLOTS", tiny)
    shared = len(CAST["hero"]) * len(CAST["colour"]) * 2 * 2
    total = len(tiny) * lcm(
        shared * len(LOCAL["sad"]) ** 2,
        shared * len(LOCAL["happy"]),
        len(CAST["hero"]) * len(LOCAL["dark"]) * len(LOCAL["time"]) * 2 * len(LOCAL["softly"]),
    )
    counts = Counter(stories.compose(number) for number in range(total))
    exact = -sum(count / total * log(count / total) for count in counts.values())
    assert stories.entropy.__wrapped__() == pytest.approx(exact, abs=1e-9)


def test_entropy_equals_the_mean_surprise_of_many_stories() -> None:
    """The surprise of a story, from its own derivation, is on average the entropy."""

    def surprise(text: str) -> float:
        parts = sentences_of(text)
        plot = next(plot for plot in PLOTS if stories.follows(plot, re.split(r"(?<=\.) ", text)))
        total = log(len(PLOTS)) + sum(log(len(CAST[slot])) for slot in plot.cast)
        for part, ways in zip(parts, plot.sentences, strict=True):
            (way,) = [way for way in ways if stories.match(way, part.strip().split(" "))]
            total += log(len(ways)) + sum(log(len(LOCAL[slot])) for slot in way.slots if slot in LOCAL)
        return total

    surprises = [surprise(text) for text in stories.stories(3, 2000)]
    assert sum(surprises) / len(surprises) == pytest.approx(stories.entropy(), abs=0.2)
    assert stories.entropy() > 35 * log(2)


def test_the_choices_are_fair() -> None:
    heroes = Counter(re.findall("|".join(CAST["hero"]), text)[0] for text in stories.stories(9, 6000))
    expected = 6000 / len(CAST["hero"])
    assert set(heroes) == set(CAST["hero"])
    assert all(abs(count - expected) < 6 * expected**0.5 for count in heroes.values())


def test_20_000_stories_are_distinct_and_told_quickly() -> None:
    start = time.process_time()
    told = set(stories.stories(1, 20_000))
    assert time.process_time() - start < 5
    assert len(told) == 20_000


def test_64_checks_take_well_under_a_tenth_of_a_second() -> None:
    told = list(stories.stories(2, 64))
    start = time.process_time()
    assert all(map(is_valid, told))
    assert time.process_time() - start < 0.1


def test_the_vocabulary_is_small_and_the_article_an_is_never_needed() -> None:
    told = list(stories.stories(4, 5000))
    words = {word.lower() for text in told for word in re.findall(r"\w+", text)}
    assert 150 <= len(words) <= 350
    assert not any(re.search(r"\ba [aeiou]", text) for text in told)
