"""Layouts of packed, split and permuted documents over one to four ranks."""

from hf_longctx.layouts.layout import Layout, Segment

PACKED = {
    1: Layout({0: [Segment(0, 20, 37), Segment(1, 0, 9), Segment(0, 0, 20)]}),
    2: Layout(
        {0: [Segment(0, 30, 41), Segment(1, 0, 9), Segment(0, 0, 12)], 1: [Segment(2, 0, 5), Segment(0, 12, 30)]}
    ),
    3: Layout(
        {
            0: [Segment(1, 0, 6), Segment(0, 0, 9)],
            1: [Segment(0, 25, 40), Segment(2, 0, 1)],
            2: [Segment(0, 9, 25), Segment(1, 6, 11)],
        }
    ),
    4: Layout(
        {
            0: [Segment(0, 0, 5), Segment(0, 40, 48), Segment(1, 0, 13)],
            1: [Segment(0, 33, 40), Segment(0, 5, 12), Segment(2, 0, 3)],
            2: [Segment(2, 3, 21), Segment(0, 12, 20)],
            3: [Segment(0, 20, 33), Segment(3, 0, 7)],
        }
    ),
}
"""Ranks -> packed, split and permuted documents over as many."""
WHOLE = Layout({0: [Segment(1, 0, 9), Segment(2, 0, 5)], 1: [Segment(0, 0, 41)]})
"""The documents of two ranks, for layers with a state."""
