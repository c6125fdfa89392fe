"""Memory of whole steps on one GPU, by gpu.py: beside the memory model, the longest that fits, their speed, and with LoRA."""

from __future__ import annotations

import time
from typing import Any

import gpu
import torch
from gpu_setting import NAMES, Setting, setting_of

from acceptance.record import Bench, NotPossibleError
from hf_longctx.training.memory.activations import ActivationMemory

OFFLOADS = (0.0, 0.5, 1.0)
ROOM_SHARE = 0.85
"""Share of the device that the step without offload may take by its estimate: it is to fit even if the estimate is too low."""
WARM_UP_TOKENS = 4096


def _setting(bench: Bench, *, to_the_limit: bool = False) -> Setting:
    """gpu.py's, with this part's time; each of its results goes into the record.

    Args:
        to_the_limit: a tiny run gets little memory, so that the limit is found soon.
    """
    asked = ["--device", bench.device.type, "--minutes", str(max(0.0, bench.left() / 60)), *["--tiny"] * bench.tiny]
    asked += ["--device-gib", "0.004", "--host-gib", "0.01"] if bench.tiny and to_the_limit else []
    setting = setting_of(gpu.command_line().parse_args(asked), bench.device)
    setting.told = lambda name, row, figures: _told(bench, name, row, figures)
    setting.begun = time.monotonic()
    return setting


def _told(bench: Bench, name: str, row: dict[str, str], figures: dict[str, Any]) -> None:
    kind, _, rest = name.partition("/")
    numbers = {f"{name}/{what}": value for what, value in figures.items() if isinstance(value, (int, float))}
    if kind == "longest" and row.get("tokens that fit", "").isdigit():
        numbers[f"{name}/tokens that fit"] = int(row["tokens that fit"])
    title = f"{kind}: {'summary' if 'tokens that fit' in row else 'steps'}"
    bench.table(title, [{"of": rest} | row], numbers)


def _refuse_too_large(setting: Setting, kind: str) -> None:
    """Raises NotPossibleError where weights and gradients alone do not fit."""
    estimate = setting.memory_model(kind)
    taken = estimate.weights + estimate.gradients
    if taken > setting.device_bytes:
        raise NotPossibleError(
            f"weights and gradients of {NAMES[kind]} take {taken / 2**30:.0f} GiB, and {setting.device_bytes / 2**30:.0f} GiB of "
            "the device may be used"
        )


def beside_model(bench: Bench) -> None:
    """One pack's step with nothing, half and all of what may wait in host memory there: peak beside MemoryModel's.

    Raises:
        NotPossibleError: the model does not fit.
    """
    setting = _setting(bench)
    _refuse_too_large(setting, "llama")
    model = setting.model("llama")
    memory = ActivationMemory(model, keep_attention="always", device=bench.device)
    budget = gpu.Budget.of(setting, "llama", model)
    tokens, most = setting.step // 8, 2 * setting.step
    while tokens < most and budget.estimate(2 * tokens, 0.0) <= ROOM_SHARE * budget.room:
        tokens *= 2
    layout, warm_up = gpu.pack(tokens, setting.pack), min(WARM_UP_TOKENS, setting.pack)
    gpu.step_of(model, memory, gpu.pack(warm_up, warm_up))()
    setting.clear()
    peaks: dict[float, int] = {}
    for offload in OFFLOADS:
        probe = gpu.probe(setting, budget, model, memory, layout, offload)
        estimate = budget.estimate(tokens, offload)
        row = {
            "tokens": str(tokens),
            "offload": f"{offload:g}",
            "measured GiB": f"{probe.peak / 2**30:.3f}",
            "estimated GiB": f"{estimate / 2**30:.3f}",
            "measured / estimated": f"{probe.peak / estimate:.3f}",
            "host GiB": f"{probe.host / 2**30:.3f}",
            "fits": "yes" if probe.fits else "no",
        }
        figures = {f"memory/offload {offload:g}, measured over estimated": probe.peak / estimate} if probe.fits else {}
        if bench.cuda:
            stats = torch.cuda.memory_stats()
            row["allocator's retries"] = str(stats["num_alloc_retries"])
            reserved = stats["reserved_bytes.all.peak"] / max(1, stats["allocated_bytes.all.peak"])
            figures["memory/reserved over allocated"] = reserved
            row["reserved / allocated"] = f"{reserved:.2f}"
        bench.table(f"{NAMES['llama']}, forward and backward", [row], figures)
        if probe.fits:
            peaks[offload] = probe.peak
    if 0.0 in peaks and 1.0 in peaks:
        predicted = budget.estimate(tokens, 0.0) - budget.estimate(tokens, 1.0)
        saved = peaks[0.0] - peaks[1.0]
        row = {"predicted MiB": f"{predicted / 2**20:.1f}", "measured MiB": f"{saved / 2**20:.1f}"}
        bench.table(
            "What full offload frees",
            [row],
            {"memory/freed by full offload over what was predicted": saved / predicted},
        )


def without_segments(bench: Bench) -> None:
    """The same where the allocator's segments do not expand, as the part's variable says.

    Raises:
        NotPossibleError: there is no such allocator.
    """
    if not bench.cuda:
        raise NotPossibleError("a CPU's memory has no segments")
    beside_model(bench)


def longest(bench: Bench) -> None:
    """The most tokens of a full fine-tuning step that fit, by bisection.

    Raises:
        NotPossibleError: the model does not fit.
    """
    setting = _setting(bench, to_the_limit=True)
    _refuse_too_large(setting, "llama")
    gpu.longest(setting, "llama")


def speed(bench: Bench) -> None:
    """Seconds of a layer, and of all by extrapolation, at the lengths of which others have published speeds."""
    setting = _setting(bench)
    setting.lengths = setting.lengths if bench.tiny else [32768, 65536, 131072, 262144]
    gpu.speed(setting, "llama")


def lora(bench: Bench) -> None:
    """Speeds of a Mixtral with adapters, from a few layers, and its longest step where all layers fit."""
    setting = _setting(bench, to_the_limit=True)
    setting.lengths = setting.lengths[:1] if bench.tiny else setting.lengths
    gpu.speed(setting, "mixtral")
    try:
        _refuse_too_large(setting, "mixtral")
    except NotPossibleError as error:
        bench.note(f"The longest step was not looked for: {error}.")
    else:
        gpu.longest(setting, "mixtral")
