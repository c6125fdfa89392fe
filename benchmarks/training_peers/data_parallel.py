"""Plain Trainer: one process, or ranks that hold different documents and average gradients (DDP).

one process         one document at a time
single              DDP, one document at a time
padded              DDP, batches of documents padded to the longest of them
packed              DDP, packs by best fit decreasing, flattened: positions restart, attention stays inside documents.
                    What TRL calls packing with padding-free. Attention takes one call per document, as flash-attn's
                    varlen kernel would on a GPU
packed, dense mask  the same with what transformers does where flash-attn is missing: a mask of tokens x tokens
"""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from training_cases import Case, best_fit_decreasing
from transformers import AttentionInterface, DataCollatorWithFlattening

from training_peers import IGNORED, GivenStepsTrainer, MicroBatchRows, Prepare, Settings, Way, one_row, only, rows

RANKS = 2
DDP = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


def single(case: Case, settings: Settings, ranks: int, attention: str = "sdpa") -> Way:
    steps = [[(document,) for document in step] for step in case.steps]
    return _way(case, steps, ranks, _one_document, attention=attention)


def padded(case: Case, settings: Settings, ranks: int = RANKS, attention: str = "sdpa") -> Way:
    """Documents of a step are dealt to as few batches as hold them, the same number on each rank and as even as can be."""
    steps = []
    for step in case.steps:
        batches = -(-len(step) // (ranks * settings.padded_rows)) * ranks
        steps.append([step[batch::batches] for batch in range(batches)])
    computed = sum(len(batch) * max(case.lengths[d] for d in batch) for step in steps for batch in step)
    return _way(case, steps, ranks, _padded, computed=computed, attention=attention)


def packed(case: Case, settings: Settings, attention: str, ranks: int = RANKS) -> Way:
    steps = [
        best_fit_decreasing({document: case.lengths[document] for document in step}, settings.pack_length)
        for step in case.steps
    ]
    AttentionInterface.register("varlen_on_cpu", attend_within_documents)
    collate = partial(_flattened, flash_arguments=attention != "sdpa")
    return _way(case, steps, ranks, collate, attention=attention)


def _way(case: Case, steps: Any, ranks: int, collate: Any, **more: Any) -> Way:
    ordered, accumulation = rows(steps, ranks)
    return Way(
        partial(GivenStepsTrainer, data_collator=only),
        MicroBatchRows(case, ordered, collate),
        accumulation,
        DDP if ranks > 1 else {},
        **more,
    )


def _one_document(documents: list[list[int]]) -> dict[str, Any]:
    batch = one_row(documents)
    del batch["position_ids"]
    return batch


def _padded(documents: list[list[int]]) -> dict[str, Any]:
    ids = [torch.tensor(document) for document in documents]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def _flattened(documents: list[list[int]], flash_arguments: bool) -> dict[str, Any]:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_arguments)
    return collator([{"input_ids": document} for document in documents])


def attend_within_documents(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, D]; documents begin at kwargs["cu_seq_lens_q"]."""
    sizes = kwargs["cu_seq_lens_q"].diff().tolist()
    parts = [
        scaled_dot_product_attention(*qkv, is_causal=True, scale=kwargs["scaling"], enable_gqa=True)
        for qkv in zip(*(x.split(sizes, 2) for x in (query, key, value)))
    ]
    return torch.cat([part.transpose(1, 2) for part in parts], 1), None


WAYS: dict[str, Prepare] = {
    "one process": partial(single, ranks=1),
    "single": partial(single, ranks=RANKS),
    "padded": padded,
    "packed": partial(packed, attention="varlen_on_cpu"),
    "packed, dense mask": partial(packed, attention="sdpa"),
}
