"""Figures that others have published, and which of ours stands beside each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from acceptance.record import Shown


@dataclass(frozen=True)
class Anchor:
    """One published figure."""

    who: str
    setting: str
    published: float
    unit: str
    ours: str = ""
    """figure of ours that is nearest; "": none is measured here"""
    remark: str = ""
    """what differs"""

    def row(self, figures: Mapping[str, float]) -> dict[str, str]:
        """A row of the page's table. `figures`: all that were measured on a GPU."""
        own = figures.get(self.ours)
        return {
            "published by": self.who,
            "setting": self.setting,
            "published": f"{self.published:,g} {self.unit}",
            "ours": "-" if own is None else f"{own:,.0f} {self.unit}",
            "ours / published": "-" if own is None else f"{Shown(own / self.published):.2f}",
            "what differs": self.remark,
        }


SPEED = "speed/Llama 8B, all weights/{}/tokens per second"
FLOAT8 = "theirs: 8 GPUs, float8, with the optimizer; ours: one GPU, bfloat16, extrapolated from layers, without it"
LONGEST = "longest/Llama 8B, all weights/tokens that fit"

ANCHORS = (
    Anchor(
        "TRL", "Qwen3-8B, 1,048,576 tokens, 8 x H100", 380, "s a step", remark="ours takes 8 GPUs: not part of this run"
    ),
    Anchor("TRL", "the same", 56.2, "GB a GPU", remark="ours takes 8 GPUs: not part of this run"),
    *(
        Anchor(
            "torchtitan",
            f"Llama 3.1 8B, {tokens // 1024}K, 8 x H100",
            speed,
            "tokens/s a GPU",
            SPEED.format(tokens),
            FLOAT8,
        )
        for tokens, speed in ((32768, 3890), (65536, 2540), (131072, 1071), (262144, 548))
    ),
    Anchor(
        "DeepSpeed ALST", "Llama-8B, one H100", 500_000, "tokens", LONGEST, "theirs is one document, ours packs of 32K"
    ),
    Anchor(
        "TRL",
        "gemma-3-1b, one GPU of 79 GiB",
        107_520,
        "tokens",
        LONGEST,
        "theirs: a model of 1B; ours: of 8B, packs of 32K",
    ),
)
