"""Muon beside AdamW as one optimizer: as torch's two do it, on weights that ranks hold whole or in parts.

Newton-Schulz computes in bfloat16: a gradient that differs in its last bit of float32, as sums over ranks do, may be rounded to
the next bfloat16, and a step then differs by some 1e-3 of itself. From the same gradients, steps are the same to 1e-7.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import get_scheduler

from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.planner import GlobalBatches
from hf_longctx.training.muon import Muon, hidden_matrices, muon_settings, training_arguments
from tests.builders.tiny_models import tiny_llama, tiny_mixtral
from tests.builders.training.sharded_runs import assert_same
from tests.builders.training.sharded_runs import run as sharded
from tests.builders.training_runs import Run, arguments, documents, step_loss, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]
PLUGIN = {"capacity": 120, "global_batch_documents": 6}
SETTINGS = {
    "optim": "muon",
    "optim_args": "momentum=0.9,weight_decay=0.2",
    "weight_decay": 0.1,
    "learning_rate": 5e-3,
    "max_grad_norm": 0.5,
    "num_train_epochs": 2,
}
SHAPES = ((5, 3), (1, 4), (6, 6), (3, 8))
STEPS = 3
BY_ROUNDING = 2e-4
"""Of weights after 4 steps, which change them by up to 1.2e-2; seen: 1e-4, in any sharding."""


# The optimizer


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def decay_of_others(settings: dict[str, Any]) -> float:
    """Return the weight decay of groups: none where matrices have one of their own."""
    return 0.0 if "weight_decay" in settings else 0.1


def stepped(placement: Any, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Weights after some steps; placement: how they are spread over all ranks, None: whole."""
    weights = [torch.nn.Parameter(value) for value in gradients(-1)]
    if placement is not None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        weights = [torch.nn.Parameter(distribute_tensor(weight.data, mesh, [placement])) for weight in weights]
    group = {"params": weights, "weight_decay": decay_of_others(settings)}
    optimizer = Muon([group], 0.02, is_matrix=lambda weight: weight is not weights[-1], muon=settings)
    for step in range(STEPS):
        for weight, gradient in zip(weights, gradients(step)):
            weight.grad = (
                distribute_tensor(gradient, weight.device_mesh, [placement])
                if isinstance(weight, DTensor)
                else gradient
            )
        optimizer.step()
    return [_whole(weight).detach() for weight in weights]


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "adjust_lr_fn": "original", "ns_steps": 3, "weight_decay": 0.3}], ids=str
)
def test_whole_and_in_parts_it_steps_as_torchs_two_do(settings: dict[str, Any], ranks2: RankPool):
    weights = [torch.nn.Parameter(value) for value in gradients(-1)]
    of_matrices: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1} | settings
    both = (
        torch.optim.Muon(weights[:-1], 0.02, **of_matrices),
        torch.optim.AdamW(weights[-1:], 0.02, weight_decay=decay_of_others(settings)),
    )
    for step in range(STEPS):
        for weight, gradient in zip(weights, gradients(step)):
            weight.grad = gradient
        for optimizer in both:
            optimizer.step()
    expected = [weight.detach() for weight in weights]
    torch.testing.assert_close(stepped(None, settings), expected, rtol=0, atol=0)
    for dimension in (0, 1):  # of which some do not divide by the ranks
        for weight in ranks2.run(stepped, Shard(dimension), settings):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-7)


def test_embeddings_head_norms_and_experts_in_one_tensor_are_left_to_adamw():
    model = tiny_mixtral()
    names = {id(weight): name for name, weight in model.named_parameters()}
    matrices = {names[id(weight)].split(".", 3)[-1] for weight in hidden_matrices(model)}
    projections = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert projections | {"mlp.gate.weight"} == matrices
    adapted = add_lora(
        tiny_llama(), r=2, target_modules=["q_proj", "embed_tokens", "lm_head"], modules_to_save=["o_proj"]
    )
    taken = {id(weight) for weight in hidden_matrices(adapted)}
    adapters = {name for name, weight in adapted.named_parameters() if id(weight) in taken}
    ends = {
        name.partition("layers.0.")[2] or name.rpartition("model.")[2] for name in adapters if "layers.1" not in name
    }
    of_projections = {f"self_attn.q_proj.lora_{part}.default.weight" for part in "AB"}
    assert ends == of_projections | {"self_attn.o_proj.modules_to_save.default.weight"} | {
        f"lm_head.lora_{part}.default.weight" for part in "AB"
    }


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("momentun=0.9", "is nothing that Muon takes; did you mean 'momentum'"),
        ("ns_steps=many", "ns_steps must be a whole number from 1 to 99, got 'many'"),
        ("ns_steps=0", "ns_steps must be a whole number from 1 to 99, got '0'"),
        ("ns_steps=100", "ns_steps must be"),
        ("nesterov=perhaps", "nesterov must be true or false, got 'perhaps'"),
        ("adjust_lr_fn=none", "adjust_lr_fn must be one of original, match_rms_adamw, got 'none'"),
        ("momentum=-1", "momentum must be at least 0 and less than 1, got '-1'"),
        ("momentum=1", "momentum must be"),
        ("momentum=nan", "momentum must be"),
        ("eps=0", "eps must be more than 0"),
        ("weight_decay=inf", "weight_decay must be at least 0, and finite"),
        ("momentum=0.9,momentum=0.8", "'momentum=0.8' after momentum=0.9: momentum is written twice; keep one"),
    ],
)
def test_arguments_that_muon_has_not_are_refused(text: str, rule: str):
    with pytest.raises(ValueError, match=re.escape(rule)):
        muon_settings(text)


def test_a_run_with_such_arguments_is_refused(tmp_path: Path):
    settings = {"output_dir": str(tmp_path), "optim": "muon", "optim_args": "momentum=-1"}
    with pytest.raises(ValueError, match="LongContextTrainer: optim_args="):
        train("llama", documents([5, 6]), PLUGIN, settings)


# Training


def trained(adapters: bool, plugin: dict[str, Any], settings: dict[str, Any], resume: str | None = None) -> Run:
    run = train(model(adapters), documents(LENGTHS), PLUGIN | plugin, settings, resume=resume, in_order=True)
    run.weights = {name: _whole(weight) for name, weight in run.weights.items()}
    return run


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def model(adapters: bool) -> Any:
    if not adapters:
        return tiny_llama()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = add_lora(tiny_llama(), r=4)
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    return made


def plain(adapters: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop with torch's own two optimizers, documents one by one."""
    made = model(adapters)
    args = arguments("unused", **SETTINGS)
    learns = {name: weight for name, weight in made.named_parameters() if weight.requires_grad}
    others = [weight for name, weight in learns.items() if weight.ndim != 2 or "embed" in name or "lm_head" in name]
    kept = {id(weight) for weight in others}
    groups = [
        {"params": [weight for weight in others if weight.ndim == 2], "weight_decay": 0.1},
        {"params": [weight for weight in others if weight.ndim != 2], "weight_decay": 0.0},
    ]
    matrices = [weight for weight in learns.values() if id(weight) not in kept]
    both: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, args.learning_rate, 0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    ]
    if others:
        both.append(torch.optim.AdamW(groups, args.learning_rate, eps=args.adam_epsilon))
    rows = documents(LENGTHS)
    batches = GlobalBatches(np.array(LENGTHS), args.seed, documents=PLUGIN["global_batch_documents"])
    steps = [batch for epoch in range(2) for batch in batches.epoch(epoch)]
    schedules = [get_scheduler(args.lr_scheduler_type, optimizer, 0, len(steps)) for optimizer in both]
    losses = []
    for batch in steps:
        loss = step_loss(made, [rows[number] for number in batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learns.values(), 0.5)
        losses.append(float(loss.detach()))
        for stepping in (*both, *schedules):
            stepping.step()
        made.zero_grad()
    return losses, made.state_dict()


@pytest.mark.parametrize(
    ("adapters", "plugin"),
    [(False, {"sharding": sharding}) for sharding in ("ddp", "zero1", "zero3")]
    + [(False, {"pipeline_stages": 2, "capacity": 200}), (True, {"sharding": "zero1"})],
    ids=str,
)
def test_two_ranks_train_as_a_plain_loop_does(adapters: bool, plugin: Any, ranks2: RankPool, tmp_path: Path):
    losses, weights = plain(adapters)
    for run in ranks2.run(trained, adapters, plugin, SETTINGS | {"output_dir": str(tmp_path)}):
        assert run.series("loss") == pytest.approx(losses, rel=1e-4)
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=BY_ROUNDING)


def test_a_run_of_two_ranks_in_parts_goes_on_in_one_process(ranks2: RankPool, tmp_path: Path):
    saving = SETTINGS | {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    runs = ranks2.run(trained, False, {"sharding": "zero2"}, saving)
    alone = trained(False, {"capacity": 200}, SETTINGS | {"output_dir": str(tmp_path)}, str(tmp_path / "checkpoint-2"))
    assert alone.series("loss") == pytest.approx(runs[0].series("loss"), rel=1e-4)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(weight, runs[0].weights[name], rtol=0, atol=BY_ROUNDING)


@pytest.mark.nightly
def test_tensor_parallelism(ranks4: RankPool, ranks1: RankPool, tmp_path: Path):
    settings: dict[str, Any] = {"optim": "muon", "max_grad_norm": 0.5}
    tiny_llama().save_pretrained(tmp_path / "model")
    [alone] = ranks1.run(sharded, str(tmp_path / "alone"), in_order=False, **settings)
    mesh = {"fsdp_size": 2, "tp_size": 2}
    runs = ranks4.run(sharded, str(tmp_path), folder=str(tmp_path / "model"), mesh=mesh, sharding="zero3", **settings)
    assert_same(runs, alone, 2e-4)


def test_a_loss_that_is_not_finite_is_logged_as_it_is():
    """Trainer's own filter would log the mean of those before it: 0 in a first step."""
    assert training_arguments({"output_dir": "out", "use_cpu": True}).logging_nan_inf_filter is False
    assert training_arguments(
        {"output_dir": "out", "use_cpu": True, "logging_nan_inf_filter": True}
    ).logging_nan_inf_filter
