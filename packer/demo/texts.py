"""Texts of the demo: passages, and tasks with one right answer. Pure."""

# ruff: noqa: SIM905 - a hundred quoted words are harder to read than one text

import random

NUMBER_NAMES = "no one two three four five six seven eight nine ten eleven twelve".split()
_ADJECTIVES = (
    "old new small large quiet loud bright dark warm cold early late gentle clever hungry tired "
    "brave lazy golden silver wooden broken empty heavy hidden lonely narrow proud rusty simple "
    "strange sudden wild young"
).split()
_NOUNS = (
    "river mountain village garden kitchen teacher sailor farmer doctor painter window bridge "
    "candle letter lantern basket mirror engine station market harbour forest island meadow tower "
    "castle library workshop fox horse rabbit sparrow spider salmon turtle donkey kitten puppy "
    "apple lemon potato onion bread cheese winter summer morning evening storm shadow secret "
    "journey question answer promise picture number colour"
).split()
_VERBS = (
    "follows watches carries paints repairs remembers visits crosses hides finds opens closes "
    "builds breaks washes measures counts answers helps leaves reaches passes warms feeds wakes "
    "draws moves holds"
).split()
_PLACES = ("near behind under above inside beside across before after without").split()
_SYLLABLES = (
    "ba be bo da del dor fa fin ga gor ha hel ka kor la lin ma mir na nor pa ra ros sa tal tor va "
    "ven wil za"
).split()


def name(rng: random.Random) -> str:
    """A made-up proper name."""
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))).capitalize()


def sentence(rng: random.Random) -> str:
    """A short grammatical sentence."""
    subject = name(rng) if rng.random() < 0.2 else _thing(rng)
    text = f"{subject} {rng.choice(_VERBS)} the {rng.choice(_NOUNS)}"
    if rng.random() < 0.6:
        text += f" {rng.choice(_PLACES)} {_thing(rng)}"
    if rng.random() < 0.15:
        text += f" at {rng.randint(1, 12)}:{rng.randint(0, 59):02d}"
    return text[0].upper() + text[1:] + rng.choice("....!")


def _thing(rng: random.Random) -> str:
    return f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"


def passage(rng: random.Random, *, median_words: int = 60, max_words: int = 580) -> str:
    """Sentences in paragraphs; log-normally many words, so that a few texts are very long."""
    num_words = min(max_words, round(median_words * rng.lognormvariate(0, 1)))
    pieces: list[str] = []
    while num_words > 0:
        pieces.append(sentence(rng))
        num_words -= len(pieces[-1].split())
        pieces.append("\n\n" if rng.random() < 0.08 else " ")
    return "".join(pieces).strip() or sentence(rng)


def times(number: int) -> str:
    """How often, in words where there are any.

    >>> times(1), times(3), times(40)
    ('once', '3 times', '40 times')
    """
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def text_task(rng: random.Random) -> tuple[str, str]:
    """A question that needs no picture, and its answer."""
    tasks = {_count_word: 25, _sort: 15, _add: 20, _repeat: 15, _count_up: 10, _last: 15}
    return rng.choices(list(tasks), list(tasks.values()))[0](rng)


def _count_word(rng: random.Random) -> tuple[str, str]:
    text = passage(rng)
    words = [word.strip(".!").lower() for word in text.split()]
    word = rng.choice([word for word in words if word in _NOUNS] or _NOUNS)
    question = f'How often does the word "{word}" stand in this text?\n\n{text}'
    return question, f"{times(words.count(word))}.".capitalize()


def _sort(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_NOUNS, rng.randint(3, 12))
    return f"Sort these words by the alphabet: {', '.join(words)}", ", ".join(sorted(words))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return f"{a} + {b} = ?", f"{a + b}"


def _repeat(rng: random.Random) -> tuple[str, str]:
    text = passage(rng, median_words=30)
    return f"Repeat this text word by word.\n\n{text}", text


def _count_up(rng: random.Random) -> tuple[str, str]:
    first, count = rng.randint(1, 80), rng.randint(3, 40)
    numbers = map(str, range(first, first + count + 1))
    return f"Count from {first} to {first + count}.", ", ".join(numbers)


def _last(rng: random.Random) -> tuple[str, str]:
    text = passage(rng)
    return f"{text}\n\nWhich word comes last?", text.split()[-1].strip(".!")
