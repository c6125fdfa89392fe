"""Memory that runs out in one micro-batch ends training on all ranks, with what the micro-batch was and what to change."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.training.memory.out_of_memory import ran_out_of_memory
from tests.builders.training_runs import MODELS, arguments, documents, fresh_accelerator_state
from tests.worlds.faults.exhausted_rank import LENGTHS
from tests.worlds.launched import torchrun


def exhausted(output_dir: Any, rank: int, backward: bool, eval_only: bool = False, **settings: Any) -> list[str]:
    """Return what the error of this rank says, and that of its cause. On one rank, the second layer of step 2 (or the first of an
    evaluation) needs more than any machine has."""
    fresh_accelerator_state()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = LongContextTrainer(
        MODELS["llama"](),
        arguments(output_dir, max_steps=3, **settings),
        train_dataset=documents(LENGTHS),
        eval_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=200 // world_size, global_batch_documents=4),
    )

    def allocate(*_: Any) -> None:
        if trainer.state.global_step == (0 if eval_only else 1) and trainer.args.process_index == rank:
            torch.empty(1 << 60, dtype=torch.uint8)

    layer = trainer.model.model.layers[1].mlp
    if backward:
        layer.register_full_backward_hook(allocate)
    else:
        layer.register_forward_hook(allocate)
    try:
        trainer.evaluate() if eval_only else trainer.train()
    except RuntimeError as error:
        return [type(error).__name__, str(error), str(error.__cause__)]
    return []


@pytest.mark.parametrize("backward", [False, True])
def test_the_message_has_the_numbers_of_the_micro_batch_and_of_what_to_change(backward, tmp_path):
    kind, message, cause = exhausted(tmp_path, 0, backward)
    assert kind == "OutOfMemoryError"
    assert "can't allocate memory: you tried to allocate 1152921504606846976 bytes" in cause
    direction = "backward" if backward else "forward"
    match = re.search(
        rf"out of memory on rank 0 at step 2, micro-batch (\d) of \d, {direction}, layer 1, computing: its micro-batch has "
        r"(\d+) tokens on this rank \(capacity=200\) and holds \d documents? on rank 0; the longest has (\d+) tokens",
        message,
    )
    assert match, message
    tokens, longest = int(match[2]), int(match[3])
    assert longest <= tokens <= 200
    assert re.search(r"This process has held at most \d\.\d\d GiB of host memory; no limit is set", message)
    assert f"Valid: capacity={tokens * 3 // 4}, with which the longest document needs" in message
    assert "or gradient_checkpointing=True" in message
    assert "or activation_offload=1.0 instead of 0" in message
    assert f"or mlp_tile_tokens={tokens // 8}" in message
    assert "sharding" not in message  # one process holds everything anyway


def test_what_is_in_use_is_not_proposed(tmp_path):
    _, message, _ = exhausted(tmp_path, 0, True, gradient_checkpointing=True)
    assert "gradient_checkpointing" not in message
    _, message, _ = exhausted(tmp_path, 0, False, eval_only=True)
    assert "gradient_checkpointing" not in message
    assert "activation_offload" not in message
    assert "evaluation, micro-batch 1 of" in message


@pytest.mark.processes
def test_a_limit_of_the_system_that_is_met_ends_all_ranks(tmp_path):
    ended = torchrun("-m", "tests.worlds.faults.exhausted_rank", tmp_path)
    assert ended.code != 0
    assert re.search(
        r"OutOfMemoryError: out of memory on rank 1 at step 2, micro-batch \d of \d, forward", ended.output
    )
    assert re.search(r"on ranks? \S+; the longest has \d+ tokens on [12] of them", ended.output)
    assert re.search(r"it may have \d+\.\d\d GiB\. Valid: capacity=\d+", ended.output)
    assert "or sharding='zero3' instead of 'ddp'" in ended.output
    assert "The above exception was the direct cause" in ended.output


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("expected scalar type Float but found Half"), False),
        (OSError("Cannot allocate memory"), False),
    ],
)
def test_which_errors_say_that_memory_is_exhausted(error, expected):
    assert ran_out_of_memory(error) == expected
