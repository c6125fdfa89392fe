"""What is done with a model that nobody could test, and whose user trains it all the same: each decoder layer runs document by
document, on documents that are whole on a rank.

So neither a state nor attention of its own passes from one document to the next. Whether positions begin at 0, as they are given,
and whether what lies around the layers looks at rows, is not known.
"""

from typing import Any

import torch

from hf_longctx.models.own_logits import base_of
from hf_longctx.models.traits import Traits, class_name


def untested_traits(model: Any) -> Traits:
    """Return the traits of a causal language model of which nothing is known."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in base_of(model).modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    return Traits(document_wise=tuple(sorted({class_name(layer) for stack in stacks for layer in stack})))
