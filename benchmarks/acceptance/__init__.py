"""The parts of one hour on a machine with GPUs, and the page that says what follows from them (gpu_acceptance.py).

    catalogue.py       the parts, in order, and their shares of the time
    flow.py            runs each part in a process of its own, keeps its record, goes on after a failure or an interruption
    record.py          what a part writes, as soon as it is there
    programs.py        other programs that parts run
    findings.py        one rule for each finding of the review of the GPU path: figure, comparison, words
    anchors.py         figures that others have published
    page.py            records -> one HTML page: verdicts, pictures, tables, published figures beside ours

    environment.py     versions, NCCL's settings, streams, doctor
    cuda_tests.py      the tests that need a GPU
    whole_models.py    models in bfloat16, on the device and on virtual ranks, beside the CPU
    planned_step.py    what makes the host wait; CUDA's sanitizer
    kernel_times.py    attention: order of sums, contenders, packs, first calls
    host_time.py       the host's time and the device's, by tokens per rank
    step_memory.py     memory beside its model, longest step, speed, LoRA (gpu.py)
    beside_trainer.py  training steps beside plain Trainer's with the same kernel
    loss_head.py       the loss head, and rows in another order
    overlap.py         messages beside kernels, without a second GPU
    real_ranks.py      ranks that share a GPU, and ranks on several

The process that runs parts does not import torch, so it holds nothing of a GPU.
"""
