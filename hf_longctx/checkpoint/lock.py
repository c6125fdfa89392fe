"""One job at a time trains into an output directory: rank 0 holds a lock on a file there, which the kernel takes back when the
process ends, however it does."""

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from transformers.utils import logging

from hf_longctx.checkpoint.folder import CheckpointError, checkpoints
from hf_longctx.checkpoint.rank_messages import Ranks

logger = logging.get_logger(__name__)

LOCK = "_lock"
"""Names with this beginning are not uploaded when Trainer pushes the directory during training."""
SHOWN = 3
"""Ranks that an error names."""
SECONDS = 60.0
"""How long a job waits for one that is about to end, as when a launcher starts ranks again."""


@contextmanager
def locked(output_dir: Path, asked: Any = True) -> Iterator[None]:
    """Holds the directory.

    Args:
        asked: the job's `resume_from_checkpoint`. One that begins anew would overwrite what the one that it waits for may leave.

    Raises:
        CheckpointError: another job has it, or had it when a job that begins anew came, and there are checkpoints; or nothing
            can be written there.
    """
    path = output_dir / LOCK
    deadline = time.monotonic() + SECONDS
    waits = False
    while True:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            raise _unwritable(output_dir, error) from None
        if _lock(file, path):
            break
        file.seek(0)
        holder = file.read(200) or "another process"
        file.close()
        if not waits:
            waits = True
            logger.warning(f"{holder} trains into {str(output_dir)!r}: waiting for its end, {SECONDS:g} s at most")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{holder} trains into {str(output_dir)!r}, and has not ended within {SECONDS:g} s: "
                "two jobs would remove each other's checkpoints. End it, or set another output_dir"
            )
        time.sleep(0.2)
    try:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        except OSError as error:
            raise _unwritable(output_dir, error) from None
        left = checkpoints(output_dir)
        begins_anew = not asked or (asked == "auto" and not left)
        results = sorted(path.name for path in [*left, *output_dir.glob("*.safetensors")])
        if begins_anew and waits and results:
            going_on = "resume_from_checkpoint='auto', which goes on from the newest; " if left else ""
            raise CheckpointError(
                f"another job has trained into {str(output_dir)!r} while this one waited for it, and there are "
                f"{', '.join(results)}: this one begins anew, and would overwrite them. Valid: another output_dir; {going_on}"
                "or start it again, and it does"
            )
        yield
    finally:
        with contextlib.suppress(OSError):  # of a folder that a file has taken the place of; of a full disk, once more
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.close()


def refuse_apart(output_dir: Path, ranks: Ranks, seconds: float) -> None:
    """Return if all ranks see what rank 0 writes into the output directory within `seconds`. Collective.

    Raises:
        CheckpointError: one does not, as where each machine has a disk of its own; or rank 0 can write nothing.
    """
    mark = output_dir / ranks.agreed(f"{LOCK}-{uuid.uuid4().hex}")  # a file of its own: some systems show no open ones
    problem = None
    try:
        if ranks.rank == 0:
            try:
                mark.touch()
            except OSError as error:
                problem = str(_unwritable(output_dir, error))
        if problem := ranks.agreed(problem):
            raise CheckpointError(problem)
        deadline = time.monotonic() + seconds
        while not (seen := mark.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        places = ranks.gathered((seen, f"{output_dir.absolute()} on {socket.gethostname()}"))
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)
    apart = [f"rank {rank} ({place})" for rank, (seen, place) in enumerate(places) if not seen]
    if apart:
        raise CheckpointError(
            f"all ranks must see the same output_dir, and {len(apart)} of {len(places)} do not see after {seconds:g} s what rank "
            f"0 writes into {places[0][1]}: {', '.join(apart[:SHOWN])}{', ...' if apart[SHOWN:] else ''}. Valid: an output_dir "
            "on a disk that all machines share; or save_strategy='no', which writes no checkpoints"
        )


def _unwritable(output_dir: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"checkpoints cannot be written into output_dir={str(output_dir)!r}: {error}")


def _lock(file: IO[str], path: Path) -> bool:
    """Whether this process has it now. A file that was removed by the one who had it is nobody's any more."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        logger.warning(f"the file system of {str(path)!r} locks no files ({error}): start one job at a time there")
        return True
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
