"""Measures what this hardware achieves on a model, on all ranks at once: contention is part of the answer.

1. A model of the given configuration with random weights (times do not depend on them) runs micro-batches, forward and
   backward, through the same code as training: single documents of doubling length, packs of short ones, and documents
   split over 2, 4, 8 ... and all ranks. Apart from these, attention alone, the messages of a split document alone, the sum
   of gradients, and a step of AdamW.
2. A first pass warms up and finds out which cases are short enough for the time given. Further passes take the cases in
   turn, so that what disturbs the machine for a while hits all of them; each case's median counts.
3. The times are fitted (planner/cost/calibration.py), but for some lengths and packs that are held out: by these the fit is
judged.
4. Bytes are copied to host memory and back, which says what offload costs.

Sent: what training sends, a barrier before each measurement, and at the end all times to all ranks.
"""

import gc
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.certified_patch import patch_model
from hf_longctx.counting.config_fields import language_model
from hf_longctx.counting.records import AttentionShape
from hf_longctx.hardware.devices import gpu_speed
from hf_longctx.hardware.model_sizes import attention_shapes, model_flops
from hf_longctx.hardware.profile import Part, Point, Profile
from hf_longctx.layouts.layout import Layout, zigzag
from hf_longctx.models.documents import documents_of, longest_of
from hf_longctx.models.registered import EAGER_MODELS
from hf_longctx.parallel.reduction import all_finite, sum_step
from hf_longctx.planner.cost.calibration import fit_speed, predict
from hf_longctx.planner.topology import Documents
from hf_longctx.precision import cpu_core, cpu_kind

Precision = Literal["float32", "bfloat16", "autocast"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "autocast")
"""autocast: weights in float32, matrix products in bfloat16, as TrainingArguments' bf16=True."""

SHORTEST = 16
"""Tokens of the shortest document measured."""
HELD_OUT_FROM = 32
"""Half as much again is the shortest document that the fit is judged by; then each four times as long."""
SHORTEST_PIECE = 128
"""Tokens that each rank holds of the shortest split document: the planner splits none so short, and where a split costs
more than its compute, that would be fitted at the expense of documents that matter."""
PACKED_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Tokens of a pack of short documents: on a GPU so many that it computes for longer than the host takes to start its kernels."""
SHORTEST_ALONE = {"cpu": SHORTEST, "cuda": 4096}
"""Tokens of the shortest document whose attention is timed alone; likewise."""
LONGEST_SHARE = 1 / 40
"""Share of the time given that one case may take at most: there are about 30, half of them quick, and 3 passes or more."""
PASSES = (3, 9)
"""Least and most passes that count."""
HOST_COPY_BYTES = 2**28
"""Bytes that are copied to the host and back at once; on CPUs a quarter of it."""
HOST_COPIES = 5
"""Whose median counts."""
TIMED_SHARE = 1 / 1000
"""Share of the time given: a case that takes less runs several times in a row, so that barriers and clocks do not count."""


@dataclass(frozen=True)
class ProfileSettings:
    """Choice of what is measured, and how thoroughly."""

    precision: Precision = "float32"
    gradient_checkpointing: bool = False
    longest: int = 131072
    """tokens of the longest document on one rank, if time and memory allow it"""
    seconds: float = 120.0
    """about how long to measure"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: seconds of CPU of each rank, for more ranks than cores"""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is unknown; valid: {', '.join(PRECISIONS)}")
        if self.longest < SHORTEST_PIECE or not 0 < self.seconds < math.inf:
            raise ValueError(
                f"longest={self.longest} and seconds={self.seconds}: a profile needs documents of {SHORTEST_PIECE} tokens "
                "or more, and a positive number of seconds"
            )


@dataclass(frozen=True)
class _Case:
    """A point to be."""

    part: Part
    lengths: tuple[int, ...] = ()
    ranks: int = 1
    family: str = ""
    """cases of a family come in ascending order: once one takes too long, the rest is left out"""
    held_out: bool = False
    """whether the fit is judged by it, and does not see it"""

    @property
    def piece(self) -> int:
        """Tokens that a rank holds."""
        return sum(self.lengths) // self.ranks


def profile_model(config: Any, device: torch.device, settings: ProfileSettings) -> Profile:
    """Every rank of the default process group calls this, or one process without one; all return the same profile.

    Args:
        config: of a Hugging Face model; its weights are drawn at random.
        device: where this rank computes.

    Raises:
        ValueError: the model cannot be counted, or not be run over layouts.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    exchange = Exchange() if world_size > 1 else None
    ranks_per_node = exchange.ranks_per_node if exchange is not None else 1
    flops = model_flops(config)  # a model that cannot be counted is refused before anything is measured
    bench = _Bench(config, device, settings, exchange)
    documents, most = documents_of(bench.model), longest_of(bench.model)
    measured = _measure(bench, suited(cases(world_size, settings.longest, device.type), documents, most), settings)
    # Lengths are tokens, whatever the kernel makes of them; bytes are those of keys and values as they travel.
    half = settings.precision != "float32"
    preset = cpu_core(cpu_kind(), half) if device.type == "cpu" else gpu_speed(torch.cuda.get_device_name(device))
    preset = replace(preset, activation_bytes=2 if half else 4)
    fitted = [point for point in measured if not point.held_out]
    beside_host = device.type == "cuda" and settings.clock == "wall"
    speed = fit_speed(fitted, config, preset, ranks_per_node=ranks_per_node, beside_host=beside_host)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host_bandwidth = bench.host_bandwidth()
    return Profile(
        speed=speed,
        points=tuple(measured),
        predicted_seconds=tuple(predict(measured, config, speed, ranks_per_node=ranks_per_node).tolist()),
        clock=settings.clock,
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        backend=dist.get_backend() if world_size > 1 else "none",
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        threads=torch.get_num_threads(),
        precision=settings.precision,
        device_bytes=torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else host_bytes // ranks_per_node,
        host_bytes=host_bytes,
        model={
            "model_type": config.model_type,
            "layers": flops.layers,
            "hidden_size": flops.hidden,
            "parameters": flops.parameters,
            "gradient_checkpointing": int(settings.gradient_checkpointing),
        },
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        host_bandwidth=float(f"{host_bandwidth:.6g}"),
    )


def suited(possible: Sequence[_Case], documents: Documents, most: int | None) -> list[_Case]:
    """Return those of some cases that a model runs.

    Args:
        documents: how its documents may lie; see models/traits.py.
        most: tokens that a document of it may have; None: any.
    """
    if documents != "split":
        possible = [case for case in possible if case.ranks == 1 or not case.lengths]
    if documents == "alone":
        possible = [case for case in possible if len(case.lengths) < 2]
    return [case for case in possible if most is None or max(case.lengths, default=0) <= most]


def cases(world_size: int, longest: int, device: str = "cpu") -> list[_Case]:
    """Return what is measured on so many ranks, family by family."""
    doubling = [2**k for k in range(40) if SHORTEST <= 2**k <= longest]
    chosen = [_Case("micro_batch", (length,), family="whole") for length in doubling]
    tokens = min(PACKED_TOKENS[device], longest)
    for short in (SHORTEST, 64, 256):
        if 2 * short <= tokens:
            chosen.append(_Case("micro_batch", (short,) * (tokens // short), family=f"packs of {short}"))
    chosen.append(_Case("micro_batch", (tokens // 4, tokens // 4, tokens // 2), family="mixed pack"))
    # Between the lengths that are fitted, and packed otherwise. The first of a family is always measured.
    between = [length for length in doubling if length >= HELD_OUT_FROM][::2]
    chosen += [_Case("micro_batch", (3 * length // 2,), family="held out", held_out=True) for length in between]
    chosen.append(_Case("micro_batch", (3 * tokens // 8, tokens // 8), family="held-out pack", held_out=True))
    chosen += [
        _Case("attention", (length,), family="attention")
        for length in doubling[2::2]
        if length >= SHORTEST_ALONE[device]
    ]
    for ranks in sorted({2**k for k in range(1, 20) if 2**k < world_size} | {world_size} - {1}):
        pieces = [length for length in doubling if length >= SHORTEST_PIECE and length * ranks**0.5 <= longest]
        chosen += [_Case("micro_batch", (ranks * piece,), ranks, f"split over {ranks}") for piece in pieces]
        chosen.append(_Case("micro_batch", (ranks * SHORTEST_PIECE,) * 2, ranks, f"two split over {ranks}"))
        split = (ranks * (SHORTEST_PIECE + SHORTEST_PIECE // 2),)
        chosen.append(_Case("micro_batch", split, ranks, f"held out over {ranks}", held_out=True))
        chosen += [_Case("exchange", (ranks * piece,), ranks, f"messages of {ranks}") for piece in [1, *pieces[::2]]]
    if world_size > 1:
        chosen.append(_Case("reduction", ranks=world_size, family="reduction"))
    return [*chosen, _Case("optimizer", ranks=world_size, family="optimizer")]


def _measure(bench: "_Bench", wanted: Sequence[_Case], settings: ProfileSettings) -> list[Point]:
    """The medians of those cases that the time allows."""
    began = time.perf_counter()
    bench.seconds(_Case("micro_batch", (SHORTEST,)), 1)  # loads kernels, allocates gradients
    times: dict[_Case, int] = {}
    too_long: set[str] = set()
    # Tokens that a rank has held so far: memory is left for as many. Where it has ended, split documents get half, since
    # keys and values of others come on top, and a rank that ended there would leave its peers waiting.
    most, ended = SHORTEST_PIECE, False
    for case in wanted:
        if case.family in too_long or (case.family != "whole" and case.piece > (most // 2 if ended else most)):
            continue
        first = bench.seconds(case, 1)
        slowest = bench.agree(first if first is not None else 0.0)
        if slowest > settings.seconds * LONGEST_SHARE:
            too_long.add(case.family)
        ended |= math.isinf(slowest)
        if math.isfinite(slowest):
            most = max(most, case.piece)
            times[case] = max(1, min(50, round(settings.seconds * TIMED_SHARE / max(slowest, 1e-6))))
    measured: dict[_Case, list[float | None]] = {case: [] for case in times}
    for number in range(PASSES[1]):
        if number >= PASSES[0] and bench.agree(time.perf_counter() - began) > settings.seconds:
            break
        for case, repeats in times.items():
            measured[case].append(bench.seconds(case, repeats))
    everyone = bench.gather([measured[case] for case in times])
    medians = [_of_all([row[i] for row in everyone], case.ranks, settings.clock) for i, case in enumerate(times)]
    return [
        Point(case.part, case.lengths, case.ranks, seconds, case.held_out)
        for case, seconds in zip(times, medians)
        if math.isfinite(seconds)  # memory may also end in a later pass
    ]


def _of_all(seconds: Sequence[Sequence[float | None]], ranks: int, clock: str) -> float:
    """One time from those of all ranks [rank][pass]; None where a rank took no part. A group takes as long as its slowest
    rank; of CPU seconds, its ranks take their mean."""
    taking_part = np.array([row for row in seconds if row[0] is not None], float)
    groups = taking_part.reshape(-1, ranks, taking_part.shape[1])
    return float(np.median(groups.max(1) if clock == "wall" else groups.mean(1)))


class _Bench:
    """Runs and times a case on this rank."""

    def __init__(self, config: Any, device: torch.device, settings: ProfileSettings, exchange: Exchange | None) -> None:
        self.config, self.device, self.settings, self.exchange = config, device, settings, exchange
        self.rank, self.world_size = (exchange.rank, exchange.world_size) if exchange is not None else (0, 1)
        self.text = language_model(config)
        self.attention = Counter(attention_shapes(config))
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        self.compute_dtype = torch.float32 if settings.precision == "float32" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = patch_model(model.train())
        self.trained = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0)

    def seconds(self, case: _Case, repeats: int) -> float | None:
        """Measure the seconds of one run, after all ranks have met; infinite where memory ends, None where this rank takes no
        part."""
        run = self._prepared(case)
        self._meet()
        if run is None:
            return None
        clock = time.perf_counter if self.settings.clock == "wall" else time.process_time
        began = clock()
        try:
            for _ in range(repeats):
                run()
            self._synchronize()
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            return math.inf
        return (clock() - began) / repeats

    def host_bandwidth(self) -> float:
        """Bytes/s to the host and back of the slowest rank, all of them at once."""
        cuda = self.device.type == "cuda"
        here = torch.empty(HOST_COPY_BYTES if cuda else HOST_COPY_BYTES // 4, dtype=torch.uint8, device=self.device)
        on_host = torch.empty_like(here, device="cpu", pin_memory=cuda)
        seconds = []
        for _ in range(1 + HOST_COPIES):  # the first touches the memory
            self._meet()
            began = time.perf_counter()
            on_host.copy_(here, non_blocking=True)
            here.copy_(on_host, non_blocking=True)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return 2 * len(here) / self.agree(float(np.median(seconds[1:])))

    def agree(self, seconds: float) -> float:
        """The largest over all ranks."""
        if self.exchange is None:
            return seconds
        largest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def gather(self, mine: Any) -> list[Any]:
        """Gather those of all ranks."""
        everyone: list[Any] = [mine] * self.world_size
        if self.exchange is not None:
            dist.all_gather_object(everyone, mine)
        return everyone

    def _meet(self) -> None:
        self._synchronize()
        if self.exchange is not None:
            dist.barrier()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prepared(self, case: _Case) -> Callable[[], Any] | None:
        """Return what is timed; None if this rank is left over by groups of so many."""
        if case.part == "reduction":
            statistics = torch.zeros(2, dtype=torch.float64, device=self.device)
            return lambda: sum_step(self.trained, statistics)
        if case.part == "optimizer":
            return self._optimizer_step
        first = self.rank // case.ranks * case.ranks
        if first + case.ranks > self.world_size:
            return None
        if case.part == "exchange":
            return self._messages(case.ranks, case.piece)
        layout = _layout(case.lengths, range(first, first + case.ranks))
        if case.part == "attention":
            return self._attention(layout)
        tokens = layout.tokens(self.rank)
        ids = torch.randint(self.text.vocab_size, (1, tokens), device=self.device)
        counts = {"num_items_in_batch": sum(case.lengths), "num_tokens_in_batch": sum(case.lengths)}

        def run() -> None:
            autocast = torch.autocast(self.device.type, torch.bfloat16)
            with autocast if self.settings.precision == "autocast" else nullcontext():
                loss = self.model(input_ids=ids, shift_labels=ids, layout=layout, exchange=self.exchange, **counts).loss
            loss.backward()

        return run

    def _optimizer_step(self) -> None:
        """Do what follows the reduction in the trainer."""
        all_finite(self.trained, self.device)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()

    def _attention(self, layout: Layout) -> Callable[[], Any]:
        """Attention of all layers, forward and backward."""
        tokens = layout.tokens(self.rank)
        alibi, softcap = self.config.model_type in EAGER_MODELS, getattr(self.text, "attn_logit_softcapping", None)

        def call_of(shape: AttentionShape) -> Callable[[], Any]:
            dims = (
                (shape.heads, shape.qk_width),
                (shape.kv_heads, shape.qk_width),
                (shape.kv_heads, shape.value_width),
            )
            q, k, v = (self._heads(tokens, *dim).requires_grad_() for dim in dims)
            grad = self._heads(tokens, shape.heads, shape.value_width)
            slopes = torch.ones(shape.heads, device=self.device) if alibi else None
            features: dict[str, Any] = {"window": shape.window, "chunk": shape.chunk, "alibi_slopes": slopes}

            def call() -> None:
                out = layout_attention(q, k, v, layout, self.exchange, softcap=softcap, **features)
                torch.autograd.grad(out, (q, k, v), grad)

            return call

        calls = [(call_of(shape), layers) for shape, layers in self.attention.items()]

        def run() -> None:
            for call, layers in calls:
                for _ in range(layers):
                    call()

        return run

    def _messages(self, ranks: int, piece: int) -> Callable[[], Any]:
        """All that travels for all layers of a document of which each rank of this one's group holds `piece` tokens: keys
        and values twice, and their gradients, float32, in return. A rank needs 3 of 4 tokens of each other one."""
        assert self.exchange is not None
        exchange, peers = self.exchange, _peers(self.rank, ranks, self.exchange.ranks_per_node)
        tokens = max(1, 3 * piece // 4)
        rows_of = {
            shape: [self._heads(tokens, shape.kv_heads, width) for width in (shape.qk_width, shape.value_width)]
            for shape in self.attention
        }

        def send(rows: Sequence[torch.Tensor], gradients: bool) -> None:
            for to, origin in peers:
                arriving = [(torch.empty_like(source), origin) for source in rows]
                exchange.start([(source, to) for source in rows], arriving, gradients=gradients).wait()

        def run() -> None:
            for shape, layers in self.attention.items():
                rows = rows_of[shape]
                for _ in range(layers):
                    send(rows, False)
                    send(rows, False)
                    send([source.float() for source in rows], True)

        return run

    def _heads(self, tokens: int, heads: int, width: int) -> torch.Tensor:
        """[tokens, heads, width]"""
        return torch.randn(tokens, heads, width, dtype=self.compute_dtype, device=self.device)


def _layout(lengths: Sequence[int], ranks: Sequence[int]) -> Layout:
    """Each document split over all the ranks, or whole on one."""
    split = [zigzag(doc, length, ranks) for doc, length in enumerate(lengths)]
    return Layout({rank: tuple(segment for shards in split for segment in shards.get(rank, ())) for rank in ranks})


def _peers(rank: int, ranks: int, ranks_per_node: int) -> list[tuple[int, int]]:
    """(to whom, from whom) `rank` sends and receives, one exchange after the other, in its group of so many ranks.

    Pieces of other nodes cross once, to the rank in the same place, and are passed on inside, as the engine does it: on n
    nodes of g ranks, n - 1 exchanges between nodes and n*(g - 1) inside.
    """
    first = rank // ranks * ranks
    node = ranks_per_node if ranks % ranks_per_node == 0 else ranks
    nodes, (own, place) = ranks // node, divmod(rank - first, node)
    between = [
        (first + (own + n) % nodes * node + place, first + (own - n) % nodes * node + place) for n in range(1, nodes)
    ]
    base = first + own * node
    inside = [(base + (place + t) % node, base + (place - t) % node) for t in range(1, node)]
    return between + inside * nodes
