"""`hf-longctx report`: the page and the model card of a trained run, made again from what it left in its output directory.

After `hf-longctx evaluate --output` into the same directory they have its results too.
"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(help="A run's output_dir.", show_default=False)],
    card: Annotated[bool, typer.Option(help="Write README.md, the model card, too.")] = True,
) -> None:
    """Write report.html and the model card of a trained run again.

    Example: hf-longctx report runs/quickstart
    """
    from hf_longctx.report.training_runs.model_card import CARD, write_model_card
    from hf_longctx.report.training_runs.run_page import write_run_page

    print(f"page  {write_run_page(directory)}")
    if card:
        written = write_model_card(directory)
        print(f"card  {written}" if written else f"card  {directory / CARD} is somebody's own: left as it is")
