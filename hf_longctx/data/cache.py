"""The cache folder, and folders in it that appear whole or not at all.

What is built lies in a folder named after everything that it depends on, so it is never stale: another input is another
name. It is built beside its place and renamed there at the end, so a build that was interrupted, or that runs twice at
the same time, leaves either nothing or all of it. Nothing is sent between ranks.
"""

import errno
import os
import shutil
import uuid
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


@contextmanager
def built_whole(directory: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `directory` when the block ends, and vanishes when the block raises.

    If another process has built `directory` in the meantime, that one stays.
    """
    # Process ids tell builders apart on one machine only, and several may share a cache.
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            os.replace(partial, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
