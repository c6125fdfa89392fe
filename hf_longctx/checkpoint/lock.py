"""One job at a time trains into an output directory: rank 0 holds a lock on a file there, which the kernel takes back when the
process ends, however it does."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers.utils import logging

from hf_longctx.checkpoint.folder import CheckpointError

logger = logging.get_logger(__name__)

LOCK = "_lock"
"""Names with this beginning are not uploaded when Trainer pushes the directory during training."""
SECONDS = 60.0
"""How long a job waits for one that is about to end, as when a launcher starts ranks again."""


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Holds the directory.

    Raises:
        CheckpointError: another job has it, or nothing can be written there.
    """
    path = output_dir / LOCK
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            message = f"checkpoints cannot be written into output_dir={str(output_dir)!r}: {error}"
            raise CheckpointError(message) from None
        if _lock(file, path):
            break
        if time.monotonic() > deadline:
            file.seek(0)
            raise CheckpointError(
                f"{file.read(200) or 'another process'} trains into {str(output_dir)!r}, and has not ended within {SECONDS:g} s: "
                "two jobs would remove each other's checkpoints. End it, or set another output_dir"
            )
        file.close()
        time.sleep(0.2)
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


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
