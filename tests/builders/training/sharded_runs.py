"""Training runs of tiny models with every sharding, and what all of them must agree on."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx import from_pretrained
from hf_longctx.models.adapters.peft_adapters import freeze
from tests.builders.training_runs import (
    ANY_MODELS,
    RecordingTrainer,
    Run,
    documents,
    train,
)

STEPS = 8
"""The last one is of a second epoch."""
LENGTHS = [90, 7, 30, 44, 12, 20, 3, 60, 25, 9, 48, 48, 2, 70, 33, 95, 64, 5, 17, 81, 40, 40, 6, 88, 28, 52, 11, 36]
CAPACITY = 48
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "values": {"target_modules": ["v_proj"]},
    "head": {"target_modules": ["v_proj", "lm_head"]},
    "embeddings": {"target_modules": ["v_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": list(range(0, 128, 3))},
    "copies": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}
"""Settings of LoraConfig: the last three of embeddings, which a model may share with its output head."""


def run(
    output: str,
    *,
    model: str = "llama",
    adapter: str = "full",
    sharding: str = "auto",
    checkpointing: bool = False,
    offload: float = 0.0,
    folder: str | None = None,
    mesh: dict[str, int] | None = None,
    in_order: bool | Literal["one at a time"] = True,
    lengths: list[int] = LENGTHS,
    steps: int = STEPS,
    evaluate: bool = False,
    resume: str | None = None,
    planner: str = "hdp",
    stages: int = 1,
    frozen: Sequence[str] = (),
    own_weights: bool = False,
    wider: Sequence[str] = (),
    build: dict[str, Any] | None = None,
    plugin: dict[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    trainer_class: Any = RecordingTrainer,
    **settings: Any,
) -> Run:
    """Trains on this rank; with a mesh, the model saved in `folder`, sharded as it is loaded; else one of MODELS, made with
    the fields `build` of its configuration. `plugin`: more of its fields. `own_weights`: of what is trained and whole, all ranks
    but the first have other values, as where a script sets no seed. `wider`: parts of the names of weights in float64."""
    if mesh is not None:
        assert folder is not None
        load = from_pretrained if "pp_size" in mesh else AutoModelForCausalLM.from_pretrained
        built = load(folder, distributed_config=DistributedConfig(**mesh))
    else:
        built = ANY_MODELS[model](**(build or {}))
    if frozen:
        freeze(built, frozen)
    for name, weight in built.named_parameters():
        if any(part in name for part in wider):
            weight.data = weight.data.double()
    if adapter != "full":
        lora = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[adapter])
        built = get_peft_model(built, lora)
    if own_weights:
        with torch.no_grad():
            for weight in built.parameters():
                if weight.requires_grad and not isinstance(weight, DTensor):
                    weight += 0.05 * int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"]) // (mesh or {}).get("tp_size", 1) // stages
    rows = documents(lengths, labels=True)
    given = {
        "capacity": CAPACITY if ranks > 1 else 2 * max(lengths),
        "global_batch_documents": 4,
        "sharding": sharding,
        "activation_offload": offload,
        "planner": planner,
        "pipeline_stages": stages,
    }
    settings = {"output_dir": output, "max_steps": steps, "gradient_checkpointing": checkpointing} | settings
    return train(
        built,
        rows,
        given | (plugin or {}),
        settings,
        in_order=in_order,
        eval_rows=rows[:9] if evaluate else None,
        resume=resume,
        callbacks=callbacks,
        trainer_class=trainer_class,
    )


def assert_same(runs: list[Run], expected: Run, tolerance: float = 1e-4) -> None:
    for trained in runs:
        for name in ("loss", "grad_norm"):
            assert trained.series(name) == pytest.approx(expected.series(name), rel=tolerance)
            assert len(trained.series(name)) >= len(expected.series(name)) > 0


def refused(output: str, settings: dict[str, Any]) -> str:
    try:
        run(output, **settings)
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")
