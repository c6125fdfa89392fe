"""A program of a launched rank that loads one of two stages, and says which layers it has.

Run as `torchrun tests/models/loaded_stage.py FOLDER`.
"""

import os
import sys

import torch.distributed as dist
from transformers.distributed import DistributedConfig

from hf_longctx import from_pretrained
from hf_longctx.models.stages import cut_of

model = from_pretrained(sys.argv[1], distributed_config=DistributedConfig(pp_size=2))
cut = cut_of(model)
assert cut is not None
layers = ", ".join(str(number) for stage in cut.own for number in cut.stages[stage])
sys.stdout.write(f"rank {os.environ['RANK']} has layers {layers};\n")
dist.barrier()
dist.destroy_process_group()
