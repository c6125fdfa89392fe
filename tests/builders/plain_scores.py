"""Scores of plain transformers, and the exchange of a rank."""

from typing import Any

import torch

from hf_longctx import Exchange
from tests.builders.plain_reference import exact_scores
from tests.worlds.rank_pool import worker_state


def exchange_of_this_rank() -> Exchange:
    if "exchange" not in worker_state:
        worker_state["exchange"] = Exchange()
    return worker_state["exchange"]


def plain_scores(model: Any, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    with exact_scores(model), torch.no_grad():
        return [
            model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            for ids in documents
        ]
