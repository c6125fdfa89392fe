"""How a model's documents may lie on ranks, for planning: over several, whole on one, or whole and alone in a micro-batch.

The model decides. `patch_model` finds out what its layers do, and notes it as `longctx_traits`. Layers that carry a state from
row to row hand it on to no other rank, so their documents stay whole; a model that cannot tell documents apart runs one at a
time (models/alone.py).
"""

from typing import Any

from hf_longctx.planner.topology import Documents


def documents_of(model: Any) -> Documents:
    """Return how the documents of a causal language model may lie on ranks, also inside a PEFT wrapper; "split" for a model that
    nothing is noted of."""
    language_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    traits = getattr(language_model, "longctx_traits", None)
    return "split" if traits is None else traits.documents
