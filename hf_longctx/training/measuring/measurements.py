"""Measurements of a run by itself, for Trainer's logs: throughput, MFU, memory, loss by length; and which steps were slowest.

    tokens_per_second   tokens of all ranks / seconds, from asking for a step's documents to the end of its optimizer step;
                        evaluation and the saving of checkpoints are left out
    mfu                 FLOPs of the model in these steps / (seconds * devices * peak FLOP/s)
    peak_memory_gib     of the fullest rank, since its process began
    loss_by_length/*    loss per label token of the documents of each bucket (models/loss/loss_by_length.py)
    mean_token_accuracy, entropy   with the setting `token_metrics` (models/loss/token_metrics.py)

All but the peak are of the steps since the last log. Nothing is sent here, and nothing more often than without it: sums of
losses ride along with the loss, the peak with what callbacks asked for (training/trainer.py).

FLOPs are counted as the cost model counts them (hardware/model_sizes.py): 6 per weight of a matrix product and token, and half
of each document's square of attention; what is recomputed does not count. Beside adapters, frozen weights cost 4.
"""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from hf_longctx.data.collator import RankStep
from hf_longctx.hardware.devices import published_peak
from hf_longctx.hardware.model_sizes import model_flops, squares
from hf_longctx.hardware.profile import Profile
from hf_longctx.models.loss.loss_by_length import BUCKETS, LossByLength
from hf_longctx.models.loss.token_metrics import TokenMetrics, forward_arguments, means
from hf_longctx.models.stages import weights_dtype, whole_parameters
from hf_longctx.planner import StepPlan

logger = logging.get_logger(__name__)

SLOWEST = 3
"""Steps whose plans are kept for the report."""


@dataclass(frozen=True)
class SlowStep:
    """A step that took long."""

    seconds: float
    step: int
    """optimizer step, from 1"""
    position: tuple[int, int]
    """epoch, and step in the epoch"""
    plan: StepPlan


class StepFlops:
    """FLOPs of a model's training steps.

    Args:
        model: with its adapters, if it has any; patched or not.

    Raises:
        ValueError: sizes are unknown, or only some weights are trained.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        self._flops = model_flops(text)
        self.linear, self.head = self._flops.linear, self._flops.head
        weights = whole_parameters(model).values()
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        if getattr(model, "peft_config", None):
            self.linear, self.head = self.linear * 4 // 6 + 6 * trained, self.head * 4 // 6
        elif not all(weight.requires_grad for weight in weights):
            raise ValueError("some weights are frozen, and how much backward saves by that is not counted")

    def of(self, plan: StepPlan) -> int:
        """Return the FLOPs of forward and backward of all documents of a step. What is computed again does not count, nor the
        output head for tokens without a label."""
        lengths = plan.length
        seen = (int(squares(lengths, window).sum()) for window in (None, self._flops.window))
        linear = self.linear * int(lengths.sum()) - self.head * int(plan.unlabelled.sum())
        return linear + self._flops.of_attention(*seen)


def peak_flops(device: str, half: bool, profile: str | None) -> float:
    """FLOP/s that MFU is a share of.

    Args:
        device: its name.
        half: whether products are computed in half precision.
        profile: file of `hf-longctx profile`. What its products achieve counts where no data sheet is known.

    Raises:
        ValueError: neither is known.
    """
    published = published_peak(device)
    if published is not None and half:
        return published
    if profile is not None:
        speed = Profile.load(profile).speed
        return max(speed.linear_flops, speed.attention_flops)
    if published is not None:
        raise ValueError(f"the peak of {device} is known in half precision, and this run computes in float32")
    raise ValueError(
        f"the peak of {device} is unknown: give a profile (`hf-longctx profile`), whose products then count"
    )


class Measurements:
    """Measures one run; the trainer tells it where a step begins and ends.

    Args:
        model: what is trained.
        args: TrainingArguments.
        profile: the plugin's.
        token_metrics: the plugin's: whether accuracy and entropy of predictions are measured.
    """

    def __init__(self, model: Any, args: Any, profile: str | None, token_metrics: bool = False) -> None:
        self.device, self.devices = args.device, args.world_size
        self.device_name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type
        self._losses = LossByLength(args.device)
        self._token_metrics = TokenMetrics(args.device) if token_metrics else None
        self.step: RankStep | None = None
        """The one that is run, or was last."""
        self.slowest: list[SlowStep] = []
        """The slowest first; the first step of a process is not among them, which also compiles and allocates."""
        self.peak_memory_mib = 0
        """Of the fullest rank."""
        self.no_mfu: str | None = None
        """Why it is left out."""
        self._began: float | None = None
        self._steps = 0
        self._sums: torch.Tensor | None = None
        self._forget()
        half = args.bf16 or args.fp16 or weights_dtype(model.parameters()).itemsize == 2
        try:
            self._flops, self._peak = StepFlops(model), peak_flops(self.device_name, half, profile)
        except ValueError as error:
            self.no_mfu = str(error)
            logger.info(f"mfu is not logged: {error}")

    def _forget(self) -> None:
        self._tokens, self._seconds, self._counted_flops = 0, 0.0, 0
        self._sums = None

    def begin_step(self) -> None:
        """Note when a step begins: its documents are asked for."""
        self._began = time.monotonic()

    @property
    def forward_arguments(self) -> dict[str, Any]:
        """Return what each forward of a step is given, so that its losses and predictions are measured."""
        return {"loss_by_length": self._losses, **forward_arguments(self._token_metrics)}

    def take(self) -> torch.Tensor:
        """float64 [k]: this rank's sums of a step, to be summed over ranks."""
        sums = self._losses.take().flatten()
        return sums if self._token_metrics is None else torch.cat([sums, self._token_metrics.take()])

    def add(self, sums: torch.Tensor) -> None:
        """Add `take()` of a step, summed over ranks."""
        self._sums = sums if self._sums is None else self._sums + sums

    def end_step(self, number: int, data_wait_seconds: float) -> int:
        """The optimizer has stepped: this was optimizer step `number`; called again before the next, it is counted once.
        Returns MiB, this rank's peak."""
        if self.step is not None and self._began is not None:
            plan, seconds = self.step.plan, time.monotonic() - self._began
            self._began = None
            self._tokens, self._seconds = self._tokens + self.step.num_tokens, self._seconds + seconds
            if self.no_mfu is None:
                self._counted_flops += self._flops.of(plan)
            self._steps += 1
            if self._steps > 1:
                slow = SlowStep(seconds - data_wait_seconds, number, self.step.position, plan)
                self.slowest = sorted([*self.slowest, slow], key=lambda slow_step: -slow_step.seconds)[:SLOWEST]
        return peak_memory(self.device) // 2**20

    def log(self) -> dict[str, float]:
        """Give what is logged of the steps since this was last called."""
        logs: dict[str, float] = {"peak_memory_gib": round(self.peak_memory_mib / 1024, 3)}
        if self._seconds:
            logs["tokens_per_second"] = float(f"{self._tokens / self._seconds:.5g}")
            if self.no_mfu is None:
                mfu = self._counted_flops / (self._seconds * self.devices * self._peak)
                logs["mfu"] = float(f"{mfu:.4g}")
        if self._sums is not None:
            by_length, of_tokens = self._sums[: 2 * len(BUCKETS)], self._sums[2 * len(BUCKETS) :]
            if self._token_metrics is not None:
                logs |= {name: round(value, 8) for name, value in means(of_tokens).items()}
            for bucket, loss, tokens in zip(BUCKETS, *by_length.view(2, -1).tolist()):
                if tokens and loss == loss:  # not a number where a step was skipped
                    logs[f"loss_by_length/{bucket}"] = round(loss / tokens, 6)
        self._forget()
        return logs


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors have taken on CUDA, or that the process has taken of the machine's memory elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_peak()


def host_peak() -> int:
    """Return the most bytes of the machine's memory that this process has held. macOS counts in bytes, Linux in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
