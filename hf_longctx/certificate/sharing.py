"""One rank makes a certificate, and the others read it from the store that their process group met at: no collective, so that a
rank that fails before, or never comes, leaves nobody in one."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from hf_longctx.certificate.cache import dumped

Result = TypeVar("Result")

TIMEOUT_SECONDS = 600.0
"""A tiny copy takes seconds; one of a model whose sizes resist, up to a minute or so."""
FAILED = "FAILED"
"""Begins what rank 0 leaves in the store where it could make nothing."""


def from_first_rank(
    key: str, make: Callable[[], Result], kind: type[Result], timeout_seconds: float = TIMEOUT_SECONDS
) -> Result:
    """Return what `make` returns on rank 0 of the default process group, on every rank; without one, here.

    Args:
        key: names the result; the same on all ranks, and another for another result.
        make: returns an object of the dataclass `kind`, whose fields are plain values.

    Raises:
        RuntimeError: on other ranks, `make` has failed on rank 0, which raises its error itself.
        TimeoutError: rank 0 has left nothing within `timeout_seconds`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    store, name = dist.distributed_c10d._get_default_store(), f"hf_longctx/{kind.__name__}/{key}"
    if dist.get_rank() == 0:
        try:
            result = make()
        except BaseException as error:
            store.set(name, f"{FAILED} {type(error).__name__}: {error}")
            raise
        store.set(name, dumped(result))
        return result
    began = time.monotonic()
    try:
        store.wait([name], timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        if time.monotonic() - began < timeout_seconds:  # the store is gone
            raise
        raise TimeoutError(
            f"rank {dist.get_rank()} has waited {timeout_seconds:g} s for the {kind.__name__} of rank 0, which makes it for all "
            "ranks: it has not come so far, or has another model, other code or other versions. Valid: the same on every rank"
        ) from error
    told = store.get(name).decode()
    if told.startswith(FAILED):
        raise RuntimeError(
            f"rank 0 could not make the {kind.__name__} for all ranks: {told.removeprefix(FAILED).strip()}"
        )
    return TypeAdapter(kind).validate_python(json.loads(told))
