"""What tests of the remote loader share: clients of several ranks in threads of one process, and epochs of both loaders."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.data.remote.client import RemoteSteps
from hf_longctx.planner import CPU_CORE, CostModel, GlobalBatches, Topology
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import assembled, held_segments

COST = CostModel.from_config(tiny_llama().config, CPU_CORE)
NAMES = count()
LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 100, 2, 14, 30] * 2


class Rows:
    """A data set of any class, which can fail to read a document."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.broken: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, doc: int) -> Any:
        if doc == self.broken:
            raise OSError(f"document {doc} lies on a broken disk")
        return self.rows[doc]


def settings(
    dataset: Any,
    world_size: int,
    rank: int,
    *,
    capacity: int = 50,
    policy: str = "error",
    limit: int | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """Return what PlannedSteps and RemoteSteps are made from."""
    pieces = cut_documents(dataset, LengthIndex.from_dataset(dataset), policy, limit)
    collator = LengthAwareCollator(Topology(world_size, capacity), COST, rank, **more)
    return dataset, pieces, GlobalBatches(pieces.lengths, 3, tokens=250), collator


@contextmanager
def clients(
    dataset: Any, world_size: int, *, remote: dict[str, Any] | None = None, **more: Any
) -> Iterator[list[RemoteSteps]]:
    """[world_size]: what each rank uses, of one run."""
    made: list[RemoteSteps] = []
    names = {"job": "tests", "name": f"steps {next(NAMES)}"} | (remote or {})
    try:
        for rank in range(world_size):
            made.append(RemoteSteps(*settings(dataset, world_size, rank, **more), **names))
        yield made
    finally:
        for client in made:
            client.close()


def epoch_of(
    steps: Sequence[PlannedSteps], after_step: Callable[[int], None] = lambda step: None
) -> list[list[RankStep]]:
    """[step][rank] of epoch 0: all ranks take a step, each in a thread of its own, then the next."""
    iterators = [iter(PlannedDataLoader(source)) for source in steps]
    epoch = []
    with ThreadPoolExecutor(len(steps)) as threads:
        for step in range(steps[0].steps(0)):
            epoch.append(list(threads.map(next, iterators)))
            after_step(step)
    return epoch


def local_epoch(dataset: Any, world_size: int, **more: Any) -> list[list[RankStep]]:
    return epoch_of([PlannedSteps(*settings(dataset, world_size, rank, **more)) for rank in range(world_size)])


def assert_same(ours: list[list[RankStep]], theirs: list[list[RankStep]]) -> None:
    """Bit by bit."""
    for step, expected in zip(ours, theirs, strict=True):
        for a, b in zip(step, expected, strict=True):
            assert (a.fingerprint, a.position, a.num_items, a.num_tokens) == (
                b.fingerprint,
                b.position,
                b.num_items,
                b.num_tokens,
            )
            assert a.plan.digest() == b.plan.digest()
            assert str(a.plan.summary()) == str(b.plan.summary())
            for mine, other in zip(a.micro_batches, b.micro_batches, strict=True):
                assert (mine.layout, mine.offload, mine.idle) == (other.layout, other.offload, other.idle)
                for name in ("input_ids", "shift_labels"):
                    one, two = getattr(mine, name), getattr(other, name)
                    assert one.dtype == two.dtype == torch.int64
                    assert torch.equal(one, two)


def every_document_once(epoch: list[list[RankStep]], rows: Any) -> None:
    segments = [[held_segments(part, rank) for rank, part in enumerate(step)] for step in epoch]
    assert sorted(doc for step in segments for doc in assembled(step)) == sorted(row["input_ids"] for row in rows)


def processes(steps: Sequence[RemoteSteps]) -> dict[str, int]:
    """Return the process of each actor."""
    servers = {f"server {source._served_by}": source.server_report().process for source in steps}
    return {"planner": steps[0].planner_report().process} | servers
