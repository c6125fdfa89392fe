"""The cache folder, and errors that name it.

What is built lies in a folder named after everything that it depends on, so it is never stale: another input is another
name. It appears whole or not at all (whole_files.py). Nothing is sent between ranks.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def default_cache_dir() -> Path:
    """$HF_LONGCTX_CACHE, or ~/.cache/hf_longctx.

    Raises:
        ValueError: neither is known.
    """
    try:
        return Path(os.environ.get("HF_LONGCTX_CACHE") or "~/.cache/hf_longctx").expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"no folder for the cache: {error} Valid: a folder in the environment variable HF_LONGCTX_CACHE, or HOME"
        ) from None


@contextmanager
def naming_cache(folder: Path) -> Iterator[None]:
    """Name the cache in errors of its folders, and of a disk that is full or read-only, which often name no file."""
    try:
        yield
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else None
        about_it = named is not None and (named.is_relative_to(folder) or folder.is_relative_to(named))
        if not about_it and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        why = os.strerror(error.errno) if error.errno else error
        raise ValueError(
            f"documents and models cannot be kept in {folder}: {f'{named}: ' if about_it else ''}{why}. Valid: room there, or "
            "another folder in the environment variable HF_LONGCTX_CACHE"
        ) from error
