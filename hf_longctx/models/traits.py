"""Needs of a model's class and configuration over layouts, besides masks that carry them. Found by running a tiny copy
(hf_longctx/certificate)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_longctx.planner.topology import Documents


@dataclass(frozen=True)
class Positions:
    """The longest document that a model has positions for: those of a table, whose size is a field of its configuration."""

    tokens: int
    field: str
    """Its name, such as max_position_embeddings."""
    size: int
    """Its value; not all rows of a table need be positions of a document."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.field}={self.size})"


@dataclass(frozen=True)
class Traits:
    """Holds what is particular to one class and configuration."""

    document_wise: tuple[str, ...] = ()
    """Classes of modules that run document by document, as `class_name` has them: they carry a state from row to row, count rows,
    or have attention code of their own."""
    in_masks: bool = True
    """Whether masks carry the layout to attention layers; otherwise these keep the masks and the attention that they have, and
    run document by document."""
    alone: bool = False
    """Whether a micro-batch is one whole document, which the plain model runs: its own masks, positions and attention."""
    first_position: int = 0
    """Position of a document's first token where the model is given none."""
    all_attend: bool = True
    """False while it is asked which modules carry a state: then there need be no attention layer."""
    takes_positions: bool = True
    """Whether the base model takes position_ids."""
    positions: Positions | None = None
    """The longest document that there are positions for; None: any, or it is not known."""

    @property
    def documents(self) -> Documents:
        """Return how documents may lie on ranks: over several, whole on one, or whole and alone in a micro-batch."""
        return "alone" if self.alone else "whole" if self.document_wise else "split"

    @property
    def splits_documents(self) -> bool:
        """Tell whether documents may be spread over ranks."""
        return self.documents == "split"

    def modules_by_document(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield the modules of a model that run document by document."""
        for module in model.modules():
            if class_name(module) in self.document_wise:
                yield module


ALONE = Traits(alone=True, in_masks=False, takes_positions=False)
"""A model that runs as it is, on one whole document in a micro-batch."""


def class_name(module: torch.nn.Module) -> str:
    """File and name of a module's class, alike for a model and its tiny copy."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
