"""Whether a run computes in bfloat16: what `bf16: auto` comes to on its ranks, what a checkpoint says of it, and a word where a
choice is much slower than the other one.

Decided on rank 0 and sent to all others (hf_longctx/precision.py); a run that goes on computes as it began, on any machine.
"""

from pathlib import Path
from typing import Any, get_args

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from hf_longctx.checkpoint.choice import resumed
from hf_longctx.models.stages import weights_dtype
from hf_longctx.precision import (
    MUCH_SLOWER,
    Decision,
    WeightsDtype,
    cpu_kind,
    decide_here,
    from_first_rank,
    product_rates,
    product_shape,
)
from hf_longctx.training.run_state import recorded

logger = logging.get_logger(__name__)

SMALL_WEIGHT = 2**15
"""Elements of a layer's largest weight, up to which nothing is said: such products are a small part of a step."""


def settle_precision(args: TrainingArguments, model: Any) -> Decision:
    """Decides what a run with `bf16: auto` computes in, and writes it into its arguments. Collective.

    Args:
        args: made with bf16=False.
        model: transformers', with its weights: they stay in their dtype.
    """

    def decide() -> Decision:
        kept = kept_precision(args.resume_from_checkpoint, Path(args.output_dir or "."))
        decision = kept or decide_here(args.device, product_shape(model.config))
        return decision.over(_weights_name(model))

    decision = from_first_rank(decide)
    args.bf16 = decision.bf16
    args.mixed_precision = decision.mixed  # as TrainingArguments derives it, whatever the launcher says
    return decision


def kept_precision(asked: Any, output_dir: Path) -> Decision | None:
    """Return what the run was decided to compute in when it began, from the checkpoint that it goes on from; None: it begins, or
    its checkpoint is older than this setting.

    Args:
        asked: resume_from_checkpoint: a folder, True or "auto".
    """
    folder = resumed(asked, output_dir)
    bf16 = None if folder is None else recorded(folder, "bf16")
    if folder is None or not isinstance(bf16, bool):
        return None
    return Decision(bf16, f"{folder.name} was trained so", kept=True)


def say_if_much_slower(args: TrainingArguments, model: Any, decided: Decision | None) -> None:
    """Compares both precisions on rank 0's CPU and warns where the other one is MUCH_SLOWER times as fast, unless that was
    measured already. What GPUs can do, their users know: there nothing is said.

    Args:
        decided: what `bf16: auto` came to; None: somebody chose it.
    """
    weights = _weights_dtype(model)
    known = decided is not None and not decided.kept and (decided.bf16 or weights is torch.float32)
    if args.process_index > 0 or args.device.type != "cpu" or args.fp16 or known:
        return
    shape = product_shape(getattr(model, "config", None))
    if weights is torch.float16 or shape[1] * shape[2] <= SMALL_WEIGHT:
        return
    rates, half = product_rates(shape), args.bf16 or weights is torch.bfloat16
    slower = 1 / rates.ratio if half else rates.ratio
    if slower < MUCH_SLOWER:
        return
    kept = decided is not None and decided.kept
    if weights is torch.bfloat16:
        cause, remedy = "the weights are bfloat16", "weights in float32 (model.dtype: float32) with bf16: auto in YAML"
        remedy = f"a new run, with {remedy}" if kept else remedy
    elif decided is not None and kept:
        cause, remedy = decided.reason, "a new run from the checkpoint's weights, with bf16: auto"
    else:
        cause, remedy = f"bf16={args.bf16}", f"TrainingArguments(bf16={not args.bf16}), or bf16: auto in YAML"
    logger.warning(
        f"this run computes in {'bfloat16' if half else 'float32'} ({cause}), which is {slower:.1f} times as slow as the other "
        f"precision on this CPU ({cpu_kind()}): matrix products do {rates}. Faster: {remedy}"
    )


def _weights_name(model: Any) -> WeightsDtype:
    name: Any = str(_weights_dtype(model)).removeprefix("torch.")
    return name if name in get_args(WeightsDtype) else "float32"


def _weights_dtype(model: Any) -> torch.dtype | None:
    """Return the dtype of the weights; None where there is no model yet."""
    return None if model is None else weights_dtype(model.parameters())
