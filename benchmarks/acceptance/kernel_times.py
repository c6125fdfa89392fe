"""Attention on one GPU, by attention_gpu.py: backward in a fixed order of sums and in any, contenders, packs, first calls.

order      the cases of GPU.md's first finding, forward and backward, with torch's switch for deterministic algorithms and
           without, of ours and of each package that can be imported; calls are interleaved. A backward's time is that of
           both passes less that of forward. Peak memory of ours in both orders
kernels    one document of each length: TFLOP/s of ours and of each package; the engine's part of a document over ranks
packed     15 documents and a GitHub-like pack; the memory of one layer
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from attention_gpu import PARTS, Setting, bare_call, both, call_of, forward
from gpu_contenders import OURS, PACKED, PACKED_IN_ORDER, Attention

from acceptance.record import Bench
from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.layouts.blocks import Block, Mask

K = 1024
CASES = {
    "one document": (16 * K,),
    "8 equal documents": (4 * K,) * 8,
    "a mixed pack": (8 * K, *(4 * K,) * 2, *(2 * K,) * 4, *(K,) * 8),
    "a long one among 16": (16 * K, *(K,) * 16),
    "a long one among 128": (16 * K, *(128,) * 128),
}
ROUND = (16 * K, 8 * K)
"""Queries and keys of a round of the exchange, under no mask."""
TINY_SHARE = 64
LENGTHS = tuple(2**power for power in range(13, 20))
TINY_LENGTHS = (512, 1024)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Within it, torch's switch for deterministic algorithms is on."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def order(bench: Bench) -> None:
    """Compare both orders, case by case."""
    setting = Setting.on(bench.device, bench.tiny, repeats=1 if bench.tiny else 5)
    share = TINY_SHARE if bench.tiny else 1
    _round(bench, setting, tuple(tokens // share for tokens in ROUND))
    for case, lengths in CASES.items():
        if bench.left() < 0:
            bench.note(f"The time was used up before: {case}.")
            return
        _case(bench, setting, case, tuple(max(1, length // share) for length in lengths))


def _case(bench: Bench, setting: Setting, case: str, lengths: tuple[int, ...]) -> None:
    """One pack, of every contender that can."""
    inputs = setting.inputs(sum(lengths))
    calls: dict[str, Callable[[], None]] = {}
    unable: dict[str, str] = {}
    for name in PACKED:
        try:
            attends = {
                "any": PACKED[name](lengths, bench.device),
                "fixed": PACKED_IN_ORDER[name](lengths, bench.device),
            }
            both(attends["any"], *inputs)
            with in_order():
                both(attends["fixed"], *inputs)
        except Exception as error:
            if name == OURS:
                raise
            unable[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        calls[f"{name}/forward"] = call_of(forward, attends["any"], inputs)
        calls[f"{name}/any"] = call_of(both, attends["any"], inputs)
        calls[f"{name}/fixed"] = _ordered(attends["fixed"], inputs)
    seconds = setting.meter.medians(calls, setting.repeats)
    rows, figures = [], {}
    for name in PACKED:
        row = {"documents": case, "number": str(len(lengths)), "function": name}
        if name in unable:
            rows.append(
                row | {"any order, ms": "-", "fixed order, ms": "-", "ratio": "-", "remark": f"cannot: {unable[name]}"}
            )
            continue
        alone, any_order, fixed = (seconds[f"{name}/{kind}"] for kind in ("forward", "any", "fixed"))
        backwards = [max(total - alone, 1e-9) for total in (any_order, fixed)]
        figures[f"order/{case}/{name}"] = backwards[1] / backwards[0]
        cells = {"any order, ms": f"{backwards[0] * 1e3:.3g}", "fixed order, ms": f"{backwards[1] * 1e3:.3g}"}
        rows.append(row | cells | {"ratio": f"{backwards[1] / backwards[0]:.2f}", "remark": ""})
    bench.table("Backward", rows, figures)
    peaks = [setting.meter.peak_bytes(calls[f"{OURS}/{kind}"]) for kind in ("any", "fixed")]
    cells = {f"{kind} order, MiB": f"{peak / 2**20:.1f}" for kind, peak in zip(("any", "fixed"), peaks)}
    bench.table(
        "Peak memory of ours, forward and backward",
        [{"documents": case} | cells],
        {f"order/{case}/peak of the fixed order over that of any": peaks[1] / peaks[0]},
    )


def _ordered(attend: Attention, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def call() -> None:
        with in_order():
            both(attend, *inputs)

    return call


def _round(bench: Bench, setting: Setting, tokens: tuple[int, ...]) -> None:
    """One round of the exchange by a bare call of the kernel that the engine chooses. `tokens`: queries and keys."""
    q, k, v, grad_out = setting.inputs(tokens[0])
    inputs = (q, k[: tokens[1]], v[: tokens[1]], grad_out)
    calls = {
        "forward": bare_call(setting, inputs, backward=False, mask=Mask.FULL),
        "any": bare_call(setting, inputs, backward=True, mask=Mask.FULL),
    }
    whole = calls["any"]

    def fixed() -> None:
        with in_order():
            whole()

    seconds = setting.meter.medians(calls | {"fixed": fixed}, setting.repeats)
    backwards = [max(seconds[kind] - seconds["forward"], 1e-9) for kind in ("any", "fixed")]
    row = {"documents": "a round of the exchange", "number": "1", "function": "ours, a bare call"}
    row |= {"any order, ms": f"{backwards[0] * 1e3:.3g}", "fixed order, ms": f"{backwards[1] * 1e3:.3g}"}
    ratio = backwards[1] / backwards[0]
    bench.table(
        "Backward", [row | {"ratio": f"{ratio:.2f}", "remark": ""}], {"order/a round of the exchange/ours": ratio}
    )


def kernels(bench: Bench) -> None:
    """Contenders on one document of each length while there is time, the engine, and first calls of flash-attn 4."""
    setting = Setting.on(bench.device, bench.tiny, repeats=1 if bench.tiny else 5)
    lengths = TINY_LENGTHS if bench.tiny else LENGTHS
    rows, figures = PARTS["engine"](setting, lengths)
    bench.table("The engine's part of a document", rows, figures)
    _first_calls(bench, setting)
    for length in lengths:
        begun = time.monotonic()
        rows, figures = PARTS["kernels"](setting, (length,))
        bench.table("One document", rows, figures)
        if 4 * (time.monotonic() - begun) > bench.left():
            bench.note(f"Time was left for documents of up to {length} tokens.")
            break


def _first_calls(bench: Bench, setting: Setting) -> None:
    """A kernel's first call of shapes that it may compile for, over its later ones."""
    name = "flash_attn_4"
    q, k, v, _ = (x.detach() for x in setting.inputs(2 * K))
    scale = setting.head_dim**-0.5
    reason = KERNELS[name].unsupported(AttentionCall(q, k, v, (), scale))
    if reason is not None:
        bench.note(f"First calls of {name} were not measured: {reason}.")
        return
    for documents in (1, 16, 300):
        size = 2 * K // documents
        blocks = [Block(i * size, (i + 1) * size, i * size, (i + 1) * size, Mask.CAUSAL) for i in range(documents)]

        def call(blocks: list[Block] = blocks) -> None:
            list(KERNELS[name].forward(AttentionCall(q, k, v, blocks, scale)))

        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first, later = time.perf_counter() - begun, setting.meter.medians({"later": call}, setting.repeats)["later"]
        row = {"kernel": name, "documents": str(documents), "first, s": f"{first:.3f}", "later, s": f"{later:.5f}"}
        bench.table("First calls", [row], {f"kernels/first call of {name} over later ones, {documents}": first / later})


def packed(bench: Bench) -> None:
    """Packs beside functions that take boundaries, and the memory of a layer."""
    setting = Setting.on(bench.device, bench.tiny, repeats=1 if bench.tiny else 5)
    for part, lengths in (("packed", TINY_LENGTHS if bench.tiny else LENGTHS[:5]), ("memory", (2 * K, 4 * K))):
        rows, figures = PARTS[part](setting, lengths if bench.tiny or part == "packed" else (32 * K, 64 * K))
        bench.table({"packed": "Packs", "memory": "Memory of one layer"}[part], rows, figures)
