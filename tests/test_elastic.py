"""A run that is continued on other numbers of ranks, with other sharding and other planners, is the undisturbed run: the same
losses and gradient norms, each document once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx.training.checkpoint import shares
from tests.rank_pool import RankPool
from tests.sharded_runs import LENGTHS, run
from tests.training_runs import MODELS, Run, assembled, documents

STEPS = 10
"""Two for each leg of the longest travel."""
CLOSE = 1e-5
"""Relative, of losses in float32."""


class StopsAfter(TrainerCallback):
    """Asks training to stop after a step, when it has been saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def leg(output: str, *, stop: int, file_bytes: int = 2**30, **options: Any) -> Run:
    """Trains on this rank until a step, from the newest checkpoint if there is one."""
    before, shares.MODEL_FILE_BYTES = shares.MODEL_FILE_BYTES, file_bytes
    try:
        saving = {"resume": "auto", "save_strategy": "steps", "save_steps": 2}
        return run(output, callbacks=[StopsAfter(stop)], **saving, **({"steps": STEPS} | options))
    finally:
        shares.MODEL_FILE_BYTES = before


@pytest.fixture(scope="module")
def undisturbed(ranks1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, adapter) -> what one process saw."""
    seen: dict[tuple[str, str], Run] = {}

    def of(model: str, adapter: str = "full") -> Run:
        if (model, adapter) not in seen:
            output = str(tmp_path_factory.mktemp("undisturbed"))
            [seen[model, adapter]] = ranks1.run(run, output, model=model, adapter=adapter, steps=STEPS, in_order=False)
        return seen[model, adapter]

    return of


def travel(legs: list[tuple[RankPool, dict[str, Any]]], expected: Run, output: Path) -> list[Run]:
    """Runs the legs, equally many steps each, and compares what they say and held with an undisturbed run."""
    steps: list[list[list[int]]] = []
    runs: list[Run] = []
    for number, (pool, options) in enumerate(legs, 1):
        stop = STEPS * number // len(legs) // 2 * 2 if number < len(legs) else STEPS
        runs = pool.run(leg, str(output), stop=stop, **options)
        groups = runs[: len(runs) // options.get("stages", 1) : (options.get("mesh") or {}).get("tp_size", 1)]
        steps += [assembled(step) for step in zip(*(trained.held for trained in groups), strict=True)]
        for trained in runs:
            assert trained.series("loss") == pytest.approx(expected.series("loss")[:stop], rel=CLOSE)
            assert trained.series("grad_norm") == pytest.approx(expected.series("grad_norm")[:stop], rel=1e-4)
            assert trained.series("learning_rate") == expected.series("learning_rate")[:stop]
    assert steps == [assembled([step]) for step in expected.held]
    learned = [row for row in documents(LENGTHS, labels=True) if any(label != -100 for label in row["labels"][1:])]
    first_epoch = [document for step in steps[: -(-len(learned) // 4)] for document in step]
    assert sorted(first_epoch) == sorted(row["input_ids"] for row in learned), "each document once"
    return runs


def assert_loads(folder: Path, expected: Run) -> None:
    """Plain transformers reads a checkpoint's folder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    for name, weight in expected.weights.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-4)


def test_ranks_sharding_and_planner_change_at_every_checkpoint(
    undisturbed, ranks1, ranks2, ranks3, ranks4, tmp_path: Path
):
    legs = [
        (ranks4, {"sharding": "ddp"}),
        (ranks2, {"sharding": "zero3", "file_bytes": 2**14}),
        (ranks3, {"sharding": "zero1", "planner": "static_cp"}),
        (ranks1, {}),
        (ranks4, {"sharding": "zero2", "file_bytes": 2**14}),
    ]
    travel(legs, undisturbed("llama"), tmp_path)
    assert len(list((tmp_path / f"checkpoint-{STEPS}").glob("model-*.safetensors"))) == 4
    assert_loads(tmp_path / f"checkpoint-{STEPS}", undisturbed("llama"))


def test_tied_weights_travel_once(undisturbed, ranks1, ranks2, tmp_path: Path):
    legs = [(ranks2, {"sharding": "zero3"}), (ranks1, {})]
    travel([(pool, options | {"model": "bloom"}) for pool, options in legs], undisturbed("bloom"), tmp_path)
    assert_loads(tmp_path / f"checkpoint-{STEPS}", undisturbed("bloom"))


def test_adapters_travel_too(undisturbed, ranks1, ranks2, ranks4, tmp_path: Path):
    legs = [(ranks2, {"sharding": "zero3"}), (ranks4, {"sharding": "ddp"}), (ranks1, {})]
    runs = travel(
        [(pool, options | {"adapter": "lora"}) for pool, options in legs], undisturbed("llama", "lora"), tmp_path
    )
    saved = tmp_path / f"checkpoint-{STEPS}"
    assert (saved / "adapter_config.json").exists()
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(MODELS["llama"](), str(saved)).state_dict()
    expected = undisturbed("llama", "lora").weights
    assert runs
    for name in [name for name in expected if "lora" in name]:
        torch.testing.assert_close(loaded[name], expected[name], rtol=0, atol=1e-4)


MESHES: list[tuple[str, dict[str, int]]] = [
    ("ranks2", {"tp_size": 2}),
    ("ranks2", {"fsdp_size": 2, "ep_size": 2}),
    ("ranks1", {}),
    ("ranks4", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    ("ranks4", {"fsdp_size": 4, "ep_size": 2}),
]


@pytest.mark.processes
def test_tensor_and_expert_parallelism_change_at_every_checkpoint(undisturbed, tmp_path: Path, request):
    folder = tmp_path / "model"
    MODELS["mixtral"]().save_pretrained(folder)
    legs = []
    for pool, mesh in MESHES:
        options = {"model": "mixtral", "file_bytes": 2**14} | ({"mesh": mesh, "folder": str(folder)} if mesh else {})
        legs.append((request.getfixturevalue(pool), options))
    travel(legs, undisturbed("mixtral"), tmp_path / "run")
    assert_loads(tmp_path / "run" / f"checkpoint-{STEPS}", undisturbed("mixtral"))
