"""Adapters that parts of weights, or stages of a pipeline, cannot hold."""

from typing import Any

from peft import LoraConfig, VBLoRAConfig, VeraConfig, get_peft_model

from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request, stated
from tests.builders.tiny_models import tiny_llama


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
