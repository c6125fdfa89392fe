"""Whom everyone waits for, from what all ranks say of themselves. No communication here, and no clock."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hf_longctx.supervision.progress import Progress, ranks_in_words

NAMED = 8
"""Most ranks or groups of ranks that a verdict spells out; of thousands, the rest is counted."""


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank, as the observer has it."""

    rank: int
    place: str
    """such as "host node3, pid 1234"; empty before the first sign"""
    at: Progress
    idle: float
    """seconds since the rank moved, by its own count"""
    silent: float
    """seconds since the observer saw a new sign"""
    left: bool = False
    """whether its training has ended"""

    @property
    def where(self) -> str:
        """in words"""
        if not self.place:
            return "has not come so far as to have a trainer"
        return f"{self.at}; its training has ended" if self.left else str(self.at)

    @property
    def last_seen(self) -> str:
        """Such as "rank 1 (host a, pid 7), last seen at step 7, summing gradients"."""
        return f"rank {self.rank} ({self.place}), last seen at {self.where}" if self.place else str(self)

    def __str__(self) -> str:
        """Such as "rank 1 (host a, pid 7): step 7, micro-batch 2 of 3, backward, layer 14, computing for 31 s"."""
        if not self.place:
            return f"rank {self.rank}, which {self.where}"
        return f"rank {self.rank} ({self.place}): {self.where}" + ("" if self.left else f" for {self.idle:.0f} s")


@dataclass(frozen=True)
class Verdict:
    """Who is waited for."""

    named: list[int]
    """ranks"""
    seconds: float
    """for how long"""
    message: str
    expected: bool = False
    """whether those named do what may take any time: nothing is wrong, and nobody is ended for it"""


def verdict(signs: Sequence[Sign], after: float) -> Verdict | None:
    """Names the ranks that all others wait for; None while training moves.

    Ranks without a sign of life for `after` seconds come first. Else, if no rank has moved for so long: those that are not
    waiting themselves, and of several those furthest behind; else those whose training has ended; else, when all wait,
    those furthest behind. Where none waits and all do what may take any time, nothing stands still.
    """
    present = [sign for sign in signs if not sign.left]
    if silent := [sign for sign in present if sign.silent >= after]:
        return _silence(signs, silent)
    if not present or min(sign.idle for sign in present) < after:
        return None
    if all(sign.at.unbounded and not sign.at.waits for sign in present):
        return None
    busy = [sign for sign in present if not sign.at.waits]
    left = [sign for sign in signs if sign.left]
    if busy and all(sign.at.unbounded for sign in busy):
        return _long_work(signs, busy)
    named = _furthest_behind(busy) if busy else left or _furthest_behind(present)
    seconds, step = min(sign.idle for sign in present), min((sign.at for sign in present), key=lambda at: at.step)
    reason = "everyone waits for" if busy or left else "all ranks wait, furthest behind"
    reason = f"{step.step_in_words} has not moved for {seconds:.0f} s: {reason}"
    return _verdict(signs, named, seconds, reason, list(map(str, named)))


def _long_work(signs: Sequence[Sign], busy: Sequence[Sign]) -> Verdict:
    """Says in a line what is waited for, where that may take any time."""
    ranks, seconds = [sign.rank for sign in busy], min(sign.idle for sign in busy)
    activities = "; ".join(dict.fromkeys(sign.at.activity for sign in busy))
    message = (
        f"{ranks_in_words(ranks)} of {len(signs)} {'are' if len(busy) > 1 else 'is'} {activities}, for {seconds:.0f} s so far; "
        "the others wait. This may take long, and ends nobody"
    )
    return Verdict(sorted(ranks), seconds, message, expected=True)


def verdict_on_lost_contact(signs: Sequence[Sign], soon: float) -> Verdict | None:
    """Names the ranks for which collectives of others have failed, or None while it is not seen: those without a sign of life
    for `soon` seconds, else those that have left."""
    if silent := [sign for sign in signs if not sign.left and sign.silent >= soon]:
        return _silence(signs, silent)
    if left := [sign for sign in signs if sign.left]:
        return _verdict(signs, left, 0.0, "collectives fail because of", list(map(str, left)))
    return None


def _silence(signs: Sequence[Sign], silent: Sequence[Sign]) -> Verdict:
    seconds = max(sign.silent for sign in silent)
    cause = "its process is stopped, its machine gone, or its interpreter blocked"
    reason = f"no sign of life for {seconds:.0f} s ({cause}) of"
    return _verdict(signs, silent, seconds, reason, [sign.last_seen for sign in silent])


def _furthest_behind(signs: Sequence[Sign]) -> list[Sign]:
    least = min(sign.at.order for sign in signs)
    return [sign for sign in signs if sign.at.order == least]


def _verdict(signs: Sequence[Sign], named: Sequence[Sign], seconds: float, reason: str, texts: list[str]) -> Verdict:
    """Adds where everybody is: those named one by one, the others by place, the largest groups first."""
    more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
    message = f"{reason} {'; '.join(texts[:NAMED])}{more}."
    ranks = {sign.rank for sign in named}
    places: dict[str, list[int]] = defaultdict(list)
    for sign in signs:
        if sign.rank not in ranks:
            places[sign.where].append(sign.rank)
    groups = sorted(places.items(), key=lambda group: -len(group[1]))
    for where, members in groups[:NAMED]:
        message += f" {ranks_in_words(members).capitalize()}: {where}."
    if len(groups) > NAMED:
        message += f" {sum(len(members) for _, members in groups[NAMED:])} ranks elsewhere."
    return Verdict(sorted(ranks), seconds, message)
