"""Passkey and needle in a haystack: does a model find a sentence again, however long the text and wherever it stands?

    passkey    a number in filler that repeats                   (Mohtashami and Jaggi, arXiv 2305.16300)
    needle     a word's number in real text                      (RULER, arXiv 2404.06654: single needle, key a word)

    | what to do | text ...        | needle | ... text        | question | answer |
    |<------------------------------ `length` tokens ------------------------------>|
                 |<- depth * text ->|<- (1 - depth) * text ->|

A trial is made of tokens, so that it has exactly the length asked for. The needle stands between two lines (or pieces of
a long line) where that is nearest to the depth asked for. Numbers, words and where in the text a trial begins follow from
a seed and the trial's place alone: every rank, and any number of ranks, tries the same. An answer is found if greedy
decoding would write it (greedy.py), in the tokens in which the tokenizer writes it. Nothing is sent between ranks here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE_TOKENS = 64
"""A longer line is cut, so that a needle can stand near any depth."""


@dataclass(frozen=True)
class Task:
    """A sentence that is hidden, and the question for it; {word} and {number} differ from trial to trial."""

    name: str
    introduction: str
    needle: str
    question: str
    answer: str
    digits: int
    filler: str | None
    """the text around the needle; None: real text"""


TASKS = {
    "passkey": Task(
        "passkey",
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the "
        "important information there.\n",
        "\nThe pass key is {number}. Remember it. {number} is the pass key.\n",
        "\nWhat is the pass key? The pass key is",
        " {number}",
        5,
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n",
    ),
    "needle": Task(
        "needle",
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
        "afterwards.\n",
        "\nThe special magic number for {word} is: {number}.\n",
        "\nWhat is the special magic number for {word} mentioned in the provided text? The special magic number for {word} is:",
        " {number}",
        7,
        None,
    ),
}
WORDS = (
    *("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor"),
    *("island", "jacket", "kettle", "ladder", "marble", "needle", "orange", "pencil"),
)


@dataclass(frozen=True, eq=False)
class Trial:
    """One text with something hidden in it."""

    task: str
    length: int
    """tokens of prompt and answer"""
    depth: float
    """0: the needle comes first, 1: right before the question"""
    prompt: np.ndarray
    """int64 [T]"""
    answer: np.ndarray
    """int64 [A]"""


@dataclass(frozen=True)
class Cell:
    """The trials of one task, length and depth."""

    task: str
    length: int
    depth: float
    trials: int
    found: int


def even_depths(count: int) -> list[float]:
    """`count` depths from 0 to 1; one alone is 0.5. Raises ValueError for less than one."""
    if count < 1:
        raise ValueError(f"depths={count}: at least one place for the needle")
    return [0.5] if count == 1 else [round(depth / (count - 1), 4) for depth in range(count)]


def pieces_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The lines of some texts as tokens, long ones in pieces: between any two a needle may stand.

    Raises:
        ValueError: there is no text.
    """
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    tokens = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
    pieces = [line[at : at + PIECE_TOKENS] for line in tokens for at in range(0, len(line), PIECE_TOKENS)]
    if not pieces:
        raise ValueError(f"{len(texts)} texts to hide a needle in hold no line: give documents with text")
    return pieces


def make_trials(
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int,
    haystack: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> list[Trial]:
    """`trials` texts for each task, length and depth.

    Args:
        tokenizer: of transformers.
        tasks: names of TASKS.
        lengths: tokens of prompt and answer together.
        depths: 0 to 1.
        haystack: real text as `pieces_of` returns it, for the task "needle"; it is repeated where it is too short.
        seed: of numbers, words, and where in the text a trial begins.

    Raises:
        ValueError: a task is unknown, a depth is none, a length is too short for what must be said, or there is no haystack.
    """
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"tasks {unknown} are unknown; valid: {', '.join(TASKS)}")
    if outside := [depth for depth in depths if not 0 <= depth <= 1]:
        raise ValueError(f"depths {outside} lie outside the text; valid: 0 (at its beginning) to 1 (at its end)")
    drawn_trials = []
    for task in (TASKS[name] for name in tasks):
        text = haystack if task.filler is None else pieces_of(tokenizer, [task.filler])
        if not text:
            raise ValueError(f"the task {task.name!r} hides its needle in real text: give a haystack")
        for length in lengths:
            for depth in depths:
                for number in range(trials):
                    drawn = random.Random(f"{seed} {task.name} {length} {depth} {number}")
                    drawn_trials.append(_trial(tokenizer, task, length, depth, text, drawn))
    return drawn_trials


def cells_of(trials: Sequence[Trial], hits: Sequence[Any] | np.ndarray) -> list[Cell]:
    """Trials and whether their answers were found, counted by task, length and depth, in their order."""
    counts: dict[tuple[str, int, float], list[int]] = {}
    for trial, right in zip(trials, hits, strict=True):
        count = counts.setdefault((trial.task, trial.length, trial.depth), [0, 0])
        count[0] += 1
        count[1] += bool(right)
    return [Cell(*place, *count) for place, count in counts.items()]


def _trial(
    tokenizer: Any, task: Task, length: int, depth: float, text: Sequence[Sequence[int]], drawn: random.Random
) -> Trial:
    values = {"word": drawn.choice(WORDS), "number": str(drawn.randrange(10 ** (task.digits - 1), 10**task.digits))}
    introduction = _tokens(tokenizer, task.introduction)
    if tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        introduction = [tokenizer.bos_token_id, *introduction]
    needle = _tokens(tokenizer, task.needle.format(**values))
    asked = _tokens(tokenizer, task.question.format(**values))
    both = _tokens(tokenizer, (task.question + task.answer).format(**values))
    common = next((at for at, (one, other) in enumerate(zip(asked, both)) if one != other), len(asked))
    question, answer = both[:common], both[common:]  # a tokenizer may join the end of the one with the other
    room = length - len(introduction) - len(needle) - len(both)
    if room < 0:
        raise ValueError(
            f"length {length} is too short for the task {task.name!r}: what is said takes {length - room} tokens. Valid: at "
            f"least {length - room}"
        )
    pieces: list[Sequence[int]] = []
    tokens, at = 0, drawn.randrange(len(text))
    while tokens < room:
        pieces.append(text[at % len(text)][: room - tokens])
        tokens, at = tokens + len(pieces[-1]), at + 1
    starts = np.cumsum([0, *map(len, pieces)])
    before = int(np.abs(starts - depth * room).argmin())
    parts = [introduction, *pieces[:before], needle, *pieces[before:], question]
    return Trial(task.name, length, depth, np.array([token for part in parts for token in part]), np.array(answer))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
