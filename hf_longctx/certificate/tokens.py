"""Token ids without a meaning of their own, for the documents of a certificate."""

from __future__ import annotations

from typing import Any

import torch

from hf_longctx.certificate.tiny_sizes import token_ids


def ordinary_tokens(config: Any, count: int, seed: int = 0) -> torch.Tensor:
    """Returns `count` random token ids [count] (int64) that no field of `config` names: no padding, no place for an image.

    Padding moves positions in some models, and multimodal ones count the places of images. Raises ValueError if every id is
    named.
    """
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    named = {i for _, ids in token_ids(config.to_dict(), ()) for i in ids} | {0}
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in named])
    if not len(ordinary):
        raise ValueError(f"all {vocabulary} token ids have a meaning in {type(config).__name__}")
    generator = torch.Generator().manual_seed(seed)
    return ordinary[torch.randint(len(ordinary), (count,), generator=generator)]
