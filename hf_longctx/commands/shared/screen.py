"""Standard output, on which verbs show tables and say what they found."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 160
"""The widest table has fewer."""


def screen() -> Console:
    """A console that never cuts a number: where a terminal is narrower than a table, lines go on below, as long sentences do.

    Text is shown as it is, for names of files have brackets and colons in them: a Text or a style makes it bold or coloured.
    """
    from rich.console import Console

    width = max(COLUMNS, Console().width)
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)
