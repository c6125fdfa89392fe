"""Inference across ranks, with the engine that trains: documents scored per token, long prompts prefilled.

    exchange = Exchange()                                    # once, by all ranks, under torchrun
    model = patch_model(AutoModelForCausalLM.from_pretrained(path))

    log_probabilities = score(model, documents, exchange=exchange, capacity=65536)
    perplexity = torch.cat(log_probabilities).mean().neg().exp()

    logits, cache = prefill(model, prompt, exchange=exchange, to=0)
    if exchange.rank == 0:                                   # from here on ordinary transformers, on one rank
        ids = torch.cat([prompt, logits.argmax().view(1)])[None]
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, max_new_tokens=100
        )

Every rank of the exchange makes the same calls with the same arguments. `score` plans its documents as one step, as training
does (planner/hdp.py), by what the model's configuration costs on the first rank's kind of device. `prefill` gives its prompt
to all ranks in zigzag, as a plan lays a document that needs them all. Labels are shifted before documents are cut, so the
token that a rank predicts may lie on another one. Of logits, only a few rows exist at once. Where the model needs documents
whole (models/documents.py), plans keep them so, and `prefill` is transformers' own on each rank.

Sent between ranks, beside what attention sends: eight bytes, which tell whether arguments agree; eight more from the first
rank before a plan; one number a token, to every rank; keys and values of the prompt, layer by layer, to those ranks that want
the cache. Shapes: T tokens of this rank's shard, H hidden size, V vocabulary, Hkv key/value heads, D head dimension.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from hf_longctx.attention.exchange import Exchange
from hf_longctx.hardware.devices import CPU_DEVICES, KNOWN_DEVICES
from hf_longctx.inference.prompt_cache import ShardCache
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from hf_longctx.models.attention import carries_layouts, is_patched
from hf_longctx.models.costs import counted_cost, guessed_cost
from hf_longctx.models.documents import documents_of, refuse_beyond_positions
from hf_longctx.models.layout_mask import CollectedKeys
from hf_longctx.models.loss.cross_entropy import IGNORE
from hf_longctx.models.loss.head import base_outputs
from hf_longctx.models.loss.own_logits import logits_of
from hf_longctx.models.whole_prompt import NoCache, read_whole
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.planner.hdp import plan_step
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import Topology
from hf_longctx.precision import preset_name, preset_speed


def score(
    model: torch.nn.Module,
    documents: Sequence[torch.Tensor | Sequence[int]],
    *,
    exchange: Exchange | None = None,
    capacity: int | None = None,
    ulysses: int = 1,
) -> list[torch.Tensor]:
    """The log-probability of every token of every document, given the tokens before it.

    The model runs in evaluation mode, and is then as it was before. Autocast and the model's dtype are respected;
    logits are normalised in float32.

    Args:
        model: patched by `patch_model`.
        documents: token ids [length] of each, at least one.
        exchange: the ranks that share the work; None: this process does it all.
        capacity: most tokens of a micro-batch on one rank; default: any number, so that all documents that lie whole on a rank
            make one micro-batch there.
        ulysses: most ranks to split heads over. Of its divisors, the largest that divides the ranks is used, and where fewer
            ranks share a document, the largest that divides these.

    Returns:
        One tensor [length - 1] for each document, in order, the same on every rank; element i is
        log p(token i + 1 | tokens 0 to i). Nothing precedes a first token, so it has none. float32, or float64 of a
        float64 model, on the model's device.

    Raises:
        ValueError: the model is not patched, a document is empty, not flat, or holds what is no token of the model, one is
            too long for all ranks together (for one rank, where it must stay whole) or longer than it has positions for, a
            setting is out of range, or ranks passed different arguments.
    """
    rank, world_size = (exchange.rank, exchange.world_size) if exchange is not None else (0, 1)
    with _agreement("score", (capacity, ulysses), exchange) as agree:
        language_model = _language_model(model)
        ids = [_token_ids(document, f"document {i}", language_model) for i, document in enumerate(documents)]
        topology = _topology(language_model, world_size, capacity, list(map(len, ids)), ulysses)
        agree(language_model, ids)

    dtype = torch.promote_types(language_model.get_output_embeddings().weight.dtype, torch.float32)
    if not ids:
        return []
    plan = planned(language_model, [len(document) for document in ids], topology, exchange)
    layouts = [[layout for _, layout in plan.layouts(other)] for other in range(world_size)]
    own_scores = [torch.empty(0, dtype=dtype, device=language_model.device)]
    with evaluating(model):
        for layout in layouts[rank]:
            shard = layout.shard(rank)
            tokens = torch.cat([ids[s.doc][s.start : s.stop] for s in shard])
            labels = torch.cat([_shifted(ids[s.doc], s) for s in shard]).to(language_model.device)
            hidden = hidden_states(language_model, tokens, layout, exchange)
            own_scores.append(_log_probabilities(language_model, hidden, labels, dtype))

    scored = {
        other: [
            (s.doc, s.start, min(s.stop, len(ids[s.doc]) - 1))
            for layout in layouts[other]
            for s in layout.shard(other)
            if s.start < len(ids[s.doc]) - 1
        ]
        for other in range(world_size)
    }
    counts = {other: sum(stop - start for _, start, stop in pieces) for other, pieces in scored.items()}
    scores = [own_scores[0].new_empty(len(document) - 1) for document in ids]
    for other, values in _send_to(range(world_size), torch.cat(own_scores), counts, exchange).items():
        lengths = [stop - start for _, start, stop in scored[other]]
        for (doc, start, stop), piece in zip(scored[other], values.split(lengths)):
            scores[doc][start:stop] = piece
    return scores


def prefill(
    model: torch.nn.Module,
    prompt: torch.Tensor | Sequence[int],
    *,
    exchange: Exchange | None = None,
    ulysses: int = 1,
    to: int | Literal["all"] = "all",
) -> tuple[torch.Tensor, DynamicCache | None]:
    """Keys and values of a long prompt, computed across ranks, as the cache that transformers goes on from; it holds
    what one process would have put there. Layers with a sliding window keep no more than their window.

    The cache holds the *whole* prompt. `generate` takes what the cache lacks from the end of its input_ids, and needs
    at least one such token: the one chosen from the logits, or more of the text. Given the bare prompt, transformers
    reads it a second time and says nothing. It also does where `use_cache` is False, as in MPT's configuration. To go
    on several times, pass `copy.deepcopy(cache)`.

    A model that needs documents whole reads the prompt by its own forward, whole on every rank, which sends nothing and holds
    all of the cache for as long; what its layers carry along a document is part of its cache. `generate` takes that of a Mamba
    as `cache_params`.

    Args:
        model: patched by `patch_model`; runs in evaluation mode, and is then as it was before.
        prompt: token ids [length].
        exchange: the ranks that share the work; None: this process does it all.
        ulysses: most ranks to split heads over; the largest divisor of it that divides the ranks is used.
        to: the rank that wants the cache, or "all". The others never hold more than their share of it.

    Returns:
        Logits of the token after the prompt, [V], on every rank; and the cache, None on a rank that did not want it.

    Raises:
        ValueError: the model is not patched, the prompt is empty, not flat, holds what is no token of the model, or more tokens
            than it has positions for, `to` is no rank, or ranks passed different arguments. NoCache: the class makes none.
    """
    rank, world_size = (exchange.rank, exchange.world_size) if exchange is not None else (0, 1)
    with _agreement("prefill", (ulysses, to), exchange) as agree:
        language_model = _language_model(model)
        ids = _token_ids(prompt, "the prompt", language_model)
        degree = _degree(ulysses, world_size)
        if to != "all" and to not in range(world_size):
            raise ValueError(f"to={to!r} is none of the {world_size} ranks; valid: 'all', or 0 to {world_size - 1}")
        agree(language_model, [ids])

    if documents_of(language_model) != "split":
        with evaluating(model):
            logits, cache = read_whole(language_model, ids)
        return logits, cache if to in ("all", rank) else None
    if len(ids) < world_size:  # too few to share: each rank computes them all, and nothing is sent
        layout, readers, wanting = Layout({rank: (Segment(0, 0, len(ids)),)}), [rank], [rank]
    else:
        layout, readers = Layout(zigzag(0, len(ids), range(world_size)), degree), list(range(world_size))
        wanting = readers if to == "all" else [to]
    positions = {other: layout.positions(other) for other in layout.ranks}
    collected = CollectedKeys()
    receiver: dict[str, Any] = {"collect": collected}
    if carries_layouts(language_model):
        receiver = {"past_key_values": ShardCache(language_model.config, collected)}
    with evaluating(model):
        hidden = hidden_states(language_model, ids[positions[rank]], layout, exchange, **receiver)
        row = int(positions[rank].argmax())
        last = logits_of(language_model, hidden[None, row : row + 1])[0]
    if not collected.of_layer:
        raise NoCache(
            f"no layer of {type(language_model).__name__} caches its keys and values. Valid: generate from the prompt itself"
        )
    owner = max(positions, key=lambda other: int(positions[other].max()))
    logits = _send_to(readers, last if rank == owner else last[:0], {owner: 1}, exchange)[owner][0]
    cache = _gathered(collected.of_layer, positions, len(ids), wanting, language_model, exchange)
    return logits, cache if to in ("all", rank) else None


def _gathered(
    collected: dict[int, tuple[torch.Tensor, torch.Tensor]],
    positions: Mapping[int, np.ndarray],
    length: int,
    wanting: Collection[int],
    language_model: Any,
    exchange: Exchange | None,
) -> DynamicCache:
    """The cache of a document, in its order, on the ranks that want it; elsewhere an empty one.

    Args:
        collected: layer -> this shard's keys and values, [T, Hkv, D] each, D not always the same. Emptied layer by layer.
        positions: rank -> position of each of its tokens.
        length: tokens of the document.
    """
    rank = exchange.rank if exchange is not None else 0
    cache = DynamicCache(config=language_model.config)
    for index in sorted(collected):
        layer: Any = cache.layers[index]
        first = max(0, length - layer.sliding_window + 1) if layer.is_sliding else 0  # the next token sees itself too
        kept = {other: at[at >= first] - first for other, at in positions.items()}
        keys, values = collected.pop(index)
        # End to end, as their heads may be of two dimensions.
        own = torch.cat([keys, values], -1)[torch.from_numpy(positions[rank] >= first)]
        parts = _send_to(wanting, own, {other: len(at) for other, at in kept.items()}, exchange)
        if rank not in wanting:
            continue
        whole = own.new_empty(length - first, *own.shape[1:])
        for other, part in parts.items():
            whole[torch.from_numpy(kept[other]).to(whole.device)] = part
        layer.update(*whole.transpose(0, 1).unsqueeze(0).split([keys.shape[-1], values.shape[-1]], -1))
        if layer.is_sliding:
            layer.cumulative_length = length
    return cache


def _send_to(
    receivers: Collection[int],
    own: torch.Tensor,
    rows: Mapping[int, int],
    exchange: Exchange | None,
) -> dict[int, torch.Tensor]:
    """Rank -> its rows, on the receivers; other ranks end with their own only. Where all ranks receive, in one collective:
    messages would connect each with every other.

    Args:
        own: [rows of this rank, ...]
        rows: rank -> its number of rows; every rank knows all of them.
    """
    rank = exchange.rank if exchange is not None else 0
    own = own.contiguous()
    parts = {rank: own}
    if exchange is not None and len(receivers) == exchange.world_size > 1:
        return _collected(own, rows, exchange)
    if rank in receivers:
        parts |= {other: own.new_empty(n, *own.shape[1:]) for other, n in rows.items() if n and other != rank}
    if exchange is not None:
        exchange.start(
            [(own, other) for other in receivers if len(own) and other != rank],
            [(part, other) for other, part in parts.items() if other != rank],
        ).wait()
    return parts


def _collected(own: torch.Tensor, rows: Mapping[int, int], exchange: Exchange) -> dict[int, torch.Tensor]:
    """Rank -> its rows, on all ranks; `own` and `rows` as in `_send_to`."""
    holders = [rank for rank, n in rows.items() if n]
    most = max(rows.values(), default=0)
    padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    if len(holders) == 1:
        exchange.broadcast(padded, holders[0])
        return {exchange.rank: own, holders[0]: padded}
    parts = exchange.all_gather(padded) if holders else []
    return {exchange.rank: own} | {rank: parts[rank][: rows[rank]] for rank in holders}


def _language_model(model: Any) -> Any:
    """The patched language model itself, also inside a PEFT wrapper."""
    language_model = language_model_of(model)
    if not isinstance(language_model, PreTrainedModel) or not is_patched(language_model):
        raise ValueError(
            f"{type(model).__name__} cannot run over a layout. Valid: a transformers model after "
            "hf_longctx.patch_model(model), or one from hf_longctx.from_pretrained; of a wrapper (DDP) pass the model inside"
        )
    return language_model


def _token_ids(document: torch.Tensor | Sequence[int], name: str, language_model: Any) -> torch.Tensor:
    """int64 [length], on the CPU."""
    if isinstance(document, str):
        raise ValueError(f"{name} is a text, {document[:30]!r}: pass its token ids, tokenizer(text).input_ids")
    ids = torch.as_tensor(document, device="cpu")
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}: token ids are integers [length], at least one; of a "
            "tokenizer's batch pass input_ids[i], without its padding"
        )
    ids = ids.long()  # torch has no smallest of uint16
    tokens = language_model.get_input_embeddings().num_embeddings
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest >= tokens:
        raise ValueError(f"{name} holds token ids {smallest} to {largest}; the model knows 0 to {tokens - 1}")
    refuse_beyond_positions(language_model, len(ids), name)
    return ids


def _degree(ulysses: int, world_size: int) -> int:
    if ulysses < 1:
        raise ValueError(f"ulysses={ulysses}: heads are split over at least 1 rank, which leaves them whole")
    return math.gcd(ulysses, world_size)


def _topology(
    language_model: Any, world_size: int, capacity: int | None, lengths: Sequence[int], ulysses: int
) -> Topology:
    """Return the ranks that documents of these lengths are planned for; a capacity of None holds them all. Raises ValueError
    where a setting is out of range."""
    degree = _degree(ulysses, world_size)
    if capacity is not None and type(capacity) is not int:
        raise ValueError(f"capacity={capacity!r} must be an integer: the most tokens of a micro-batch on one rank")
    capacity = max(1, sum(lengths)) if capacity is None else capacity
    return Topology(world_size, capacity, ulysses_degree=degree, documents=documents_of(language_model))


def planned(language_model: Any, lengths: Sequence[int], topology: Topology, exchange: Exchange | None) -> StepPlan:
    """Plan documents of these lengths as one step, the same on every rank. Collective: the first rank says what device it has.

    Raises ValueError, on every rank, where a document is too long for all of them together.
    """
    preset = torch.tensor([KNOWN_DEVICES.index(preset_name(language_model.device))])
    if exchange is not None and exchange.world_size > 1:
        preset = preset.to(exchange.device)
        exchange.broadcast(preset, 0)
    name = KNOWN_DEVICES[int(preset)]
    speed = preset_speed(CPU_DEVICES.get(name), name, half=language_model.dtype.itemsize == 2)
    try:
        cost = counted_cost(language_model, speed, topology)
    except ValueError:  # only balance depends on it
        cost = guessed_cost(language_model, speed, topology)
    return plan_step(np.array(lengths), topology, cost)


@contextmanager
def _agreement(
    name: str, settings: tuple[Any, ...], exchange: Exchange | None
) -> Iterator[Callable[[Any, Sequence[torch.Tensor]], None]]:
    """Have ranks agree: in the context a rank checks its arguments, and states them by `agree(language model, token ids of each
    document)`.

    Then all ranks compare, also those whose check raised: nobody waits for a rank that has left. Raises ValueError on
    every rank if they differ; on a rank whose check raised, that error.
    """
    if exchange is None and not dist.is_initialized() and (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        warnings.warn(
            f"WORLD_SIZE says {processes} processes, and no process group was begun: {name} does all the work on this one, as on "
            "each other. To share it: accelerate's PartialState(), on CPUs PartialState(cpu=True), and exchange=Exchange()",
            stacklevel=4,
        )
    stated = hashlib.blake2b(repr((name, settings)).encode(), digest_size=8)
    counts: list[int] = []

    def agree(language_model: Any, ids: Sequence[torch.Tensor]) -> None:
        counts.extend(map(len, ids))
        stated.update(repr((language_model.dtype, counts)).encode())
        for document in ids:
            stated.update(document.numpy().tobytes())

    problem: Exception | None = None
    try:
        yield agree
    except Exception as error:
        problem = error
        stated.update(repr(error).encode())
    if exchange is not None:
        own = torch.tensor([int.from_bytes(stated.digest(), "little", signed=True)], device=exchange.device)
        digests = [int(part) for part in exchange.all_gather(own)] if exchange.world_size > 1 else [int(own)]
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others and problem is None:
            raise ValueError(
                f"ranks {others} passed other arguments to {name} than rank 0, or refused theirs; on rank {exchange.rank}: "
                f"{len(counts)} documents of {sum(counts)} tokens, settings {settings}. Every rank must pass the same "
                "documents in the same order, a model of the same dtype, and the same settings"
            )
    if problem is not None:
        raise problem


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; then every module is again in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def hidden_states(
    language_model: Any, tokens: torch.Tensor, layout: Layout, exchange: Exchange | None, **keywords: Any
) -> torch.Tensor:
    """[T, H], what the output head reads. tokens: [T], this rank's shard; keywords reach the attention layers."""
    input_ids = tokens.to(language_model.device)[None]
    return base_outputs(language_model, input_ids, layout, exchange, **keywords).last_hidden_state[0]


def _shifted(ids: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[tokens of the segment]: the token after each; IGNORE after the document's last."""
    following = ids[segment.start + 1 : segment.stop + 1]
    return torch.nn.functional.pad(following, (0, len(segment) - len(following)), value=IGNORE)


def _log_probabilities(
    language_model: Any, hidden: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """log p(label), one for each row of hidden [T, H] whose label is not IGNORE, in order; a few rows at a time."""
    log_probabilities = []
    for rows in (labels != IGNORE).nonzero().squeeze(1).split(language_model.longctx_loss_chunk_tokens):
        logits = logits_of(language_model, hidden[None, rows])[0].to(dtype)
        log_probabilities.append(logits.gather(1, labels[rows, None]).squeeze(1) - logits.logsumexp(1))
    return torch.cat(log_probabilities)
