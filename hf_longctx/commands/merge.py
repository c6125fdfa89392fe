"""`hf-longctx merge`: an adapter and the weights it stands on -> a plain checkpoint.

The merged model is as fast as the base, needs no PEFT, and gives the adapter's logits up to the rounding of its dtype
(commands/checkpoints/merging.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def merge(
    adapter: Annotated[
        Path, typer.Argument(help="Directory with an adapter of PEFT, as training leaves it.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write; empty or not there yet.", show_default=False)],
    base: Annotated[
        str | None,
        typer.Option(help="Merge into these weights: a directory, a hub id. By default what the adapter says."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Write weights in this dtype; auto: the base's."),
    ] = "auto",
) -> None:
    """Merge an adapter into its base, as a plain checkpoint.

    Example: hf-longctx merge runs/lora runs/lora-merged
    """
    from hf_longctx.commands.checkpoints.merging import merge_adapter

    merge_adapter(adapter, output, base=base, dtype=dtype)
