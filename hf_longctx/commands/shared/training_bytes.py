"""--dtype of `estimate` and `simulate`: the precision that a model is trained in, and what is counted of it on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_longctx.hardware.devices import CPU_DEVICES
from hf_longctx.hardware.speeds import product_scratch
from hf_longctx.precision import decide_for, kind_of

if TYPE_CHECKING:
    from hf_longctx.commands.shared.room import Room

TrainedDtype: TypeAlias = Literal["auto", "mixed", "bfloat16", "float32"]
"""Values of --dtype."""
DTYPE_HELP = (
    "Use this dtype; mixed: float32 weights, bfloat16 compute (bf16=True); auto: mixed where faster, else float32."
)
BYTES = {"mixed": (4, 2, 8), "bfloat16": (2, 2, 4), "float32": (4, 4, 8)}
"""--dtype -> bytes of a weight, of an activation, and of AdamW's states per parameter, which have the weights' dtype."""


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of a run's numbers."""

    dtype: str
    """one of BYTES"""
    weight: int
    activation: int
    settings: dict[str, Any]
    """arguments of MemoryModel.from_config that follow from precision and device"""
    note: str = ""
    """the reason for what `auto` came to"""


def training_bytes(dtype: TrainedDtype, device: str, room: Room) -> TrainingBytes:
    """Return what training in this precision takes.

    Args:
        device: a preset or a profile.
        room: its memory.
    """
    note, name = "", dtype
    if dtype == "auto":
        decision = decide_for(device)
        name = "mixed" if decision.bf16 else "float32"
        note = f"--dtype auto: {name}; {decision.reason}"
    weight, activation, states = BYTES[name]
    kind = kind_of(device) if device in CPU_DEVICES else None
    settings = {
        "weight_bytes": weight,
        "activation_bytes": activation,
        "optimizer_bytes": states,
        "product_scratch": product_scratch(kind, bf16=activation == 2),
        "workspace": room.workspace,
    }
    return TrainingBytes(name, weight, activation, settings, note)
