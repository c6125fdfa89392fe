"""Finds the answers that greedy decoding would write, without decoding.

Greedy decoding of a prompt writes a, b, c if and only if a is the likeliest token after the prompt, b after the prompt and a,
and c after the prompt, a and b. All three are seen in one forward over prompt a b c, in which every answer token must be the
argmax given the tokens before it: exact (up to the rounding in which forwards of different shapes differ), and as cheap as
the prompt alone. Logits are computed for the answers' rows only.

Prompts are planned in batches as `score` plans documents, so that short ones are not cut, nor any that the model needs whole.
Sent between ranks, beside what attention sends: one number for each prompt, to every rank; and eight bytes a batch from the
first rank, which decide by what device it is planned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.inference.evaluation.batches import batches_of
from hf_longctx.inference.score import evaluating, hidden_states, planned
from hf_longctx.models.attention import is_patched
from hf_longctx.models.documents import documents_of, refuse_beyond_positions
from hf_longctx.models.loss.own_logits import logits_of
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.planner.topology import Topology


def greedy_answers(
    model: Any,
    prompts: Sequence[np.ndarray],
    answers: Sequence[np.ndarray],
    *,
    exchange: Exchange | None = None,
    capacity: int | None = None,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """bool [prompts], the same on every rank: whether greedy decoding writes the answer. See the module's docstring.

    Args:
        model: patched by `patch_model`.
        prompts: int64 [T] each, at least one token.
        answers: int64 [A] each, at least one token.
        exchange: the ranks that share the work; None: this process does it all.
        capacity: most tokens of a micro-batch on one rank; None: 8192, or what the longest prompt needs.
        on_progress: called with the tokens that have been read since the last call.

    Raises:
        ValueError: the model is not patched, a prompt or an answer is empty, or one does not fit, or is longer than the model has
            positions for.
    """
    language_model = language_model_of(model)
    if not is_patched(language_model):
        raise ValueError(
            f"{type(language_model).__name__} cannot run over a layout: pass it through hf_longctx.patch_model"
        )
    if not all(len(prompt) and len(answer) for prompt, answer in zip(prompts, answers, strict=True)):
        raise ValueError("a prompt or an answer is empty: each needs at least one token")
    rank, world_size = (exchange.rank, exchange.world_size) if exchange is not None else (0, 1)
    ids = [np.concatenate(pair) for pair in zip(prompts, answers)]
    first_row = np.array([len(prompt) - 1 for prompt in prompts])
    lengths = [len(sequence) - 1 for sequence in ids]  # nothing is asked after the last token
    if lengths:
        longest = int(np.argmax(lengths))
        refuse_beyond_positions(language_model, lengths[longest], f"prompt {longest} with its answer")
    kind = documents_of(language_model)
    capacity, batches = batches_of(lengths, world_size, capacity, kind)
    topology = Topology(world_size, capacity, documents=kind)
    wrong = torch.zeros(len(ids), dtype=torch.int64)
    with evaluating(model):
        for batch in batches:
            plan = planned(language_model, [lengths[number] for number in batch], topology, exchange)
            for _, layout in plan.layouts(rank):
                shard = [(ids[batch[s.doc]], s.start, s.stop) for s in layout.shard(rank)]
                input_ids = torch.from_numpy(np.concatenate([document[start:stop] for document, start, stop in shard]))
                following = np.concatenate([document[start + 1 : stop + 1] for document, start, stop in shard])
                hidden = hidden_states(language_model, input_ids, layout, exchange)
                documents = np.array(batch)[layout.documents(rank)]
                rows = np.flatnonzero(layout.positions(rank) >= first_row[documents])
                if len(rows):
                    logits = logits_of(language_model, hidden[None, torch.from_numpy(rows).to(hidden.device)])
                    missed = logits[0].argmax(-1).cpu().numpy() != following[rows]
                    wrong += torch.from_numpy(np.bincount(documents[rows], missed, len(ids)).astype(np.int64))
            on_progress(sum(lengths[number] for number in batch))
    return (_sum_of_all(wrong, exchange) == 0).numpy()


def _sum_of_all(own: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
    """[n], on the CPU: what all ranks have, added up."""
    if exchange is None or not len(own):
        return own
    own = own.to(exchange.device)
    others = [rank for rank in range(exchange.world_size) if rank != exchange.rank]
    parts = [torch.empty_like(own) for _ in others]
    exchange.start([(own, rank) for rank in others], list(zip(parts, others))).wait()
    return torch.stack([own, *parts]).sum(0).cpu()
