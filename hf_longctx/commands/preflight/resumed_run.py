"""The checkpoint that a dry run's run would go on from, and whether training would: its documents, batches, order and precision
are compared as training compares them. Sizes of its files are, their content is not, and no weight is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from hf_longctx.commands.preflight.run_memory import Planned
    from hf_longctx.training.run_state import RunState


def show_checkpoint(console: Console, run: Planned) -> str | None:
    """Show the folder of the checkpoint that training would go on from, and return it; None: it would begin anew.

    Raises:
        CheckpointError: there is none that was asked for, or it cannot be gone on from.
    """
    from hf_longctx.checkpoint.choice import chosen_checkpoint
    from hf_longctx.checkpoint.folder import Manifest, checkpoints

    asked, output = run.arguments.resume_from_checkpoint, Path(run.arguments.output_dir or ".")
    if not asked:
        return None
    folder = chosen_checkpoint(asked, [str(path) for path in checkpoints(output)], output, None)
    if folder is None:
        console.print(f"resume    would begin anew: {output} holds no checkpoint", soft_wrap=True, markup=False)
        return None
    manifest = Manifest.read(Path(folder))
    ranks = f"{manifest.world_size:,} rank{'' if manifest.world_size == 1 else 's'}"
    console.print(
        f"resume    would go on from {Path(folder).name}, saved on {ranks} ({folder})", soft_wrap=True, markup=False
    )
    return folder


def refuse_other_run(
    folder: str,
    run: Planned,
    state: RunState,
    *,
    documents_known: bool,
    precision_chosen: bool,
    frozen_known: bool,
) -> None:
    """Let the state of a run be that of its checkpoint, of which what is not known here is taken over.

    Args:
        documents_known: they were read, not drawn.
        precision_chosen: `bf16` is no `auto`, which keeps the checkpoint's.
        frozen_known: the weights under adapters are loaded as they are.

    Raises:
        ValueError: training would refuse to go on from there.
    """
    from hf_longctx.training.run_data import restore_from
    from hf_longctx.training.run_state import HALF, recorded

    of_documents = ("data_fingerprint", "documents", "weights")
    for known, names in ((documents_known, of_documents), (precision_chosen, HALF), (frozen_known, ("frozen",))):
        for name in () if known else names:
            setattr(state, name, recorded(Path(folder), name))
    restore_from(folder, state, run.plugin, run.arguments)
