"""What a mask function means, where it holds tensors of the model's device."""

from typing import Any

import pytest
import torch
from transformers.masking_utils import and_masks, causal_mask_function, chunked_causal_mask_function

from hf_longctx import Layout, Segment
from hf_longctx.models import layout_mask
from hf_longctx.models.layout_mask import Pattern, pattern_of


class OnAnotherDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and that nothing but its copy on the CPU can be computed with."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "OnAnotherDevice":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="cuda:0")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return args[0].values
        raise RuntimeError(f"{func}: tensors on two devices")


def test_chunks_of_padding_on_the_device_are_understood():
    """Llama 4 makes such masks."""
    padding = OnAnotherDevice(torch.zeros(1, dtype=torch.long))
    assert pattern_of(chunked_causal_mask_function(4, padding), 4, rows=32) == Pattern(chunk=4)


def test_a_function_with_an_entry_for_each_row_is_asked_for_no_other():
    """Gemma 4 marks pictures so. On a GPU an entry beyond the last row would end the process."""
    pictures = OnAnotherDevice(torch.full((1, 3), -1))

    def of_one_picture(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (pictures[batch, query] == pictures[batch, key]) | (key <= query)

    assert pattern_of(and_masks(causal_mask_function, of_one_picture), None, rows=3) == Pattern()


@pytest.mark.parametrize(
    ("seen", "local_size", "pattern"),
    [
        (lambda q, k: k <= q, None, layout_mask.Pattern()),
        (lambda q, k: (k <= q) & (k > q - 5), 5, layout_mask.Pattern(window=5)),
        (lambda q, k: (k <= q) & (k // 4 == q // 4), 4, layout_mask.Pattern(chunk=4)),
        (lambda q, k: k >= 0, None, None),
        (lambda q, k: (k <= q) | (k < 3), None, None),
        (lambda q, k: (k <= q) & (k > q - 4), 5, None),
    ],
)
def test_what_a_mask_means_is_asked(seen: Any, local_size: int | None, pattern: Any):
    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen(query, key)

    if pattern is None:
        with pytest.raises(ValueError, match="neither causal, a window nor chunks"):
            layout_mask.pattern_of(function, local_size, 100)
    else:
        assert layout_mask.pattern_of(function, local_size, 100) == pattern


def test_whoever_computes_with_a_mask_is_named():
    call = layout_mask.LayoutCall(Layout({0: (Segment(0, 0, 6),)}))
    mask = layout_mask.LayoutMask.of(call, layout_mask.Pattern())
    assert mask.shape == (1, 1, 6, 6)
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.untyped_storage().nbytes() == 1
    assert mask.to(torch.float32) is mask
    for compute in (
        lambda: mask + 1,
        lambda: mask[0],
        lambda: torch.cat([mask, mask]),
        lambda: torch.where(mask, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"computes with its attention mask \(torch function"):
            compute()
