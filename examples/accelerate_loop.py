"""A PyTorch loop of your own, with accelerate and without Trainer.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py   # two CPU processes
    accelerate launch examples/accelerate_loop.py                                                         # this machine's GPUs

Each batch of the loader is one optimizer step: this rank's micro-batches of it, any number of them. Losses are parts of
the step's, so that gradients are summed over ranks, once, when all micro-batches have run.
"""

import stand_ins
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_longctx import CostModel, Exchange, LengthAwareCollator, Topology, patch_model
from hf_longctx.parallel.reduction import sum_step
from hf_longctx.planner import GPU
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.training.execution import run_micro_batches


def main() -> list[float]:
    accelerator = Accelerator()
    ranks, device = accelerator.num_processes, accelerator.device
    exchange = Exchange() if ranks > 1 else None  # a process group of its own: make it once
    model = patch_model(stand_ins.model()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    topology = Topology(world_size=ranks, capacity=512)  # tokens that a rank holds at a time
    speed = cpu_core(cpu_kind(), bf16=False) if device.type == "cpu" else GPU
    cost = CostModel.from_config(model.config, speed, world_size=ranks)
    collator = LengthAwareCollator(topology, cost, rank=accelerator.process_index)

    losses = []
    for epoch in range(2):
        order = torch.Generator().manual_seed(epoch)  # every rank sees the same global batches of 8 documents
        loader = DataLoader(stand_ins.documents(), batch_size=8, shuffle=True, generator=order, collate_fn=collator)
        for step in loader:
            model.train()
            part = run_micro_batches(model, step, exchange, device, accelerator.backward)
            [loss] = sum_step(model.parameters(), part.reshape(1)).tolist()  # sums gradients, and the loss, over ranks
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            accelerator.print(
                f"epoch {epoch}: {step.num_tokens} tokens, loss {loss:.3f}, {step.plan.summary().documents} documents"
            )
    return losses


if __name__ == "__main__":
    main()
