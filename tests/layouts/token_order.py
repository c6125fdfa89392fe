"""Tokens of a rank's shard, as (document, position): in memory order, and as its schedule sorts them."""

from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout

Token = tuple[int, int]


def memory_tokens(layout: Layout, rank: int) -> list[Token]:
    return [(s.doc, position) for s in layout.shards[rank] for position in range(s.start, s.stop)]


def sorted_tokens(layout: Layout, rank: int) -> list[Token]:
    """The tokens of the rank's sorted rows, by its schedule."""
    tokens, order = memory_tokens(layout, rank), schedule(layout, rank).order
    return tokens if order is None else [tokens[row] for row in order]
