"""What goes wrong ends quickly, on all ranks, with the cause; what need not end (one bad step) does not."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from hf_longctx import LongContextPlugin, LongContextTrainer, patch_model
from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.parallel.reduction import sum_step
from hf_longctx.planner import CPU_CORE, CostModel, GlobalBatches, PlanError, Topology
from hf_longctx.training.execution import run_micro_batches
from tests.builders.training_runs import (
    MODELS,
    POISONED_STEPS,
    PoisonedTrainer,
    RecordingTrainer,
    arguments,
    documents,
    fresh_accelerator_state,
    reference,
    train,
)
from tests.worlds.launched import torchrun
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]
MOST = 200


# Gradients that are not finite


@pytest.mark.processes
@pytest.mark.parametrize(("world_size", "in_order"), [(1, False), (2, False), (2, True), (4, False)])
def test_a_nan_on_one_rank_skips_the_step_on_all(world_size, in_order, tmp_path, request):
    settings = {"output_dir": tmp_path, "num_train_epochs": 1, "max_grad_norm": 0.5}
    rows = documents(LENGTHS)
    losses, _, weights = reference(
        "llama", rows, GlobalBatches(np.array(LENGTHS), 3, documents=4), 1, settings, skipped_steps=POISONED_STEPS
    )
    plugin = {"capacity": MOST // world_size, "global_batch_documents": 4}
    kwargs: dict[str, Any] = {"trainer_class": PoisonedTrainer, "in_order": in_order}
    if world_size == 1:
        runs = [train("llama", rows, plugin, settings, **kwargs)]
    else:
        runs = request.getfixturevalue(f"ranks{world_size}").run(train, "llama", rows, plugin, settings, **kwargs)
    for run in runs:
        np.testing.assert_allclose(run.series("loss"), losses, rtol=1e-5)
        torch.testing.assert_close(run.weights, weights, rtol=0, atol=1e-5)
        assert [step["skipped_steps"] for step in run.seen_by_callback] == [0, 1, 1, 2, 2]
        assert [step["grad_norm"] == 0 for step in run.seen_by_callback] == [False, True, False, True, False]
        messages = [message for message in run.messages if "skipped" in message]
        for step, message in zip(POISONED_STEPS, messages, strict=True):
            assert f"step {step} is skipped on all ranks: its gradients are not finite" in message


class ScalingTrainer(PoisonedTrainer):
    """Scales gradients as accelerate has it done on GPUs with float16."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


def test_steps_that_the_gradient_scaler_skips_are_counted_too(tmp_path):
    settings = {"output_dir": tmp_path, "num_train_epochs": 1, "max_grad_norm": 0.0}
    plugin, rows = {"capacity": MOST, "global_batch_documents": 4}, documents(LENGTHS)
    plain, scaled = (
        train("llama", rows, plugin, settings, trainer_class=kind) for kind in (PoisonedTrainer, ScalingTrainer)
    )
    assert scaled.series("skipped_steps") == plain.series("skipped_steps") == [0, 1, 1, 2, 2]
    np.testing.assert_allclose(scaled.series("loss"), plain.series("loss"), rtol=1e-5)
    assert any("not finite, multiplied by the gradient scaler's factor" in message for message in scaled.messages)


class NanLoss(RecordingTrainer):
    """Of two steps the loss, too, is not a number."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        head = self.model.lm_head.weight.data
        before = head.clone()
        if self.state.global_step + 1 in POISONED_STEPS:
            head.fill_(torch.nan)
        loss = super().training_step(model, inputs, *args)
        head.copy_(before)
        return loss


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_loss_that_is_no_number_spoils_neither_later_ones_nor_the_mean(logging_steps: int, tmp_path: Any):
    """Trainer's own mean, with its filter off, would be NaN, and so would each loss that is logged after it."""
    settings = {"output_dir": tmp_path, "num_train_epochs": 1, "logging_steps": logging_steps}
    settings |= {"logging_nan_inf_filter": False, "learning_rate": 0.0}
    rows, plugin = documents(LENGTHS), {"capacity": MOST, "global_batch_documents": 4}
    plain = train("llama", rows, plugin, settings | {"logging_steps": 1}).series("loss")
    run = train("llama", rows, plugin, settings, trainer_class=NanLoss)
    finite = [step + 1 not in POISONED_STEPS for step in range(len(plain))]
    expected = [
        np.mean(plain[start : start + logging_steps]) if all(finite[start : start + logging_steps]) else np.nan
        for start in range(0, len(plain) // logging_steps * logging_steps, logging_steps)
    ]
    assert [bool(np.isnan(loss)) for loss in expected].count(True) == 2
    np.testing.assert_allclose(run.series("loss"), expected, rtol=1e-5)
    mean = np.mean([loss for loss, counts in zip(plain, finite, strict=True) if counts])
    assert run.log[-1]["train_loss"] == pytest.approx(mean, rel=1e-6)
    assert run.seen_by_callback[-1]["skipped_steps"] == len(POISONED_STEPS)


# Ranks that do not agree


def disagreeing(output_dir: Any, capacities: list[int], rows: list[Any]) -> tuple[str, int, bool]:
    """Trains with what this rank is given; the error, the bytes exchanged, and whether the weights are as before."""
    fresh_accelerator_state()
    rank = dist.get_rank()
    model = MODELS["llama"]()
    trainer = RecordingTrainer(
        model,
        arguments(output_dir, max_steps=2),
        train_dataset=rows[rank],
        plugin=LongContextPlugin(capacity=capacities[rank], global_batch_documents=4),
    )
    try:
        trainer.train()
    except RuntimeError as error:
        before = MODELS["llama"]().state_dict()
        same = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert trainer.exchange is not None
        return str(error), trainer.exchange.bytes_sent, same
    return "", -1, False


ROWS = documents(LENGTHS)
FEWER_LABELS = [row | {"labels": [*row["input_ids"][:2], *[-100] * (len(row["input_ids"]) - 2)]} for row in ROWS]


@pytest.mark.parametrize(
    ("capacities", "rows"),
    [
        ([100, 101], [ROWS, ROWS]),
        ([120, 120], [ROWS, [*ROWS[1:], ROWS[0]]]),
        ([120, 120], [ROWS, documents([length + 1 for length in LENGTHS])]),
        ([120, 120], [ROWS, FEWER_LABELS]),
    ],
    ids=["capacity", "order of documents", "lengths", "labels"],
)
def test_ranks_that_disagree_all_fail_before_anything_runs(capacities, rows, ranks2: RankPool, tmp_path):
    for rank, (message, sent, unchanged) in enumerate(ranks2.run(disagreeing, tmp_path, capacities, rows)):
        assert "the ranks planned different steps" in message
        assert f"rank {rank} has" in message
        assert "the same capacity and cost model" in message
        assert sent == 0
        assert unchanged


def plan_of_other_ranks(made_for: int) -> str:
    """Return what running a plan for another number of ranks says."""
    model = MODELS["llama"]()
    step = LengthAwareCollator(Topology(made_for, MOST), CostModel.from_config(model.config, CPU_CORE))(
        documents([20, 30, 9])
    )
    try:
        run_micro_batches(model, step, Exchange(60.0) if dist.is_initialized() else None, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def test_a_plan_for_another_number_of_ranks_is_refused(ranks2: RankPool):
    message = "the plan was made for {} ranks, and there are {}: plan the step again for {} ranks"
    assert plan_of_other_ranks(2) == message.format(2, 1, 1)
    assert ranks2.run(plan_of_other_ranks, 4) == [message.format(4, 2, 2)] * 2
    assert ranks2.run(plan_of_other_ranks, 1) == [message.format(1, 2, 2)] * 2


def test_a_loop_without_planned_steps_or_a_patched_model_is_told_so():
    model = MODELS["llama"]()
    step = LengthAwareCollator(Topology(1, MOST), CostModel.from_config(model.config, CPU_CORE))(documents([20, 9]))
    for given, message in (({"input_ids": torch.ones(1, 4)}, "the step is a dict, .*RankStep"), (step, "gave no loss")):
        with pytest.raises(TypeError, match=message):
            run_micro_batches(model, given, None, torch.device("cpu"), torch.Tensor.backward)  # type: ignore[arg-type]


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """What accelerator.prepare makes of a model, without a process group."""

    def __init__(self, model: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = model


def steps_of_a_loop(kind: str) -> str:
    """Run a step of a loop of one's own: each rank another one, or the same through a wrapped model. Returns the error."""
    model, rank, topology = patch_model(MODELS["llama"]()), dist.get_rank(), Topology(2, MOST)
    collator = LengthAwareCollator(topology, CostModel.from_config(model.config, CPU_CORE), rank)
    step = collator(documents([20, 30, 9 + (rank if kind == "other batches" else 0)]))
    backward = Accelerator(gradient_accumulation_steps=3).backward if kind == "divided" else None
    if kind in ("sharded", "summed in parts"):
        fully_shard(model)
    if kind == "other weights":
        model.model.layers[1].mlp.up_proj.weight.data[-1, -1] += rank
    try:
        if kind == "summed in parts":
            sum_step(model.parameters(), torch.zeros(1, dtype=torch.float64))
        wrapped: Any = Wrapped(model) if kind == "wrapped" else model
        run_micro_batches(wrapped, step, Exchange(60.0), torch.device("cpu"), backward)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("the same", "^$"),
        ("other batches", r"the ranks planned different steps: .*leave the data loader out of accelerator\.prepare"),
        (
            "other weights",
            r"the ranks hold different weights: 1 of \d+ that were compared, model\.layers\.1\.mlp\.up_proj\.weight among",
        ),
        ("wrapped", r"model is a Wrapped.*in place of accelerator\.prepare"),
        (
            "sharded",
            r"model has a FSDPLlamaForCausalLM of FSDP, .* Valid: a model that is whole on each rank, or LongContext",
        ),
        ("summed in parts", r"parameters are in parts \(DTensor\)"),
        (
            "divided",
            r"gradient_accumulation_steps=3, which divides .* Valid: gradient_accumulation_steps=1, and batches of 3",
        ),
    ],
)
def test_what_accelerate_prepared_for_other_loops_is_refused(kind: str, message: str, ranks2: RankPool):
    for error in ranks2.run(steps_of_a_loop, kind):
        assert re.search(message, error)


def scale_of_a_rank_without_work() -> float:
    """Run a step of fewer documents than ranks in a loop of one's own, with a gradient scaler. Returns the scaler's factor."""
    fresh_accelerator_state()
    model, accelerator = patch_model(MODELS["llama"]()), Accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    collator = LengthAwareCollator(Topology(2, MOST), CostModel.from_config(model.config, CPU_CORE), dist.get_rank())
    step = collator(documents([20]))
    run_micro_batches(model, step, Exchange(60.0), accelerator.device, accelerator.backward)
    sum_step(model.parameters(), torch.zeros(1, dtype=torch.float64))
    optimizer.step()
    return accelerator.scaler.get_scale()


def test_a_rank_without_micro_batches_scales_as_the_others(ranks2: RankPool):
    assert ranks2.run(scale_of_a_rank_without_work) == [16.0, 16.0]


# A rank that fails


@pytest.mark.processes
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["forked", "fresh"])
def test_a_rank_that_raises_ends_all_with_its_own_error(fresh, tmp_path):
    ended = torchrun("tests/worlds/faults/ended_run.py", tmp_path, fresh=fresh, RAISING_STEP="3")
    assert ended.code != 0
    assert "OSError: the disk of rank 1 is broken at step 3" in ended.output
    root_cause = ended.output[ended.output.index("Root Cause (first observed failure)") :]
    assert "(local_rank: 1)" in root_cause
    assert "the disk of rank 1 is broken at step 3" in root_cause


@pytest.mark.processes
@pytest.mark.nightly
def test_a_rank_that_leaves_ends_all(tmp_path):
    ended = torchrun("tests/worlds/faults/ended_run.py", tmp_path, LEAVING_STEP="3")
    assert ended.code != 0
    assert "rank 1 leaves, although not all ranks are done" in ended.output


class Stops(TrainerCallback):
    """On rank 1 alone: asks training to stop after step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= args.process_index == 1 and state.global_step == 4


def test_a_stop_that_one_rank_asks_for_stops_all(ranks2: RankPool, tmp_path):
    settings = {"output_dir": tmp_path, "num_train_epochs": 2}
    plugin = {"capacity": MOST // 2, "global_batch_documents": 5}
    runs = ranks2.run(train, "llama", documents(LENGTHS), plugin, settings, callbacks=[Stops()])
    assert [len(run.held) for run in runs] == [4, 4]


class AsksWhile(TrainerCallback):
    """On rank 1 alone: asks for something while step 2 is logged, evaluated or saved."""

    def __init__(self, moment: str, request: str) -> None:
        self.request = request
        setattr(self, moment, self.ask)

    def ask(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 2:
            setattr(control, self.request, True)


@pytest.mark.parametrize(
    ("moment", "asked", "steps", "evaluations"),
    [
        ("on_log", "should_training_stop", 2, 1),
        ("on_log", "should_evaluate", 4, 2),
        ("on_evaluate", "should_save", 4, 2),
        ("on_save", "should_training_stop", 2, 1),
    ],
)
def test_what_one_rank_asks_for_while_steps_are_logged_all_do(
    moment: str, asked: str, steps: int, evaluations: int, ranks2: RankPool, tmp_path
):
    settings = {"output_dir": tmp_path, "num_train_epochs": 1, "eval_steps": 2}
    settings |= {"eval_strategy": "epoch" if asked == "should_evaluate" else "steps"}
    settings |= {"save_strategy": "steps", "save_steps": 2 if moment == "on_save" else 100}
    plugin = {"capacity": MOST // 2, "global_batch_documents": 5}
    rows, evaluated = documents(LENGTHS), documents([9, 12])
    asks = AsksWhile(moment, asked)
    for run in ranks2.run(train, "llama", rows, plugin, settings, eval_rows=evaluated, callbacks=[asks]):
        assert len(run.held) == steps
        assert len(run.series("eval_loss")) == evaluations


# Documents that cannot be trained on


def trainer_on(output_dir: Any, rows: Any, eval_rows: Any = None, **settings: Any) -> LongContextTrainer:
    fresh_accelerator_state()
    return LongContextTrainer(
        MODELS["llama"](),
        arguments(output_dir, max_steps=2, **settings),
        train_dataset=rows,
        eval_dataset=eval_rows,
        plugin=LongContextPlugin(capacity=MOST, global_batch_documents=4),
    )


NO_LABELS = {"input_ids": [[1, 2, 3], [4]], "labels": [[9, -100, -100], [4]]}
BAD_DATA: dict[str, tuple[Any, type[Exception], str]] = {
    "empty list": ([], ValueError, "the data set is empty: it needs at least one document with at least two tokens"),
    "empty table": (Dataset.from_dict({"input_ids": []}), ValueError, "the data set is empty"),
    "no label token": (
        Dataset.from_dict(NO_LABELS),
        ValueError,
        "none of the 2 documents can be learned from: 0 without any token, 2 without any label token",
    ),
    "not tokenised": (
        Dataset.from_dict({"text": ["a"]}),
        ValueError,
        "tokenised into 'input_ids'; .*columns are 'text'",
    ),
    "labels of another length": (
        [{"input_ids": [1, 2, 3], "labels": [1, 2]}],
        ValueError,
        "document 0 has 3 tokens but 2 labels",
    ),
    "a stream": (Dataset.from_dict({"input_ids": [[1, 2]]}).to_iterable_dataset(), TypeError, "streaming data sets"),
    "too long": (
        documents([7, 201, 9]),
        PlanError,
        r"document 1 has 201 tokens, but all ranks together hold 1 ranks \* 200 tokens \(capacity\) = 200. "
        "Valid: capacity >= 201, or >= 2 ranks, or a shorter document",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_documents_are_refused_before_the_first_step(name, tmp_path):
    rows, error, message = BAD_DATA[name]
    trainer = trainer_on(tmp_path, rows)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("name", BAD_DATA)
@pytest.mark.parametrize("named", [False, True])
def test_bad_evaluation_documents_are_refused_before_the_first_step_too(name, named, tmp_path):
    rows, error, message = BAD_DATA[name]
    eval_rows = {"good": documents([5]), "bad": rows} if named else rows
    trainer = trainer_on(tmp_path, documents(LENGTHS), eval_rows, eval_strategy="epoch")
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_documents_that_teach_nothing_are_dropped_with_one_warning_that_counts_them(tmp_path):
    good = documents([20, 30, 5])
    trainer = trainer_on(
        tmp_path, [good[0], {"input_ids": []}, good[1], {"input_ids": [7]}, {"input_ids": []}, good[2]]
    )
    with pytest.warns(UserWarning, match="documents") as caught:
        trainer.train()
    about = [str(warning.message) for warning in caught if "dropped" in str(warning.message)]
    assert about == ["3 of 6 documents are dropped: 2 without any token, 1 without any label token"]
    assert [entry["documents"] for entry in trainer.state.log_history if "loss" in entry] == [3, 3]
    clean = trainer_on(tmp_path, good)
    clean.train()
    torch.testing.assert_close(trainer.model.state_dict(), clean.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"input_ids": [[1, 2], [3, 128]]},
            "'input_ids' holds values from 1 to 128.* vocabulary has 128 tokens.* 0 to 127",
        ),
        ({"input_ids": [[1, 2], [-1, 5]]}, "'input_ids' holds values from -1 to 5"),
        (
            {"input_ids": [[1, 2]], "labels": [[-100, 500]]},
            "'labels' holds values from 500 to 500.* or -100 where nothing",
        ),
        (
            {"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]]},
            "row 0: column .attention_mask. leaves tokens out, and there is no column .labels.",
        ),
    ],
)
def test_tokens_that_cannot_be_meant_are_refused_before_training(columns, message, tmp_path):
    trainer = trainer_on(tmp_path, Dataset.from_dict(columns))
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_rows_that_are_not_selected_do_not_count(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [500, 1], [4, 5]]})
    assert trainer_on(tmp_path, rows.select([0, 2])).train().global_step == 2
    with pytest.raises(ValueError, match="holds values from 1 to 500"):
        trainer_on(tmp_path, rows.select([0, 1])).train()


def test_a_transform_of_the_data_set_is_applied(tmp_path):
    rows = [[(7 * i + j) % 127 for j in range(12)] for i in range(8)]

    def shifted(batch):
        return {"input_ids": [[token + 1 for token in row] for row in batch["input_ids"]]}

    lazy = Dataset.from_dict({"input_ids": rows})
    lazy.set_transform(shifted)
    eager = Dataset.from_dict(shifted({"input_ids": rows}))
    losses = []
    for dataset in (lazy, eager):
        trainer = trainer_on(tmp_path, dataset)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert losses[0]


def test_a_document_that_changes_between_reads_is_noticed(tmp_path):
    class Changing(list):
        def __getitem__(self, index):
            self.reads = getattr(self, "reads", 0) + 1
            return {"input_ids": [1, 2, 3] if self.reads <= len(self) else [1, 2]}

    with pytest.raises(ValueError, match="was planned with 3 tokens, but reading it gave 2 tokens and 2 labels"):
        trainer_on(tmp_path, Changing([None] * 4)).train()
