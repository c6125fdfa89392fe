"""Files and folders that appear whole or not at all.

Each is built beside its place and renamed there at the end. A build that is interrupted, meets a full disk, or runs twice at the
same time leaves what was there, or all of what it made. Nothing is sent between ranks.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITING = ".writing-"
"""How the names of what is being built begin, and of what a process that was killed leaves."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing for which there is no room."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a file beside `path`, not there yet, that takes its place when the block ends, and vanishes when the block raises.

    A link stays, and the file that it leads to is replaced; who may read a file stays as it was. Errors that name the file beside
    it, and those of a full disk, which name none, are raised with `path`: only that is known to who asked for it.
    """
    final = Path(os.path.realpath(path))
    partial = _beside(final)  # not tempfile, whose files no other user may read
    try:
        yield partial
        if final.is_file():
            shutil.copymode(final, partial)
        os.replace(partial, final)
    except OSError as error:
        if str(partial) not in str(error) and (error.filename is not None or error.errno not in FULL):
            raise
        reason = (error.strerror or str(error)).replace(str(partial), str(path))
        raise OSError(error.errno or errno.EIO, reason, str(path)) from None
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def built_whole(path: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends, and vanishes when the block raises.

    If another process has built `path` in the meantime, that one stays.
    """
    partial = _beside(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            os.replace(partial, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A name in the same folder. Process ids tell builders apart on one machine only, and several may share a folder."""
    return path.with_name(f"{WRITING}{path.name}.{uuid.uuid4().hex}")
