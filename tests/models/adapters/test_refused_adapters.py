"""Adapters that parts of weights, or stages of a pipeline, cannot hold."""

from typing import Any

import torch
from peft import LoraConfig, VBLoRAConfig, VeraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers.distributed import DistributedConfig

from hf_longctx import patch_model
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request, stated
from tests.builders.tiny_models import tiny_llama, tiny_mixtral
from tests.worlds.rank_pool import RankPool


def test_adapters_of_two_parameters_in_one_memory_are_refused_in_parts():
    def refused(sharding: Any, tied: bool, stages: int = 1) -> list[tuple[str, str]]:
        lora = LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM", ensure_weight_tying=True)
        model = get_peft_model(tiny_llama(tie_word_embeddings=tied), lora)
        plugin = LongContextPlugin(capacity=8, sharding=sharding, pipeline_stages=stages)
        return problems(Request(stated({}), plugin, model, 2, sharding))

    assert not refused("ddp", tied=True)
    assert not refused("zero3", tied=False)
    for sharding, stages, setting in (("zero3", 1, "sharding"), ("ddp", 2, "pipeline_stages")):
        [(key, rule)] = refused(sharding, True, stages)
        assert key == setting
        assert "lora_A.default.weight is a second parameter of the memory of another" in rule


def test_what_layers_of_several_stages_share_is_refused_where_it_is_trained():
    def refused(config: Any) -> list[tuple[str, str]]:
        plugin = LongContextPlugin(capacity=8, pipeline_stages=2)
        return problems(Request(stated({}), plugin, get_peft_model(tiny_llama(), config), 2, "ddp"))

    assert not refused(VeraConfig(r=4, target_modules=["o_proj"]))
    [(key, rule)] = refused(VBLoRAConfig(r=4, num_vectors=16, vector_length=8, topk=2, target_modules=["o_proj"]))
    assert key == "pipeline_stages"
    assert "each stage would train a copy of its own" in rule


def test_adapters_are_refused_where_ranks_share_heads(monkeypatch):
    """Seen on two ranks: LoRA on v_proj alone trained, with gradients whose norm was 10 % off; on q_proj it ended in a shape."""
    lora = LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")
    for degree, adapted in ((2, True), (1, True), (2, False)):
        model: Any = tiny_llama()
        monkeypatch.setattr(type(model), "tp_size", degree)
        model = get_peft_model(model, lora) if adapted else model
        rules = [
            rule
            for key, rule in problems(Request(stated({}), LongContextPlugin(capacity=8), model, 2))
            if key == "tp_size"
        ]
        assert len(rules) == (degree > 1 and adapted)
        assert all(rule.startswith("2 with adapters: ") and "Valid: " in rule for rule in rules)


def refused_in_parts(targets: list[str], **settings: Any) -> str:
    """Return why adapters are refused on a model of which a weight is in parts, as transformers loads it."""
    model = tiny_llama()
    mlp = model.model.layers[0].mlp.down_proj
    mlp.weight = torch.nn.Parameter(distribute_tensor(mlp.weight.data, init_device_mesh("cpu", (1,))))
    try:
        patch_model(add_lora(model, target_modules=targets, **settings))
    except ValueError as error:
        return str(error)
    return ""


def test_adapters_that_need_whole_weights_are_refused_in_parts(ranks1: RankPool):
    for targets, settings, named in (
        (["lm_head"], {}, "output head of a model that was loaded in parts"),
        (["q_proj"], {"use_dora": True}, "use_dora=True on a model that was loaded in parts"),
        (["q_proj"], {"modules_to_save": ["norm"]}, "modules_to_save=['norm'] on a model that was loaded in parts"),
        (
            ["q_proj"],
            {"trainable_token_indices": [1]},
            "trainable_token_indices=[1] on a model that was loaded in parts",
        ),
        (["q_proj"], {}, ""),
    ):
        [message] = ranks1.run(refused_in_parts, targets, **settings)
        assert named in message
        assert bool(message) == bool(named)
        assert not named or "Valid: " in message


def refused_with_experts(ep_size: int) -> list[str]:
    """Return why an adapter on experts, of PEFT's own, is refused where experts are spread over so many processes."""
    model = tiny_mixtral()
    router = model.model.layers[0].mlp.gate
    router.weight = torch.nn.Parameter(distribute_tensor(router.weight.data, init_device_mesh("cpu", (1,))))
    model.config.distributed_config = DistributedConfig(fsdp_size=2, ep_size=ep_size)
    model.peft_config = {"default": LoraConfig(target_parameters=["mlp.experts.down_proj"])}
    refused = problems(Request(stated({}), LongContextPlugin(capacity=8), model, 1))
    return [rule for key, rule in refused if key == "fsdp_size"]


def test_adapters_on_experts_that_are_spread_are_refused(ranks1: RankPool):
    [rules] = ranks1.run(refused_with_experts, 2)
    [rule] = rules
    assert "target_parameters=['mlp.experts.down_proj'] on a model that was loaded in parts" in rule
    assert "with ep_size=2" in rule
    assert "Valid: DistributedConfig(fsdp_size=...) without ep_size" in rule
    assert ranks1.run(refused_with_experts, 1) == [[]]
