"""FSDP2 casts what layers are called with to the dtype that computes: what a layout and ALiBi's slopes are stays as it is."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.models import attention
from tests.builders.training_runs import ANY_MODELS
from tests.worlds.rank_pool import RankPool


def received(family: str) -> tuple[int, set[str]]:
    """Return how many layouts the attention of a sharded model has received in a forward, and the dtypes of slopes."""
    model: Any = patch_model(ANY_MODELS[family]())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.base_model.h if family == "bloom" else model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    layouts, slopes = [], set()

    def attend(q: Any, k: Any, v: Any, layout: Any, *arguments: Any, alibi_slopes: Any = None, **keywords: Any) -> Any:
        layouts.append(layout)
        slopes.update([] if alibi_slopes is None else [str(alibi_slopes.dtype)])
        return original(q, k, v, layout, *arguments, alibi_slopes=alibi_slopes, **keywords)

    original, ids = attention.layout_attention, torch.arange(7)[None]
    with mock.patch.object(attention, "layout_attention", attend):
        model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 7),)}), shift_labels=ids, num_items_in_batch=7)
    return len({id(layout) for layout in layouts}), slopes


@pytest.mark.processes
@pytest.mark.parametrize(("family", "slopes"), [("bloom", {"torch.float32"}), ("llama", set())])
def test_layers_receive_one_layout_and_slopes_in_full(family: str, slopes: set[str], ranks1: RankPool):
    """Slopes were rounded to bfloat16, and each layer derived all anew from a layout of its own."""
    assert ranks1.run(received, family) == [(1, slopes)]
