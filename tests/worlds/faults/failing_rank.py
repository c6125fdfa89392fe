"""What a rank does that cannot go on, in a file that imports little: new processes start quickly."""

import os
from pathlib import Path

import torch.distributed as dist


def fail_on_last(folder: Path) -> None:
    """Rank 1 raises, while the others wait for it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    (folder / str(rank)).write_text(os.environ["LOCAL_WORLD_SIZE"])
    if rank == 1:
        raise ValueError("rank 1 cannot read this")
    dist.barrier()
