"""One rank makes a certificate, and the others read it from the store that their process group met at: no collective, so that a
rank that fails before, or never comes, leaves nobody in one.

    rank 0      facts that the result depends on -> store;   make the result -> store
    others      wait for the facts, and compare them with their own;   wait for the result

Ranks that have another model, other code or other versions see that at the facts, before anything is made. Calls are numbered
on each rank, as collectives are: the third one on a rank meets the third one on rank 0.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from hf_longctx.certificate.kept_certificates import dumped

Result = TypeVar("Result")

TIMEOUT_SECONDS = 600.0
"""A tiny copy takes seconds; one of a model whose sizes resist, up to a minute or so."""
FAILED = "FAILED"
"""Begins what rank 0 leaves in the store where it could make nothing."""
MOST_NAMED = 5
"""Facts that an error names where ranks differ in more."""


def made_on_rank_0(
    facts: Mapping[str, str], make: Callable[[], Result], kind: type[Result], timeout_seconds: float = TIMEOUT_SECONDS
) -> Result:
    """Return what `make` returns on rank 0 of the default process group, on every rank; without one, here.

    Args:
        facts: everything that the result depends on, by name: the same on all ranks.
        make: returns an object of the dataclass `kind`, whose fields are plain values.
        timeout_seconds: for the facts, and once more for the result.

    Raises:
        ValueError: on other ranks, their facts differ from rank 0's; names them.
        RuntimeError: on other ranks, `make` has failed on rank 0, which raises its error itself.
        TimeoutError: rank 0 has left nothing within `timeout_seconds`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    calls = f"hf_longctx/{kind.__name__}"
    name = f"{calls}/{store.add(f'{calls}/calls of rank {rank}', 1)}"
    if rank == 0:
        store.set(f"{name}/facts", json.dumps(dict(facts)))
        try:
            result = make()
        except BaseException as error:
            store.set(name, f"{FAILED} {type(error).__name__}: {error}")
            raise
        store.set(name, dumped(result))
        return result
    _refuse_other_facts(kind, json.loads(_awaited(store, f"{name}/facts", kind, timeout_seconds)), facts)
    told = _awaited(store, name, kind, timeout_seconds)
    if told.startswith(FAILED):
        raise RuntimeError(
            f"rank 0 could not make the {kind.__name__} for all ranks: {told.removeprefix(FAILED).strip()}"
        )
    return TypeAdapter(kind).validate_python(json.loads(told))


def _awaited(store: Any, name: str, kind: type, timeout_seconds: float) -> str:
    """Return what rank 0 sets in the store under a name. Raises TimeoutError if it does not."""
    began = time.monotonic()
    try:
        store.wait([name], timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        if time.monotonic() - began < timeout_seconds:  # the store is gone
            raise
        raise TimeoutError(
            f"rank {dist.get_rank()} has waited {timeout_seconds:g} s for the {kind.__name__} of rank 0, which makes it for all "
            "ranks: rank 0 has not come so far, or is still making it. Valid: the same calls on every rank"
        ) from error
    return str(store.get(name).decode())


def _refuse_other_facts(kind: type, of_rank_0: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise ValueError, naming what differs, unless this rank has rank 0's facts."""
    if of_rank_0 == own:
        return
    names = sorted(name for name in {*of_rank_0, *own} if of_rank_0.get(name) != own.get(name))
    shown = [
        f"{name}: {str(own.get(name, 'nothing'))[:80]} here, {str(of_rank_0.get(name, 'nothing'))[:80]} on rank 0"
        for name in names[:MOST_NAMED]
    ]
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    raise ValueError(
        f"rank {dist.get_rank()} cannot take the {kind.__name__} that rank 0 makes for all ranks, because ranks differ in what "
        f"it depends on ({'; '.join(shown + more)}). Valid: the same model, code and versions on every rank"
    )
