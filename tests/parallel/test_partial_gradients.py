"""Gradients that tensor parallelism leaves in parts are summed once, however many micro-batches a step has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.models.partial_gradients import PLANNED, sum_parts_as_they_come
from tests.builders.tiny_models import tiny_general
from tests.worlds.rank_pool import RankPool

DOCUMENTS = [torch.arange(length) * 7 % 60 + 2 for length in (9, 5, 13)]


def gradients(folder: str, tp_size: int, used: bool = False) -> dict[str, Any]:
    """Return the gradients of all weights after a micro-batch for each document: of those in parts, this rank's share.

    Args:
        used: the model has run as transformers runs it before it is patched.
    """
    mesh = {"tp_size": tp_size} if tp_size > 1 else {}
    loaded: Any = {"distributed_config": DistributedConfig(**mesh)} if mesh else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **loaded)
    if used:
        model(input_ids=DOCUMENTS[0][None], labels=DOCUMENTS[0][None]).loss.backward()
        model.zero_grad()
    patch_model(model)
    patch_model(model)
    model.train()
    for ids in DOCUMENTS:
        layout = Layout({0: (Segment(0, 0, len(ids)),)})
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        output = model(input_ids=ids[None], layout=layout, shift_labels=labels[None], num_items_in_batch=1)
        output.loss.backward()
    return {
        name: weight.grad.tolist()
        for name, weight in model.named_parameters()
        if name.endswith("norm.weight") and weight.grad is not None
    }


@pytest.mark.processes
@pytest.mark.parametrize(("family", "used"), [("qwen3", True), ("gemma3_text", False)])
def test_norms_of_heads_are_those_of_one_process(family: str, used: bool, ranks2: RankPool, tmp_path: Path):
    tiny_general(family).save_pretrained(tmp_path)
    expected = gradients(str(tmp_path), 1)
    assert any("q_norm" in name for name in expected)
    for rank in ranks2.run(gradients, str(tmp_path), 2, used):
        assert rank.keys() == expected.keys()
        for name, gradient in expected.items():
            assert rank[name] == pytest.approx(gradient, rel=1e-5, abs=1e-6), name


def test_a_transformers_that_sums_in_another_way_is_refused():
    module = torch.nn.Linear(2, 2)
    model = SimpleNamespace(tp_size=2, tp_plan={"layers.*.q_norm": PLANNED}, modules=module.modules)
    with pytest.raises(ValueError, match=r"tp_size=2: .* might be summed twice. Valid: transformers 5.17 to 5.23"):
        sum_parts_as_they_come(model)
    sum_parts_as_they_come(SimpleNamespace(tp_size=None))
