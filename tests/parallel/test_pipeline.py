"""Models in pipeline stages against one process: the same losses, gradient norms and weights, whatever the schedule.

Runs are those of test_sharding.py, under NCCL's order of operations, with models of four layers. A plan of documents this
short has no reason for chunks: `chunks` cuts every document that is alone in its micro-batch into up to three.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.data.step_plans import Planning
from hf_longctx.planner import GPU, CostModel, Topology
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.elastic_runs import STEPS as TRAVELLED
from tests.builders.training.elastic_runs import leg, travel
from tests.builders.training.pipeline_runs import FOUR, GPIPE, INTERLEAVED, ONE_KERNEL, STEPS, TIED, chunked_plans, run
from tests.builders.training.sharded_runs import assert_same
from tests.builders.training.sharded_runs import run as run_sharded
from tests.builders.training_runs import MODELS, RecordingTrainer, Run, arguments, documents, fresh_accelerator_state
from tests.builders.transformers_versions import skip_unless_loaded
from tests.worlds.faults.stalled_runs import Stall, stalled_run
from tests.worlds.rank_pool import RankFailure, RankPool

BY_NIGHT = pytest.mark.nightly
"""Combinations of what other cases have one by one."""
DOUBLE = FOUR | {"dtype": torch.float64}
FROZEN = ("model.embed_tokens", "model.layers.[0-1].*")
"""All that the first of two stages has."""


class LastLayerTrainer(RecordingTrainer):
    """Trains the last layer and what follows: other stages have nothing to learn."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        model.model.requires_grad_(False)
        model.model.layers[-1].requires_grad_(True)
        super().__init__(model, *args, **kwargs)


class HalfTrainer(RecordingTrainer):
    """Of a model in bfloat16 but for its embeddings."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        model.to(torch.bfloat16)
        model.model.embed_tokens.float()
        super().__init__(model, *args, **kwargs)


class HalfFirstTrainer(RecordingTrainer):
    """Of a model whose first layers and embeddings are in bfloat16."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        model.model.embed_tokens.bfloat16()
        model.model.layers[:2].bfloat16()
        super().__init__(model, *args, **kwargs)


@pytest.fixture(scope="module")
def one_process(ranks1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what one process saw that holds the whole model."""
    seen: dict[str, Run] = {}

    def of(**options: Any) -> Run:
        name = str(sorted(options.items()))
        if name not in seen:
            [seen[name]] = ranks1.run(run, str(tmp_path_factory.mktemp("one")), in_order=False, **options)
        return seen[name]

    return of


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "stages", "what", "options"),
    [
        ("ranks2", 2, {"model": "llama"}, {}),
        pytest.param(
            *("ranks4", 2, {"model": "llama"}, {"chunks": True, "checkpointing": True, "plugin": GPIPE}), marks=BY_NIGHT
        ),
        ("ranks4", 4, {"model": "llama"}, {"chunks": True, "offload": 1.0}),
        ("ranks4", 2, {"model": "mixtral"}, {"chunks": True, "checkpointing": True, "offload": 0.5}),
        ("ranks4", 2, {"model": "mixtral"}, {"plugin": INTERLEAVED}),
        ("ranks4", 4, {"model": "mixtral"}, {"plugin": GPIPE}),
        pytest.param(
            *("ranks4", 2, {"model": "llama", "build": TIED}, {"chunks": True, "plugin": INTERLEAVED}), marks=BY_NIGHT
        ),
        ("ranks4", 4, {"model": "llama", "build": TIED}, {"checkpointing": True}),
        ("ranks4", 2, {"model": "llama", "adapter": "lora"}, {"chunks": True}),
        ("ranks4", 2, {"model": "llama"}, {"sharding": "zero1", "chunks": True, "checkpointing": True}),
        pytest.param(
            *("ranks4", 2, {"model": "mixtral"}, {"sharding": "zero1", "plugin": INTERLEAVED, "chunks": True}),
            marks=BY_NIGHT,
        ),
        ("ranks4", 2, {"model": "llama", "build": TIED}, {"sharding": "zero1"}),
        pytest.param("ranks4", 2, {"model": "llama", "adapter": "lora"}, {"sharding": "zero1"}, marks=BY_NIGHT),
        ("ranks4", 2, {"model": "llama"}, {"plugin": {"ulysses_degree": 2, "mlp_tile_tokens": 8}, "chunks": True}),
        ("ranks4", 2, {"model": "mixtral"}, {"planner": "bytescale_balanced", "plugin": {"keep_last_slice": True}}),
        ("ranks3", 3, {"model": "mistral"}, {"chunks": True}),
        ("ranks2", 2, {"model": "llama", "adapter": "values"}, {"chunks": True}),
        ("ranks2", 2, {"model": "mixtral", "adapter": "lora"}, {}),
        ("ranks2", 2, {"model": "llama", "adapter": "head"}, {"chunks": True}),
        ("ranks2", 2, {"model": "llama", "adapter": "tokens", "build": TIED}, {}),
        pytest.param(
            *("ranks4", 2, {"model": "mixtral", "frozen": FROZEN}, {"chunks": True, "checkpointing": True}),
            marks=BY_NIGHT,
        ),
        ("ranks4", 2, {"model": "llama", "frozen": FROZEN}, {"sharding": "zero1"}),
        ("ranks4", 2, {"model": "llama", "frozen": FROZEN}, {"plugin": INTERLEAVED}),
        ("ranks4", 4, {"model": "mixtral", "trainer_class": LastLayerTrainer}, {"chunks": True}),
        ("ranks4", 2, {"model": "mixtral"}, ONE_KERNEL | {"chunks": True, "plugin": INTERLEAVED}),
    ],
    ids=str,
)
def test_stages_are_one_process(
    request: pytest.FixtureRequest, one_process: Any, tmp_path: Path, ranks: str, stages: int, what: Any, options: Any
):
    pool: RankPool = request.getfixturevalue(ranks)
    runs = pool.run(run, str(tmp_path), stages=stages, **what, **options)
    expected = one_process(**what)
    assert_same(runs, expected)
    for trained in runs:
        assert trained.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
def test_ranks_without_a_document(ranks1: RankPool, ranks4: RankPool, tmp_path: Path, sharding: str):
    # In training and, with the first step, in evaluation: one short document at a time.
    options = {"lengths": [9, 20, 12, 7, 31, 2, 5, 14, 8, 11], "steps": 2, "plugin": {"global_batch_documents": 1}}
    [expected] = ranks1.run(run, str(tmp_path), in_order=False, **options)
    runs = ranks4.run(run, str(tmp_path), stages=2, sharding=sharding, **options)
    assert_same(runs, expected)
    for trained in runs:
        assert trained.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("sharding", [pytest.param("ddp", marks=BY_NIGHT), "zero1"])
def test_bfloat16_in_stages(ranks1: RankPool, ranks4: RankPool, tmp_path: Path, sharding: str):
    """Tolerances are those of test_sharding.py: bfloat16 moves a loss by 4e-3."""
    [whole] = ranks1.run(run, str(tmp_path), in_order=False, bf16=True)
    for trained in ranks4.run(run, str(tmp_path), stages=2, sharding=sharding, chunks=True, bf16=True):
        assert trained.series("loss") == pytest.approx(whole.series("loss"), rel=1e-2)
        assert trained.series("grad_norm") == pytest.approx(whole.series("grad_norm"), rel=5e-2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "mesh", "what", "options"),
    [
        pytest.param("ranks4", {"pp_size": 2, "tp_size": 2}, {"model": "llama"}, {}, marks=BY_NIGHT),
        ("ranks4", {"pp_size": 2, "tp_size": 2}, {"model": "llama", "build": TIED}, {}),
        pytest.param("ranks4", {"pp_size": 2, "tp_size": 2}, {"model": "mixtral"}, {}, marks=BY_NIGHT),
        ("ranks4", {"pp_size": 2}, {"model": "mixtral"}, {"sharding": "zero1"}),
        ("ranks4", {"pp_size": 2}, {"model": "llama", "build": TIED, "frozen": ("*norm*", "*layers.0.*")}, {}),
        ("ranks2", {"pp_size": 2}, {"model": "llama", "build": TIED, "frozen": ("lm_head", "*layers.[0-1].*")}, {}),
        pytest.param("ranks8", {"pp_size": 2, "tp_size": 2}, {"model": "mixtral"}, {}, marks=BY_NIGHT),
    ],
    ids=str,
)
def test_each_process_reads_its_part(
    request: pytest.FixtureRequest,
    ranks1: RankPool,
    one_process: Any,
    tmp_path: Path,
    ranks: str,
    mesh: dict[str, int],
    what: dict[str, Any],
    options: dict[str, Any],
):
    """Two stages that transformers loads, of ranks that share heads, or documents, or both; then whole, from their
    checkpoint."""
    skip_unless_loaded(mesh)
    what = {"build": FOUR} | what
    MODELS[what["model"]](**what["build"]).save_pretrained(tmp_path / "model")
    options |= {"mesh": mesh, "stages": 2, "folder": str(tmp_path / "model"), "checkpointing": True}
    expected = one_process(**what)
    pool: RankPool = request.getfixturevalue(ranks)
    runs = pool.run(leg, str(tmp_path / "run"), stop=2, steps=STEPS, **what, **options)
    runs += ranks1.run(leg, str(tmp_path / "run"), stop=STEPS, steps=STEPS, **what)
    for trained in runs:
        for name in ("loss", "grad_norm"):
            series = trained.series(name)
            assert series == pytest.approx(expected.series(name)[: len(series)], rel=1e-4)
    assert len(runs[-1].series("loss")) == STEPS


@pytest.mark.parametrize(
    ("stages", "plugin", "model"),
    [
        (2, INTERLEAVED, "mixtral"),
        (4, {}, "llama"),
        *[pytest.param(stages, plugin, "mixtral", marks=BY_NIGHT) for stages, plugin in ((2, GPIPE), (4, {}))],
        *[pytest.param(2, plugin, "llama", marks=BY_NIGHT) for plugin in (GPIPE, INTERLEAVED)],
    ],
    ids=str,
)
def test_weights_in_float64(
    ranks4: RankPool, one_process: Any, tmp_path: Path, model: str, stages: int, plugin: dict[str, Any]
):
    build = DOUBLE | ({"experts_implementation": "eager"} if model == "mixtral" else {})
    runs = ranks4.run(run, str(tmp_path), stages=stages, model=model, build=build, chunks=True, plugin=plugin)
    expected = one_process(model=model, build=build)
    names: set[str] = set()
    for trained in runs:
        for name, weight in trained.weights.items():
            assert weight.dtype == torch.float64
            error = float((weight - expected.weights[name]).abs().max() / expected.weights[name].abs().max())
            assert error < 1e-9, (name, error)
        names |= trained.weights.keys()
    assert names == expected.weights.keys()


@pytest.mark.parametrize("trainer_class", [HalfTrainer, HalfFirstTrainer])
def test_weights_of_two_dtypes(
    ranks2: RankPool, ranks4: RankPool, one_process: Any, tmp_path: Path, trainer_class: Any
):
    # What goes between stages is of one dtype, and so is what zero1 saves of them. bfloat16 moves a loss by 4e-3.
    what: dict[str, Any] = {"trainer_class": trainer_class, "bf16": True}
    expected = one_process(**what)
    save = {"sharding": "zero1", "save_strategy": "steps", "save_steps": STEPS}
    runs = [
        *ranks2.run(run, str(tmp_path), stages=2, **what),
        *ranks4.run(run, str(tmp_path), stages=2, **what, **save),
    ]
    for trained in runs:
        assert trained.series("loss") == pytest.approx(expected.series("loss"), rel=1e-2)
        assert trained.series("grad_norm") == pytest.approx(expected.series("grad_norm"), rel=5e-2)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}", output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]


def test_documents_are_in_chunks():
    # What the other tests rely on. Chunks are made after the plan, whose costs know nothing of them, nor of dear messages.
    cost = CostModel.from_config(tiny_llama().config, dataclasses.replace(GPU, message_seconds=3e-5))
    planning = Planning(Topology(2, 48, stages=2), cost, mode="pipeline")
    with chunked_plans():
        plan = planning.plan(np.array([90, 30, 7]))
    assert plan.chunks.max() == 3
    plan.check(np.array([90, 30, 7]))


@pytest.fixture(scope="module")
def undisturbed(ranks1: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def of(**options: Any) -> Run:
        output = str(tmp_path_factory.mktemp("undisturbed"))
        [trained] = ranks1.run(run_sharded, output, steps=TRAVELLED, in_order=False, **options)
        return trained

    return of


@pytest.mark.parametrize("build", [pytest.param(FOUR, id="untied", marks=BY_NIGHT), pytest.param(TIED, id="tied")])
def test_checkpoints_fit_any_number_of_stages(
    ranks1: RankPool, ranks2: RankPool, ranks4: RankPool, undisturbed: Any, tmp_path: Path, build: Any
):
    travel(
        [
            (ranks4, {"stages": 4, "build": build}),
            (ranks4, {"stages": 2, "sharding": "zero1", "build": build, "file_bytes": 1}),
            (ranks1, {"build": build}),
            (ranks4, {"stages": 2, "build": build, "plugin": INTERLEAVED}),
            (ranks2, {"sharding": "zero3", "build": build}),
        ],
        undisturbed(build=build),
        tmp_path,
    )


def test_adapters_of_stages_go_on_whole(ranks1: RankPool, ranks4: RankPool, undisturbed: Any, tmp_path: Path):
    options = {"adapter": "lora", "build": FOUR}
    legs = [(ranks4, {"stages": 2} | options), (ranks1, options), (ranks4, {"stages": 4} | options)]
    travel(legs, undisturbed(**options), tmp_path)


def test_adapters_of_embeddings_that_the_last_stage_has_for_its_head_go_on(
    ranks1: RankPool, ranks2: RankPool, undisturbed: Any, tmp_path: Path
):
    # Only the first stage trains them: the last has no state of an optimizer for them.
    options = {"adapter": "embeddings", "build": TIED}
    travel([(ranks2, {"stages": 2} | options), (ranks1, options)], undisturbed(**options), tmp_path)


class SavingTrainer(RecordingTrainer):
    """Saves the model when training has ended."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        super().train(*args, **kwargs)
        self.save_model()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stages": 2}, marks=BY_NIGHT),
        {"stages": 4, "build": TIED},
        {"stages": 2, "model": "mixtral", "sharding": "zero1"},
    ],
    ids=str,
)
def test_the_saved_model_is_whole(ranks4: RankPool, one_process: Any, tmp_path: Path, options: dict[str, Any]):
    ranks4.run(run, str(tmp_path), trainer_class=SavingTrainer, evaluate=False, **options)
    what = {name: value for name, value in options.items() if name in ("model", "build")}
    expected = one_process(**({"model": "llama"} | what))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    for name, weight in expected.weights.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("adapter", "build"), [("lora", FOUR), ("copies", TIED)])
def test_adapters_are_saved_whole_for_peft(
    ranks4: RankPool, one_process: Any, tmp_path: Path, adapter: str, build: dict[str, Any]
):
    what = {"model": "llama", "adapter": adapter, "build": build}
    saving = {"trainer_class": SavingTrainer, "save_strategy": "steps", "save_steps": STEPS}
    ranks4.run(run, str(tmp_path), stages=2, evaluate=False, **what, **saving)
    adapters = {
        name.replace(".modules_to_save", "").replace(".default", ""): weight
        for name, weight in one_process(**what).weights.items()
        if ".lora_" in name or ".modules_to_save." in name
    }
    for folder in (tmp_path, tmp_path / f"checkpoint-{STEPS}"):
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved.keys() == adapters.keys()
        for name, weight in adapters.items():
            torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-4)


def test_a_checkpoint_of_stages_is_a_model_of_transformers(ranks4: RankPool, one_process: Any, tmp_path: Path):
    ranks4.run(leg, str(tmp_path), stop=STEPS, steps=STEPS, stages=2, build=FOUR, evaluate=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    for name, weight in one_process(model="llama").weights.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-4)


# What fails


def test_a_stage_that_stands_still_is_named(ranks4: RankPool, tmp_path: Path):
    stalls = (
        Stall(2, 2, "forward", "device 1 of 2 of the pipeline, .*, forward, layer 1, computing"),
        Stall(1, 3, "backward", "device 0 of 2 of the pipeline, .*, backward, layer 0, computing"),
    )
    plugin = {"pipeline_stages": 2, "long_documents": "truncate"}
    for text, _ in ranks4.run(stalled_run, stalls, tmp_path, plugin):
        for stall in stalls:
            assert re.search(stall.said, text), (stall, text)
    assert re.search("waiting for (activations|gradients) of rank", text)


def exhausted(output: str) -> None:
    """The last stage's first rank needs more memory than there is, writes down what it is told, and dies."""
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        MODELS["llama"](**FOUR),
        arguments(output, max_steps=2),
        train_dataset=documents([40, 12, 33, 9]),
        plugin=LongContextPlugin(capacity=64, global_batch_documents=2, pipeline_stages=2),
    )
    if trainer.args.process_index == 2:
        layer = dict(trainer.model.named_modules())["model.layers.3"]
        layer.register_forward_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8) and None)
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        Path(output, "said").write_text(str(error))
        os._exit(9)


def test_memory_that_runs_out_in_a_stage(ranks4: RankPool, tmp_path: Path):
    with pytest.raises(RankFailure, match=r"rank 2 \(exit code 9\)"):
        ranks4.run(exhausted, str(tmp_path))
    message = (tmp_path / "said").read_text()
    assert "out of memory on rank 2 at step 1, device 1 of 2 of the pipeline, " in message
    assert ", forward, layer 3, " in message
    assert "its micro-batch has " in message
    assert "sharding='zero1' instead of 'ddp'" in message
    assert "pipeline_stages > 2" in message
    assert "zero3" not in message
