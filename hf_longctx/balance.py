"""Balance: documents of any lengths shared by a group of ranks, so that all ranks finish attention together.

Work is area: for each of its query tokens a rank computes position + 1 pairs of query and key. A document that stays
whole costs no communication. If several ranks hold a document, each needs the keys before its last query, so they
receive, in tokens of the document,

    sum over its ranks of (end of the rank's last segment)  -  length

For given areas the least that any cut can reach is contiguous pieces, the smallest first. Zigzag pieces (a chunk from
the front, one from the back, going inwards) move at most 1/8 more, and hold tokens in proportion to their areas, which
linear layers and memory ask for. So a document is cut in zigzag, except for a remainder, a piece much smaller than the
others: that one is contiguous at the front, where it costs sqrt(share) of the document and not half of it.

    A is 2.2 times a rank's share of the work:    rank 0  | A A A A A A A A A A A |    A[0:q) is on rank 2, the rest of A
                                                  rank 1  | A A A A A A A A A A A |    in zigzag on ranks 0 and 1
                                                  rank 2  | A A | C C C C | D D D |
                                                  rank 3  | B B B B B B | E E | F |

Documents are placed longest first: whole, where area and tokens stay lowest, if one fits somewhere within the
tolerance; otherwise cut over the fewest ranks that have room. Such a cut fills all of its ranks but one, so there are
fewer cuts than ranks. Before that, if all documents could stay whole, a short search finds out how, and exchanges between
ranks even areas and tokens out. After that, if
capacity stands in the way, long documents are spread wider, step by step, which evens out tokens and costs bytes.

With Ulysses, cuts go between its groups; inside a group, heads divide the area of a cut document, and its tokens go to
the ranks that hold the fewest.

Measured on 216 random packs (lognormal, Pareto, uniform lengths; 1.5 to 16 documents a rank; 2 to 64 ranks): no area is
over 1.05 of the mean, whatever the capacity. Bytes are 0.24 of those of zigzag over all ranks, 1.14 of a lower bound
(contiguous pieces of the documents that no rank can hold alone). Tokens cost bytes:

    capacity / mean tokens of a rank         none   1.5    1.2    1.0
    most tokens / mean tokens (average)      1.67   1.19   1.09   1.00
    bytes / those of zigzag over all ranks   0.24   0.28   0.31   0.44

Nothing is sent here, and nothing here needs torch. Equal arguments give equal layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hf_longctx.layout import Layout, LayoutError, Segment

SPREADS = (1.0, 0.6, 0.36, 0.22, 0.13, 0.08, 0.05, 0.03)
"""Largest share of a rank's work that a piece may be, tried until capacity is kept. 1,000 documents on 64 ranks take 8 to
14 ms a try."""
REMAINDER = 0.6
"""A piece below this share of the largest is contiguous. Never (0) moves 5 % more bytes, at 0.8 they are 0.7 % less; the
most tokens on a rank are 1.54 times the mean at 0, 1.64 at 0.4, 1.68 at 0.6, 1.71 at 0.8."""
EXCHANGES = 100
"""Of whole documents, at most. 15 documents on 4 ranks need 2, which lower the largest area from 1.044 to 1.021 of the mean
and the most tokens from 1.078 to 1.031; 1,000 documents on 8 ranks take 45 ms."""
SEARCH = 500
"""Placements tried, beyond one for each document, in the search for a way to keep all documents whole: of random packs of
up to 64 ranks that have such a way, 98 % need none of them and nearly all others below 100."""


def balanced(
    lengths: Mapping[int, int] | Sequence[int],
    ranks: Sequence[int],
    *,
    capacity: int | None = None,
    ulysses: int = 1,
    tolerance: float = 1.05,
) -> Layout:
    """Share documents among ranks: equal areas within the tolerance, then few bytes, then equal tokens.

    Args:
        lengths: tokens of each document, by document; of a sequence, documents are 0, 1, 2, ...
        ranks: who takes part. A rank may stay empty where there are fewer than about ten tokens a rank.
        capacity: most tokens on one rank, never exceeded. The lower it is, the more even are tokens, for more bytes.
        ulysses: degree of the head split inside groups of consecutive ranks. The layout has degree 1 instead if a rank
            stays empty.
        tolerance: largest area of a rank over the mean, aimed at. Missed only if tokens are too few to divide, or if
            capacity forbids it.

    Raises:
        LayoutError: no documents or ranks, a length or capacity below 1, a rank twice, a degree that does not divide the
            ranks, a tolerance below 1, or more tokens than the ranks can hold.
    """
    of_document = dict(lengths) if isinstance(lengths, Mapping) else dict(enumerate(lengths))
    ranks = sorted(ranks)
    _validate(of_document, ranks, capacity, ulysses, tolerance)
    placement = _Group(of_document, len(ranks), capacity, ulysses).best(tolerance)
    if ulysses > 1 and not all(placement.shards):
        return balanced(of_document, ranks, capacity=capacity, tolerance=tolerance)
    return Layout({rank: tuple(sorted(shard)) for rank, shard in zip(ranks, placement.shards)}, ulysses)


def _validate(
    lengths: Mapping[int, int], ranks: Sequence[int], capacity: int | None, ulysses: int, tolerance: float
) -> None:
    if not lengths or not ranks:
        raise LayoutError(f"{len(lengths)} documents on {len(ranks)} ranks; balance needs at least one of each")
    if len(set(ranks)) < len(ranks):
        raise LayoutError(f"ranks {list(ranks)} name a rank twice; each takes part once")
    shortest = min(lengths, key=lengths.__getitem__)
    if lengths[shortest] < 1:
        raise LayoutError(f"document {shortest} has {lengths[shortest]} tokens; every document needs >= 1")
    if not tolerance >= 1:
        raise LayoutError(f"tolerance={tolerance} is the largest area over the mean area; it must be >= 1")
    if ulysses < 1 or len(ranks) % ulysses:
        valid = [degree for degree in range(1, len(ranks) + 1) if len(ranks) % degree == 0]
        raise LayoutError(f"ulysses={ulysses} must divide the {len(ranks)} ranks; valid degrees: {valid}")
    tokens = sum(lengths.values())
    if capacity is not None and tokens > len(ranks) * capacity:
        raise LayoutError(
            f"{len(lengths)} documents have {tokens} tokens; {len(ranks)} ranks x {capacity} tokens of capacity hold "
            f"{len(ranks) * capacity}. They need a capacity >= {-(-tokens // len(ranks))}"
            + (f", or >= {-(-tokens // capacity)} ranks" if capacity > 0 else "")
        )


def _area(length: int) -> float:
    """(query, key) pairs of a whole document. Exact below 2**53."""
    return length * (length + 1) / 2


class _Placement:
    """Who holds what; ranks are counted 0, 1, 2, ..."""

    def __init__(self, ranks: int) -> None:
        self.area = np.zeros(ranks)
        self.tokens = np.zeros(ranks, np.int64)
        self.shards: list[list[Segment]] = [[] for _ in range(ranks)]
        self.received = 0
        """Tokens whose keys and values come from another rank, summed over ranks."""

    @property
    def imbalance(self) -> float:
        return float(self.area.max() / self.area.mean())

    def hold(self, rank: int, segment: Segment) -> None:
        self.shards[rank].append(segment)
        self.tokens[rank] += len(segment)


class _Group:
    """Documents, longest first, and the ranks that share them."""

    def __init__(self, lengths: Mapping[int, int], ranks: int, capacity: int | None, ulysses: int) -> None:
        self._documents = sorted(
            ((length, doc) for doc, length in lengths.items()), key=lambda pair: (-pair[0], pair[1])
        )
        self._ranks, self._ulysses = ranks, ulysses
        self._mean_area = sum(map(_area, lengths.values())) / ranks
        self._mean_tokens = sum(lengths.values()) / ranks
        self._capacity = sum(lengths.values()) if capacity is None else capacity

    def best(self, tolerance: float) -> _Placement:
        """The placement with the fewest bytes among the balanced ones found; the best balanced one if there is none."""
        limit = tolerance * self._mean_area
        aim = (1 + 0.9 * (tolerance - 1)) * self._mean_area  # cuts end between two tokens, not exactly at an area
        if whole := self._evenly_whole(limit) or self._searched_whole(limit):
            return self._evened(whole, limit)
        for spread in SPREADS:
            placement = self._place(aim, spread, strict=True)
            if placement is not None and placement.imbalance <= tolerance:
                return placement
        last_resorts = [self._place(aim, spread, strict=False) for spread in SPREADS]
        return min(filter(None, last_resorts), key=lambda candidate: (candidate.imbalance, candidate.received))

    def _place(self, limit: float, spread: float, strict: bool) -> _Placement | None:
        """Longest first; whole where it fits, else cut.

        Args:
            limit: largest area of a rank.
            spread: a larger document than this share of the limit is always cut into pieces of this share.
            strict: give up (None) where the limit cannot be kept; otherwise raise it.
        """
        placement = _Placement(self._ranks)
        for length, doc in self._documents:
            while True:
                if _area(length) <= spread * limit and self._put_whole(placement, doc, length, limit):
                    break
                if self._cut(placement, doc, length, limit, spread):
                    break
                if strict:
                    return None
                limit *= 1.05
        return placement

    def _put_whole(self, placement: _Placement, doc: int, length: int, limit: float) -> bool:
        """Put a document where area and tokens, in units of their means, end lowest; False where nobody has room."""
        area, tokens = placement.area + _area(length), placement.tokens + length
        level = np.maximum(area / self._mean_area, tokens / self._mean_tokens)
        level[(area > limit) | (tokens > self._capacity)] = np.inf
        rank = int(level.argmin())
        if level[rank] == np.inf:
            return False
        placement.hold(rank, Segment(doc, 0, length))
        placement.area[rank] += _area(length)
        return True

    def _cut(self, placement: _Placement, doc: int, length: int, limit: float, spread: float) -> bool:
        """Over the fewest groups of `ulysses` ranks with room for the document; False where all have too little."""
        by_group = placement.tokens.reshape(-1, self._ulysses)
        fullest = placement.area.reshape(-1, self._ulysses).max(1)
        groups = len(by_group)
        per_area = self._ulysses * length / _area(length)
        widest = max(int(spread * limit * per_area), -(-length // groups))
        token_room = (self._capacity - by_group).sum(1)

        def room(level: float) -> np.ndarray:
            """Tokens of the document that each group takes before its fullest rank reaches an area."""
            return np.minimum(np.maximum((level - fullest) * per_area, 0).astype(np.int64), token_room).clip(max=widest)

        for level in (min(limit, (1 + 1 / groups) * self._mean_area), limit):  # the lower one leaves no rank idle
            most = room(level)
            chosen = np.lexsort((by_group.sum(1), -most))
            count = int(np.searchsorted(most[chosen].cumsum(), length)) + 1
            if count <= groups:
                break
        else:
            return False
        chosen = chosen[:count]
        shares = _shares(length, room(self._mean_area)[chosen], most[chosen])
        for group, segments in zip(chosen.tolist(), _pieces(doc, length, shares, token_room[chosen])):
            if not segments:
                continue
            first = group * self._ulysses
            area = sum(_area(segment.stop) - _area(segment.start) for segment in segments)
            placement.area[first : first + self._ulysses] += area / self._ulysses
            placement.received += segments[-1].stop
            self._deal(placement, segments, first)
        placement.received -= length
        return True

    def _deal(self, placement: _Placement, segments: Sequence[Segment], first: int) -> None:
        """Hand segments to the ranks of the group that begins at `first`: to those that hold the fewest tokens."""
        tokens = placement.tokens[first : first + self._ulysses].tolist()
        gets = _fill(tokens, sum(map(len, segments)), self._capacity)
        rank = 0
        for segment in segments:
            start = segment.start
            while start < segment.stop:
                while not gets[rank]:
                    rank += 1
                stop = min(segment.stop, start + gets[rank])
                placement.hold(first + rank, Segment(segment.doc, start, stop))
                gets[rank] -= stop - start
                start = stop

    def _evenly_whole(self, limit: float) -> _Placement | None:
        """All documents whole, longest first to where it is least; None where one does not fit."""
        placement = _Placement(self._ranks)
        fit = all(self._put_whole(placement, doc, length, limit) for length, doc in self._documents)
        return placement if fit else None

    def _evened(self, placement: _Placement, limit: float) -> _Placement:
        """The same documents, still whole, after exchanges that lower the fullest rank: one of its documents moves to another
        rank, or changes places with a document there. Full is what has most area or most tokens, in units of their means."""
        pairs = [(rank, segment) for rank, shard in enumerate(placement.shards) for segment in shard]
        owner = np.array([rank for rank, _ in pairs])
        tokens = np.array([len(segment) for _, segment in pairs])
        area = tokens * (tokens + 1) / 2
        for _ in range(EXCHANGES):
            level = np.maximum(placement.area / self._mean_area, placement.tokens / self._mean_tokens)
            fullest = int(level.argmax())
            mine, theirs = np.flatnonzero(owner == fullest), np.flatnonzero(owner != fullest)
            others = np.flatnonzero(np.arange(self._ranks) != fullest)
            # Columns: a document of another rank that comes back, or nothing that does.
            to = np.concatenate([owner[theirs], others])
            less_area = area[mine, None] - np.concatenate([area[theirs], np.zeros(len(others))])
            less_tokens = tokens[mine, None] - np.concatenate([tokens[theirs], np.zeros(len(others), np.int64)])
            after = np.maximum(
                np.maximum(placement.area[fullest] - less_area, placement.area[to] + less_area) / self._mean_area,
                np.maximum(placement.tokens[fullest] - less_tokens, placement.tokens[to] + less_tokens)
                / self._mean_tokens,
            )
            after[(placement.area[to] + less_area > limit) | (placement.tokens[to] + less_tokens > self._capacity)] = (
                np.inf
            )
            if not after.size or after.min() >= level[fullest] * (1 - 1e-9):
                break
            i, j = np.unravel_index(after.argmin(), after.shape)
            placement.area[fullest] -= less_area[i, j]
            placement.area[to[j]] += less_area[i, j]
            placement.tokens[fullest] -= less_tokens[i, j]
            placement.tokens[to[j]] += less_tokens[i, j]
            owner[mine[i]] = to[j]
            if j < len(theirs):
                owner[theirs[j]] = fullest
        placement.shards = [[] for _ in range(self._ranks)]
        for rank, (_, segment) in zip(owner.tolist(), pairs):
            placement.shards[rank].append(segment)
        return placement

    def _searched_whole(self, limit: float) -> _Placement | None:
        """All documents whole, each on the fullest rank where it fits, going back where one does not fit any more; None
        if there is no such way, or none is found soon."""
        placement = _Placement(self._ranks)
        ranks: list[int] = []
        left = [self._fitting(placement, 0, limit)]
        for _ in range(len(self._documents) + SEARCH):
            if not left:
                return None
            if left[-1]:
                rank = left[-1].pop()
                length, doc = self._documents[len(ranks)]
                placement.hold(rank, Segment(doc, 0, length))
                placement.area[rank] += _area(length)
                ranks.append(rank)
                if len(ranks) == len(self._documents):
                    return placement
                left.append(self._fitting(placement, len(ranks), limit))
            else:
                left.pop()
                if ranks:
                    rank = ranks.pop()
                    segment = placement.shards[rank].pop()
                    placement.tokens[rank] -= len(segment)
                    placement.area[rank] -= _area(len(segment))
        return None

    def _fitting(self, placement: _Placement, index: int, limit: float) -> list[int]:
        """Ranks that have room for a whole document, the fullest last; of equal ones, one."""
        length, _ = self._documents[index]
        fits = (placement.area + _area(length) <= limit) & (placement.tokens + length <= self._capacity)
        different = {(placement.area[rank], placement.tokens[rank]): rank for rank in np.flatnonzero(fits).tolist()}
        return [different[load] for load in sorted(different)]


def _fill(tokens: Sequence[int], amount: int, capacity: int) -> list[int]:
    """How to add an amount to these tokens so that the least full end as full as possible, none over the capacity. Each
    with room gets a token at least: a document whole on one rank would be outside Ulysses.

        tokens 9 2 4, amount 5:   gets 1 3 1
    """
    gets = [0] * len(tokens)
    for rank in sorted((rank for rank in range(len(tokens)) if tokens[rank] < capacity), key=tokens.__getitem__)[
        :amount
    ]:
        gets[rank] = 1
    order = sorted(range(len(tokens)), key=lambda rank: -tokens[rank] - gets[rank])
    total = sum(tokens) + amount
    for place, rank in enumerate(order):
        gets[rank] = max(gets[rank], total // (len(order) - place) - tokens[rank])
        total -= tokens[rank] + gets[rank]
    assert total == 0
    assert all(old + new <= capacity for old, new in zip(tokens, gets) if new)
    return gets


def _shares(length: int, base: np.ndarray, most: np.ndarray) -> list[int]:
    """Divide a document's tokens. Each share is filled to `base`, in order, while tokens last; if that is too little for
    them all, every share is brought equally near to `most`, which is enough.

        length 10, base 6 6, most 7 7:   6 4          length 10, base 4 4, most 6 6:   5 5
    """
    lacking = length - int(base.sum())
    if lacking <= 0:
        return np.diff(np.minimum(base.cumsum(), length), prepend=0).tolist()
    more = (most - base) * lacking // (most - base).sum()
    unfilled = np.flatnonzero(base + more < most)[: lacking - int(more.sum())]
    more[unfilled] += 1
    return (base + more).tolist()


def _pieces(doc: int, length: int, shares: Sequence[int], room: Sequence[int]) -> list[list[Segment]]:
    """Cut a document into areas in proportion to shares, which add up to its length.

    Zigzag, the largest share outermost; but shares that are small beside the largest are contiguous pieces at the front,
    the smallest first, where they have room for that. Both keep areas: with chunks of equal size taken from both ends of
    [low, high), low + high does not change, so tokens are in proportion to area.

        length 100, shares 50 50:  [0, 25) [75, 100)   [25, 75)         shares 90 10:  [32, 100)   [0, 32)
    """
    pieces: list[list[Segment]] = [[] for _ in shares]
    low, before = 0, 0
    zigzag = sorted((index for index, share in enumerate(shares) if share), key=lambda index: -shares[index])
    while shares[index := zigzag[-1]] < REMAINDER * shares[zigzag[0]]:
        stop = round((length * (before + shares[index])) ** 0.5)
        if not low < stop <= low + room[index]:
            break
        pieces[index] = [Segment(doc, low, stop)]
        low, before = stop, before + shares[index]
        zigzag.pop()
    high, tokens, rest = length, length - low, length - before
    done = taken = 0
    for index in zigzag:
        done += shares[index]
        size = round(tokens * done / rest) - taken
        taken += size
        front, back = size // 2, size - size // 2
        low, high = low + front, high - back
        chunks = [Segment(doc, low - front, low), Segment(doc, high, high + back)]
        if low == high:
            chunks = [Segment(doc, low - front, high + back)]
        pieces[index] = [chunk for chunk in chunks if len(chunk)]
    return pieces
