"""What a mask function means, where it holds tensors of the model's device."""

from typing import Any

import torch
from transformers.masking_utils import and_masks, causal_mask_function, chunked_causal_mask_function

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
