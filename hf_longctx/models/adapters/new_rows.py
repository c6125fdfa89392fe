"""Rows for new tokens in a model's embeddings and output head.

A new row is the mean of those that were there: the same whenever the model is loaded again, so that adapters, which save none of
the rows that they do not train, find what they were trained on. Nothing is sent.
"""

from typing import Any

import torch


def add_rows(model: Any, rows: int) -> int:
    """Give a model embeddings, and an output head, for `rows` tokens, if it has fewer. Returns how many were added.

    Args:
        model: a causal language model, no wrapper.
        rows: tokens of its tokenizer.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if rows <= before:
        return 0
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            for name in ("weight", "bias"):
                values = getattr(module, name, None)
                if values is not None and values.shape[0] == rows:
                    values[before:] = values[:before].float().mean(0).to(values.dtype)
    return rows - before
