"""Checks that linear layers of other packages compute each row by itself.

A tiny copy has plain weights, so that certificates say nothing of quantised ones. Most packages quantise the inputs of a product
row by row, or not at all. Some take a scale of all rows of the call, or keep a column in half precision where any row is large
(bitsandbytes with llm_int8_threshold): documents would change each other's results. No list would know them all, so one layer of
each kind is asked: a few rows, and the same rows beside another one.

Shapes: ROWS rows.
"""

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

ROWS = 4
LARGE = 1000.0
"""Factor of the row that is changed: beyond any threshold for outliers."""


def refuse_rows_that_meet(model: torch.nn.Module) -> None:
    """Raise ValueError if a linear layer's result for a row depends on another row. Layers whose weights are plain, in parts or
    absent pass, and so do those that take no rows of numbers."""
    asked = set()
    for name, module in model.named_modules():
        kind = (type(module), type(getattr(module, "weight", None)))
        if kind in asked or not _is_foreign(module):
            continue
        asked.add(kind)
        if _rows_meet(module, model):
            raise ValueError(
                f"{name} is a {kind[0].__name__}, whose result for a token depends on the other tokens of the call (a scale of "
                "all rows, or outliers that any row may bring): documents would change each other's results. Valid: a "
                "quantisation of weights alone, or by token; of bitsandbytes, load_in_4bit, or llm_int8_threshold=0.0"
            )


def _is_foreign(module: torch.nn.Module) -> bool:
    """Tell whether this is a linear layer that may do more than multiply with its weight."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "in_features") or next(module.children(), None) is not None:
        return False
    if weight is not None and (isinstance(weight, DTensor) or weight.is_meta):
        return False
    plain_weight = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor
    return not (plain_weight and type(module).forward is torch.nn.Linear.forward)


def _rows_meet(module: Any, model: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, ROWS, module.in_features, generator=generator)
    others = torch.cat([rows[:, :-1], LARGE * rows[:, -1:]], dim=1)
    layer = copy.deepcopy(module)  # some pack their weights anew when they are first called
    try:
        for training in (True, False):  # and take other ways
            layer.train(training)
            with torch.no_grad():
                first, second = (layer(rows.to(model.device, model.dtype))[:, :-1] for rows in (rows, others))
            if not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
                return True
    except Exception:  # of a class that takes something else
        return False
    return False
