"""The precision of `evaluate` and `generate`: one for all models of a command, so that no difference is one of dtypes.

    --dtype              weights         products
    float32              float32         float32
    bfloat16, float16    as it says      as it says
    mixed                float32         in bfloat16 by autocast, as a run with bf16: true trains and evaluates
    auto                 the first line below that is true

    all models were saved in float16, on a GPU                      as saved
    a run saved it in float32, and did not compute in bfloat16      float32
    float32 is the faster one here                                  float32
    all models were saved in bfloat16                               as saved, by autocast where a run was
    else                                                            mixed

So a run's model computes as in the run's own evaluation, or in float32 where that is faster: never in a coarser precision.
Which one is faster is decided once, on rank 0 (hf_longctx/precision.py). Sent between ranks: that choice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from hf_longctx.commands.shared.loading import Dtype

InferenceDtype = Literal["auto", "mixed", "float32", "bfloat16", "float16"]
"""--dtype on the command line."""
DTYPE_HELP = (
    "Load weights so; mixed: float32 that computes in bfloat16; auto: the faster one, never coarser than its run."
)

UNKNOWN = "a dtype that their configuration does not say"


@dataclass(frozen=True)
class InferencePrecision:
    """How weights are loaded, and what their products are computed in."""

    weights: Dtype
    autocast: bool = False
    """products are in bfloat16, whatever the weights are in"""

    def computing(self, device: torch.device, *, keep_casts: bool) -> torch.autocast:
        """Return the context in which models compute so.

        Args:
            keep_casts: keep the weights' copies in bfloat16, which take half of their memory, until the context ends. Where few
                tokens are computed at a time, making them again costs more than the products.
        """
        import torch

        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=keep_casts)

    def said_of(self, model: Any) -> str:
        """Name what a model that was loaded so computes in."""
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{dtype} weights, bfloat16 autocast" if self.autocast else dtype


def inference_precision(names: Sequence[str], asked: InferenceDtype, device: torch.device) -> InferencePrecision:
    """Choose what all models are computed in, and say so on rank 0 where it is not what they were saved in. Collective.

    Args:
        names: of the models, as `loading.resolved` returns them.

    Raises:
        ValueError: there is no such model.
    """
    from hf_longctx.commands.shared.loading import saved_config
    from hf_longctx.commands.shared.ranks import is_first
    from hf_longctx.precision import from_first_rank, product_shape
    from hf_longctx.training.run_state import recorded

    if asked == "mixed":
        return InferencePrecision("float32", autocast=True)
    if asked != "auto":
        return InferencePrecision(asked)
    configs = [saved_config(name) for name in names]
    saved = [str(getattr(config, "dtype", None) or UNKNOWN).removeprefix("torch.") for config in configs]
    runs = [recorded(Path(name), "bf16") for name in names]
    chosen, message = from_first_rank(lambda: _chosen(saved, runs, device, product_shape(configs[0])))
    if message and is_first():
        print(message, file=sys.stderr)
    return chosen


def _chosen(
    saved: Sequence[str], runs: Sequence[bool | None], device: torch.device, shape: tuple[int, int, int]
) -> tuple[InferencePrecision, str]:
    """Choose for `auto`, and put into words what differs from how models were saved or from how a run computed; "": nothing.

    Args:
        saved: dtype of each model's weights.
        runs: whether the run that saved it computed under autocast in bfloat16; None: no run did, or it does not say.
        shape: of products like the models'.
    """
    from hf_longctx.precision import decide_here

    kinds = set(saved)
    if kinds == {"float16"} and device.type == "cuda":
        return InferencePrecision("auto"), ""
    if "float32" in kinds and (False, "float32") in zip(runs, saved):
        others = " and ".join(sorted(kinds - {"float32"}))
        return InferencePrecision(
            "float32"
        ), others and f"weights in {others} compute in float32, as the other model's run did"
    decision = decide_here(device, shape)
    weights = f"weights in {' and '.join(sorted(kinds))}"
    if not decision.bf16:
        half = next((kind for kind in ("bfloat16", "float16") if kind in kinds), None)
        if half is not None:
            return InferencePrecision(
                "float32"
            ), f"{weights} compute in float32 ({decision.reason}); --dtype {half} keeps them"
        remedy = f"the run computed in bfloat16, and float32 is faster here ({decision.reason}); --dtype mixed computes as it did"
        return InferencePrecision("float32"), remedy if True in runs else ""
    if kinds == {"bfloat16"}:
        return InferencePrecision("auto", autocast=True in runs), ""
    message = f"{weights} compute in bfloat16 by autocast ({decision.reason}); --dtype float32 computes in float32"
    return InferencePrecision("float32", autocast=True), message
