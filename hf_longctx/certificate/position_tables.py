"""The longest document that a model has positions for, found by running its tiny copy.

A table of positions (learned, or sines kept in a buffer) ends, and a longer document fails in the middle of a step: with an
IndexError on CPU, on a GPU with an assertion that ends the process. Rotary embeddings and ALiBi have no end, whatever a field
such as max_position_embeddings says. So fields are not believed; the copy is run over one document:

    1. longer than every field that could be the size of a table. It runs: there is no table.
    2. else of any length, by bisection: the longest that runs.
    3. the same of copies in which one field is smaller. Where that makes documents shorter, the field is the size of a table:

       copy                       longest document
       n_positions 128, n_ctx 128      128
       n_positions  96, n_ctx 128       96    n_positions it is, and all of its rows
       n_positions 128, n_ctx  96      128    not n_ctx

The model's longest document is then its own n_positions. Some tables begin with rows of another use: in RoBERTa's it would be
max_position_embeddings - 2. With several tables, the shortest decides. An end that no field sets says nothing of the model.

Where documents are split, the second rank gets their last tokens alone: a table that grows with the rows of a call does not grow
there. Not noticed would be tables that are read at a position modulo their size, or at their last row for all that follows. Of
the model types of transformers 5.23 that are certified, none is so: where there is no end, logits of tokens beyond all sizes are
the same with sizes four times as large.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.replicas import replicate
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.certificate.drawn_documents import tokens_of
from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of
from hf_longctx.certificate.tiny_config import TOKENS, path_of_text
from hf_longctx.certificate.tiny_sizes import POSITIONS
from hf_longctx.certificate.tokens import ordinary_tokens
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.traits import Positions, Traits

KINDS = (Kind.POSITIONS, Kind.ORIGINAL_POSITIONS, Kind.BLOCK, None)
"""Kinds of fields that can be the size of a table; None: the name says nothing."""
LARGEST = 1024
"""Fields that a copy needs to be larger are taken for no size of a table."""
MOST_OTHER_ROWS, USUAL_OTHER_ROWS = 8, (0, 2)
"""Most rows of a table that are no positions of a document, and how many are tried first."""
SHORTEST = 8
"""Tokens of the shortest document that is run."""
ON_SECOND_RANK = 4
"""Last tokens of a split document, which lie on a rank of their own."""

Runs = Callable[[int], bool]
"""Tells whether a model runs over a document of so many tokens."""
MakeCopy = Callable[[Any], Any]
"""Returns a patched model of a tiny configuration."""


def longest_document(config: Any, tiny: Any, traits: Traits, make: MakeCopy) -> Positions | None:
    """Return the longest document that a model has positions for, and which field says so; None: any, or none is known.

    Args:
        config: the model's configuration.
        tiny: that of its copy, which is exact with these traits.
        make: builds the copy.
    """
    small = _with(tiny, {name: min(size, POSITIONS) for name, size in _sizes(tiny).items()})
    for copied in (small, tiny):
        sizes = {name: size for name, size in _sizes(copied).items() if TOKENS <= size <= LARGEST}
        if not sizes:
            return None
        most = max(sizes.values()) + MOST_OTHER_ROWS + 1
        runs = _runs_of(copied, traits, make, most)
        if runs is not None and runs(most):
            return None
        if runs is not None and runs(SHORTEST):
            break
    else:
        return None
    longest = _longest(runs, most, [size - rows for size in sizes.values() for rows in USUAL_OTHER_ROWS])
    tables = _tables(_fields(config), copied, sizes, longest, lambda other: _runs_of(other, traits, make, most))
    return min(tables, key=lambda table: table.tokens, default=None)


def _tables(
    fields: Mapping[str, Any],
    tiny: Any,
    sizes: Mapping[str, int],
    longest: int,
    runs_of: Callable[[Any], Runs | None],
) -> Iterator[Positions]:
    """Yield what each table of a model holds, by its own field."""
    smaller = longest * 3 // 4
    for name, size in sizes.items():
        if size <= smaller or not is_size(fields.get(name)):
            continue
        runs = runs_of(_with(tiny, {name: smaller}))
        if runs is None or runs(longest):
            continue
        other_rows = smaller - _longest(runs, longest, [smaller + longest - size])
        if abs(other_rows) <= MOST_OTHER_ROWS:
            yield Positions(fields[name] - other_rows, name, fields[name])


def _longest(runs: Runs, fails: int, guesses: Iterable[int]) -> int:
    """Return the tokens of the longest document that runs, one of `fails` tokens does not; what is guessed is tried first."""
    shortest = SHORTEST
    for guess in guesses:
        if shortest < guess < fails:
            if not runs(guess):
                fails = guess
            elif runs(guess + 1):
                shortest = guess + 1
            else:
                return guess
    while fails - shortest > 1:
        length = (shortest + fails) // 2
        shortest, fails = (length, fails) if runs(length) else (shortest, length)
    return shortest


def _runs_of(tiny: Any, traits: Traits, make: MakeCopy, most: int) -> Runs | None:
    """Return what tells whether a copy runs over a document of up to `most` tokens; None: its class refuses a size."""
    try:
        model = make(tiny).train()  # xLSTM's chunks of inference are no table
        document = ordinary_tokens(tiny, most)
    except Exception:  # of whatever class
        return None
    return lambda length: _runs(model, document[:length], traits)


def _runs(model: Any, document: torch.Tensor, traits: Traits) -> bool:
    """Run a patched model over one document, and tell whether that ended without an error."""
    length = len(document)
    layout = Layout({0: (Segment(0, 0, length),)})
    if traits.splits_documents:
        cut = length - ON_SECOND_RANK
        layout = Layout({0: (Segment(0, 0, cut),), 1: (Segment(0, cut, length),)})
    ranks = len(layout.ranks)
    replicas = replicate(model, ranks)

    def run(exchange: Exchange) -> None:
        ids = tokens_of((document,), layout.shard(exchange.rank))[None]
        with torch.no_grad():
            replicas[exchange.rank](input_ids=ids, layout=layout, exchange=exchange if ranks > 1 else None)

    try:
        run_on_virtual_ranks(ranks, run)
    except Exception:  # whatever modeling code says of a position that it lacks
        return False
    return True


def _sizes(config: Any) -> dict[str, int]:
    """Return the fields of a configuration's text model that can be the size of a table, in its order."""
    return {name: size for name, size in _fields(config).items() if is_size(size) and kind_of(name) in KINDS}


def _fields(config: Any) -> dict[str, Any]:
    return dict(_text(config).to_dict())


def _text(config: Any) -> Any:
    """Return the part of a configuration that describes its text model."""
    for name in path_of_text(config):
        config = getattr(config, str(name))
    return config


def _with(config: Any, sizes: Mapping[str, int]) -> Any:
    """Return a copy of a configuration with other sizes in its text model."""
    copied = copy.deepcopy(config)
    for name, size in sizes.items():
        setattr(_text(copied), name, size)
    return copied
