"""Keys and values of a document's earlier chunks, kept by each rank until the chunk's own backward.

Chunks run forward in order and backward in reverse. Chunk c attends to its own keys and values and to those kept of the
chunks before it; what its backward finds for these is added up, and joins the gradient of the chunk that they came from
when that one runs backward:

    forward    k0, v0 -> attention of 0      keep k0, v0
               k1, v1 -> attention of 1 over 0, 1
    backward   of 1: gradients of k1, v1 go on into layer 1 of chunk 1; those of k0, v0 are kept
               of 0: its own gradients of k0, v0, and what was kept

A layer that activation checkpointing recomputes finds what was kept. Nothing is sent between ranks here. Shapes: T tokens
of this rank in a chunk, C in all chunks before it, Hkv key/value heads, D head dimension.
"""

import functools

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class EarlierChunks:
    """Keys and values of a document's chunks so far, on one rank, in all layers of one stage.

    No dataclass: FSDP2 copies those among a layer's arguments.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Pair] = {}
        """(layer, tokens before the chunk on this rank) -> its keys and values, leaves of autograd"""
        self._found: dict[tuple[int, int, int], torch.Tensor] = {}
        """(those, 0 for keys and 1 for values) -> the sum of what later chunks found for them, in float32 or float64"""

    def extend(self, layer: int, before: int, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """k and v [T, Hkv, D] of a chunk -> [T + C, Hkv, D] with those of the chunks before it; keeps them for the next.

        Args:
            layer: number of the layer.
            before: C.

        Raises:
            RuntimeError: chunks did not run in order, each once.
        """
        learns = k.requires_grad or v.requires_grad  # an adapter may be on one of them alone
        if (layer, before) not in self._kept:
            self._kept[layer, before] = (_alone(k).requires_grad_(learns), _alone(v).requires_grad_(learns))
            for place, leaf in enumerate(self._kept[layer, before] if learns else ()):
                leaf.register_post_accumulate_grad_hook(functools.partial(self._add, (layer, before, place)))
        if learns and not self._kept[layer, before][0].requires_grad:
            raise RuntimeError(
                f"layer {layer} ran without gradients first, so what later chunks find for its keys would be lost. Valid: "
                "activation checkpointing with use_reentrant=False"
            )
        earlier = self._before(layer, before)
        if learns:
            k, v = _Joined.apply(k, v, self, (layer, before))
        return _joined([(k, v), *earlier])

    def again(self, layer: int, before: int) -> Pair:
        """Return once more what `extend` returned for a chunk, until its backward has run. Attention that kept it would keep the
        keys of all chunks before it once for each chunk."""
        pieces = [self._kept[layer, before], *self._before(layer, before)]
        return _joined([(k.detach(), v.detach()) for k, v in pieces])

    def _before(self, layer: int, before: int) -> list[Pair]:
        """Keys and values of the chunks before the one that `before` tokens precede, first chunk first. Raises RuntimeError if
        one has not run."""
        at, earlier = 0, list[Pair]()
        while at < before:
            if (layer, at) not in self._kept:
                raise RuntimeError(
                    f"layer {layer}: the chunk after token {at} has not run, and the one after {before} needs it"
                )
            earlier.append(self._kept[layer, at])
            at += len(earlier[-1][0])
        return earlier

    def _add(self, key: tuple[int, int, int], leaf: torch.Tensor) -> None:
        """Take the gradient of a leaf: in bfloat16, a sum over many chunks would lose what is small."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "it was accumulated"
        if key in self._found:
            self._found[key] += gradient
        else:
            self._found[key] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def take(self, key: tuple[int, int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what later chunks found for keys and values, which are then no longer kept."""
        del self._kept[key]
        return self._found.pop((*key, 0), None), self._found.pop((*key, 1), None)


def _joined(pairs: list[Pair]) -> Pair:
    keys, values = zip(*pairs)
    return torch.cat(keys), torch.cat(values)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """x without its graph, and without what else lies in its memory, such as queries of the same product."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


class _Joined(torch.autograd.Function):
    """k, v -> k, v; backward adds what later chunks found."""

    @staticmethod
    def forward(ctx, k, v, chunks: EarlierChunks, key: tuple[int, int]):
        ctx.of = chunks, key
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, *gradients):
        chunks, key = ctx.of
        later = chunks.take(key)
        return *(own if more is None else (own + more).to(own.dtype) for own, more in zip(gradients, later)), None, None
