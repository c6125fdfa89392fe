"""Chooses the checkpoint that a run goes on from, as all ranks together see it.

Sent between ranks: what each finds wrong with a checkpoint, in words. Each reads the content of some of the files, and all of
what every rank reads later: so either all ranks can go on from it, or all know why not.
"""

from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from hf_longctx.checkpoint.folder import CheckpointError, Manifest, checkpoints, problem_of
from hf_longctx.checkpoint.rank_messages import Ranks

logger = logging.get_logger(__name__)


def chosen_checkpoint(asked: Any, checkpoints: list[str], output_dir: Path, ranks: Ranks | None) -> str | None:
    """The folder to resume from; None: training begins anew. Collective.

    Args:
        asked: a folder; True: the newest valid one; "auto": the same, or none where there is none.
        checkpoints: those of the output directory, the newest first; the same on all ranks.
        ranks: None: this process looks by itself, and compares sizes of files alone.

    Raises:
        CheckpointError: what was asked for is not valid, or nothing is.
    """
    if not wants_newest(asked):
        if problem := unfit(str(asked), ranks):
            others = (
                checkpoint
                for checkpoint in checkpoints
                if Path(checkpoint) != Path(asked) and unfit(checkpoint, ranks) is None
            )
            other = next(others, None)
            valid = f"{other!r}, or" if other else '"auto", which begins anew where there is no checkpoint, or'
            raise CheckpointError(f"{problem}. Valid: resume_from_checkpoint={valid} True for the newest valid one")
        return str(asked)
    problems = []
    for folder in checkpoints:
        problem = unfit(folder, ranks)
        if problem is None:
            return folder
        problems.append(problem)
        logger.warning(f"{problem}: this checkpoint is passed over, the one before is looked at")
    if problems:
        raise CheckpointError(
            f"none of the {len(checkpoints)} checkpoints in {output_dir} is valid: {'; '.join(problems)}. Remove them to begin "
            "anew, or train from another folder's"
        )
    if asked == "auto":
        return None
    raise CheckpointError(
        f'{output_dir} holds no checkpoint. Valid: resume_from_checkpoint="auto", which begins anew where there is none, or a '
        "checkpoint's folder"
    )


def wants_newest(asked: Any) -> bool:
    """Tell whether `resume_from_checkpoint` means the newest valid checkpoint of the output directory, and names no folder."""
    return asked is True or asked == "auto"


def resumed(asked: Any, output_dir: Path) -> Path | None:
    """Find the folder that `chosen_checkpoint` will choose, as this process sees it before others are asked; None: training
    begins anew, or is refused. Sizes of files are compared and their content is not read, which takes minutes where they are
    large: a run that is resumed from a folder in which it differs checks what it was told (RunState.restore).

    Args:
        asked: a folder; True or "auto": the newest valid one; None: training begins anew.
    """
    if not asked:
        return None
    if not wants_newest(asked):
        return Path(asked)
    return next(filter(seems_fit, checkpoints(output_dir)), None)


def begins_from(asked: Any, output_dir: Path) -> tuple[Path, Manifest] | None:
    """Find what `resumed` finds, and its manifest; None also where it cannot be gone on from, as this process sees it."""
    folder = resumed(asked, output_dir)
    return None if folder is None or not seems_fit(folder) else (folder, Manifest.read(folder))


def left_by_earlier_run(asked: Any, output_dir: Path) -> str | None:
    """Say what a run that begins anew does to an earlier one in its output directory; None: it resumes one, or there is none.

    Args:
        asked: its `resume_from_checkpoint`.
    """
    if asked:
        return None
    left = checkpoints(output_dir)
    if not left:
        return None
    newest = next(filter(seems_fit, left), None)
    names = ", ".join(sorted((folder.name for folder in left), key=lambda name: (len(name), name)))
    taken = (
        ""
        if newest is None
        else f" until it has written its own, resume_from_checkpoint: auto would take {newest.name};"
    )
    return (
        f"{output_dir} holds checkpoints of an earlier run ({names}), and this one begins anew there: it overwrites model and "
        f"results;{taken} later it is this run's that are taken. Valid: another training.output_dir; "
        "training.resume_from_checkpoint: auto, to go on with the earlier run; or remove its checkpoints before"
    )


def seems_fit(folder: Path) -> bool:
    """Tell whether a run can go on from a checkpoint, as this process sees it: sizes of files are compared, not content."""
    return unfit(str(folder), None) is None


def damaged(folder: str, ranks: Ranks) -> str | None:
    """Return what is wrong with a checkpoint's files, the same on all ranks; None: nothing. Collective."""
    return _agreed(problem_of(Path(folder), ranks.rank, ranks.world_size), ranks)


def unfit(folder: str, ranks: Ranks | None) -> str | None:
    """Return what keeps a run from going on from a checkpoint, the same on all ranks; None: nothing does. Collective, unless
    `ranks` is None: then sizes of files are compared, and not their content."""
    if ranks is None:
        return problem_of(Path(folder), shares=0) or _incomplete(Path(folder))
    problem = problem_of(Path(folder), ranks.rank, ranks.world_size) or _incomplete(Path(folder))
    return _agreed(problem, ranks)


def _agreed(problem: str | None, ranks: Ranks) -> str | None:
    return next((reported for reported in ranks.gathered(problem) if reported), None)


def _incomplete(folder: Path) -> str | None:
    try:
        manifest = Manifest.read(folder)
        state: Any = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{folder / TRAINER_STATE_NAME} is none of Trainer's: {error}"
    if manifest.optimizer is None:
        return f"{folder} holds no optimizer (save_only_model=True): a run cannot go on from it as it would have"
    if state.global_step != manifest.step:
        step = f"{folder / TRAINER_STATE_NAME} is of step {state.global_step!r}"
        return f"{step}, and the weights beside it of step {manifest.step}"
    return None
