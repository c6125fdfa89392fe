"""Gradients that tensor parallelism leaves in parts are summed once, however many micro-batches a step has; and models that
transformers' plans compute wrongly are refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import ApertusConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.certificate import tensor_parallel
from hf_longctx.certificate.tensor_parallel import refuse_wrong_tensor_parallelism
from hf_longctx.models.partial_gradients import PLANNED, sum_parts_as_they_come
from tests.builders.tiny_models import tiny_general
from tests.builders.transformers_versions import skip_unless_loaded
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


def refusal(folder: str, mesh: dict[str, int], degree: int) -> tuple[str, list[str]]:
    """Return why a model is refused, "" where it is not, and what rank 0 warns of."""
    warnings: list[str] = []
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**mesh))
    with mock.patch.object(tensor_parallel.logger, "warning", warnings.append):
        try:
            refuse_wrong_tensor_parallelism(model, degree)
        except ValueError as error:
            return str(error), warnings
    return "", warnings


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [("ranks2", {"tp_size": 2}), ("ranks4", {"tp_size": 4}), ("ranks4", {"fsdp_size": 2, "tp_size": 2})],
)
@pytest.mark.processes
def test_a_plan_that_leaves_out_gradients_is_refused(ranks: str, mesh: dict[str, int], tmp_path: Path, request):
    """Each rank has those of its own features; nobody sums them, and the loss does not show it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = ApertusConfig(vocab_size=128, num_key_value_heads=4, max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "apertus")
    if "fsdp_size" in mesh:
        skip_unless_loaded(mesh)
    pool, degree = request.getfixturevalue(ranks), mesh["tp_size"]
    for answer, warnings in pool.run(refusal, str(tmp_path / "apertus"), mesh, degree):
        assert f"tp_size={degree}: transformers' tensor parallelism does not compute ApertusForCausalLM" in answer
        assert re.search(r"in a tiny copy over 2 ranks, the gradient of model\.layers\..*alpha_[pn] differs by", answer)
        assert not warnings
    tiny_general("qwen3", num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path / "qwen3")
    assert set(map(str, pool.run(refusal, str(tmp_path / "qwen3"), mesh, degree))) == {"('', [])"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"WORKER": "import sys; sys.exit('no memory')"}, "RuntimeError: no memory"),
        ({"WORKER": "import time; time.sleep(60)", "LONGEST_SECONDS": 0.2}, "2 processes have not ended within 0.2 s"),
    ],
)
def test_what_cannot_be_tried_is_known_to_be_unknown_and_not_kept(
    change: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path))
    for name, value in (change | {"_seen": {}}).items():
        monkeypatch.setattr(tensor_parallel, name, value)
    model = tiny_general("qwen3")
    assert reason in tensor_parallel._known(type(model), model.config).unknown
    assert not list(tmp_path.rglob("*.json"))
