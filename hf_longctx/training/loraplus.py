"""LoRA+ (arXiv 2402.12354): adapters whose B learns at a multiple of A's learning rate, by PEFT's groups of weights.

Groups alone: they are the same in every sharding and on any number of ranks, and nothing is sent.
"""

from typing import Any

import torch
from peft.optimizers import create_loraplus_optimizer


def loraplus_optimizer(trainer: Any, model: Any) -> torch.optim.Optimizer:
    """Make the optimizer that a trainer's arguments name, over PEFT's groups: A at the learning rate; B, biases and magnitudes at
    `loraplus_lr_ratio` times it; adapters of embeddings at `loraplus_lr_embedding`. Weight decay is Trainer's."""
    args, plugin = trainer.args, trainer.plugin
    kind, settings = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, model)
    return create_loraplus_optimizer(
        model,
        kind,
        lr=settings["lr"],
        loraplus_lr_ratio=plugin.loraplus_lr_ratio,
        loraplus_lr_embedding=plugin.loraplus_lr_embedding,
        loraplus_weight_decay=args.weight_decay,
        **{name: value for name, value in settings.items() if name != "lr"},
    )
