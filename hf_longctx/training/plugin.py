"""LongContextPlugin: how documents are spread over ranks, as accelerate's plugins are given: arguments, or
environment variables.

`accelerate launch` forwards the environment to its workers, so HF_LONGCTX_CAPACITY=32768 accelerate launch ... is
enough.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from hf_longctx.attention.kernels import KERNELS
from hf_longctx.planner import CostModel

PREFIX = "HF_LONGCTX_"
OPTIONAL = ("global_batch_documents", "global_batch_tokens", "ranks_per_node")
"""Counts that may be left out."""


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


def _from_environment(name: str, parse: Callable[[str], Any], default: Any) -> Any:
    """A dataclass field that defaults to HF_LONGCTX_<NAME>, parsed, or to `default` where that is not set."""

    def read() -> Any:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError:
            raise ValueError(
                f"the environment variable {variable}={text!r} is not a valid {parse.__name__.strip('_')}"
            ) from None

    return field(default_factory=read)


@dataclass
class LongContextPlugin:
    """Settings of Hybrid Data Parallelism. Each field but `cost` defaults to the environment variable
    HF_LONGCTX_<FIELD>.

    Raises:
        ValueError: all that is wrong, at once: the field, its value, what would be valid. Unknown HF_LONGCTX_
            variables too.
    """

    capacity: int = _from_environment("capacity", int, 0)
    """most tokens that a rank holds in one micro-batch (required). A document of s tokens needs ceil(s / capacity)
    ranks."""
    global_batch_documents: int | None = _from_environment("global_batch_documents", int, None)
    """documents of one optimizer step, all ranks together"""
    global_batch_tokens: int | None = _from_environment("global_batch_tokens", int, None)
    """or: most tokens of one optimizer step. With neither: per_device_train_batch_size * processes * accumulation
    documents"""
    kernel: str = _from_environment("kernel", str, "auto")
    """attention kernel; see `hf_longctx.attention.kernels.select_kernel`"""
    loss_chunk_tokens: int = _from_environment("loss_chunk_tokens", int, 1024)
    """rows of logits that exist at once in the loss"""
    ulysses_degree: int = _from_environment("ulysses_degree", int, 1)
    """most ranks among which the heads of a document are split (Ulysses); it must divide the attention heads. A
    micro-batch of n ranks uses gcd(n, ulysses_degree), so that short documents still communicate nothing; 1: the direct
    exchange alone"""
    keep_last_slice: bool = _from_environment("keep_last_slice", _boolean, False)
    """also keep the keys and values that each layer received last, up to as many as its own: one exchange less in
    backward"""
    ranks_per_node: int | None = _from_environment("ranks_per_node", int, None)
    """ranks on each machine, between which bytes are cheap: keys that several of them need come from another machine
    once. Default: what the launcher says (LOCAL_WORLD_SIZE); srun and mpirun do not"""
    exchange_timeout_seconds: float = _from_environment("exchange_timeout_seconds", float, 1800.0)
    """how long a rank waits for a peer that lives but does not come; one that dies is noticed at once (gloo) or when
    the
    launcher ends the job (NCCL)"""
    cost: CostModel | None = None
    """predicts times, which balance plans; default: counted from the model's configuration"""

    def __post_init__(self) -> None:
        problems = []
        for name in (
            "capacity",
            "loss_chunk_tokens",
            "ulysses_degree",
            *OPTIONAL,
        ):
            value, optional = getattr(self, name), name in OPTIONAL
            if type(value) is not int and not (optional and value is None):
                problems.append(f"{name}={value!r} must be an integer" + (" or None" if optional else ""))
        if type(self.keep_last_slice) is not bool:
            problems.append(f"keep_last_slice={self.keep_last_slice!r} must be True or False")
        if not isinstance(self.exchange_timeout_seconds, (int, float)) or not math.isfinite(
            self.exchange_timeout_seconds
        ):
            problems.append(
                f"exchange_timeout_seconds={self.exchange_timeout_seconds!r} must be a finite number of seconds"
            )
        if problems:
            raise ValueError("LongContextPlugin: " + "; ".join(problems))
        for name in ("capacity", "loss_chunk_tokens", "ulysses_degree", "exchange_timeout_seconds"):
            if getattr(self, name) <= 0:
                hint = f"; set it, or {PREFIX}CAPACITY" if name == "capacity" else ""
                problems.append(f"{name}={getattr(self, name)} must be positive{hint}")
        for name in OPTIONAL:
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}={value} must be at least 1")
        if self.global_batch_documents is not None and self.global_batch_tokens is not None:
            problems.append(
                f"global_batch_documents={self.global_batch_documents} and global_batch_tokens={self.global_batch_tokens} "
                "both set the global batch: keep one"
            )
        if self.kernel != "auto" and self.kernel not in KERNELS:
            problems.append(f"kernel={self.kernel!r} is unknown; valid: auto, {', '.join(KERNELS)}")
        names = {PREFIX + f.name.upper() for f in fields(self) if f.name != "cost"} | {PREFIX + "CACHE"}
        unknown = sorted(v for v in os.environ if v.startswith(PREFIX) and v not in names)
        if unknown:
            problems.append(f"unknown environment variables {', '.join(unknown)}; valid: {', '.join(sorted(names))}")
        if problems:
            raise ValueError("LongContextPlugin: " + "; ".join(problems))
