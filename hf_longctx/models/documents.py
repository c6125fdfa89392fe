"""How a model's documents may lie on ranks, for planning: over several, whole on one, or whole and alone in a micro-batch.
And how long they may be.

The model decides. `patch_model` finds out what its layers do, and notes it as `longctx_traits`. Layers that carry a state from
row to row hand it on to no other rank, so their documents stay whole; a model that cannot tell documents apart runs one at a
time (models/alone.py). A table of positions ends, and beyond it there is nothing to compute with: a longer document is refused
where it comes in, before it reaches the table in the middle of a step.
"""

from typing import Any

from hf_longctx.models.traits import Positions, Traits
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.planner.topology import Documents


def documents_of(model: Any) -> Documents:
    """Return how the documents of a causal language model may lie on ranks, also inside a PEFT wrapper; "split" for a model that
    nothing is noted of."""
    traits = _traits_of(model)
    return "split" if traits is None else traits.documents


def positions_of(model: Any) -> Positions | None:
    """Return the longest document that a causal language model has positions for; None: any, or nothing is noted."""
    traits = _traits_of(model)
    return None if traits is None else traits.positions


def longest_of(model: Any) -> int | None:
    """Return the tokens of the longest document that a causal language model has positions for; None as in `positions_of`."""
    positions = positions_of(model)
    return None if positions is None else positions.tokens


def refuse_beyond_positions(model: Any, tokens: int, document: str, remedies: str = "") -> None:
    """Raise ValueError for a document of more tokens than a model has positions for.

    Args:
        document: how to name it.
        remedies: further remedies, that begin with ", ".
    """
    positions = positions_of(model)
    if positions is None or tokens <= positions.tokens:
        return
    other_rows = positions.size - positions.tokens
    table = f"{positions.field}={positions.size} in its configuration"
    if other_rows > 0:
        table += f", {other_rows} of which are no positions of a document"
    raise ValueError(
        f"{document} has {tokens} tokens, and {type(language_model_of(model)).__name__} has positions for {positions.tokens} "
        f"({table}). Valid: documents of at most {positions.tokens} tokens{remedies}"
    )


def _traits_of(model: Any) -> Traits | None:
    return getattr(language_model_of(model), "longctx_traits", None)
