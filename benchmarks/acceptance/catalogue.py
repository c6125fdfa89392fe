"""The parts of an acceptance run, most telling first, each with its share of the time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """One part; it runs in a process of its own."""

    name: str
    title: str
    run: str
    """module of this folder, and its function, which takes a record.Bench"""
    weight: float
    """its share of the time, beside the others'"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables that its process begins with on a GPU"""


PARTS = (
    Part("environment", "Environment", "environment:measure", 1),
    Part("tests", "Tests of CUDA kernels", "cuda_tests:measure", 5),
    Part("models", "Whole models in bfloat16, beside the CPU", "whole_models:measure", 6),
    Part("families", "Every model type, beside float64", "families:measure", 6),
    Part("train", "hf-longctx train, killed and started again", "whole_run:measure", 3),
    Part("prediction", "Steps as planned, beside what they take", "predicted_steps:measure", 4),
    Part("syncs", "What makes the host wait in a planned step", "planned_step:count_waits", 2),
    Part(
        "sanitizer",
        "Streams in order, by CUDA's sanitizer",
        "planned_step:sanitize",
        3,
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("order", "Backward in a fixed order of sums, and in any", "kernel_times:order", 4),
    Part("kernels", "Attention beside bare calls of others", "kernel_times:kernels", 5),
    Part("packed", "Packed documents, memory of attention", "kernel_times:packed", 3),
    Part("host", "The host's time and the device's", "host_time:measure", 2),
    Part("memory", "Memory beside its model", "step_memory:beside_model", 5),
    Part(
        "segments",
        "The same without expandable segments",
        "step_memory:without_segments",
        2,
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    ),
    Part("longest", "The longest step", "step_memory:longest", 8),
    Part("speed", "Speed at length", "step_memory:speed", 4),
    Part("lora", "LoRA", "step_memory:lora", 6),
    Part("training", "Training steps beside plain Trainer", "beside_trainer:measure", 6),
    Part("head", "The loss head, and rows in another order", "loss_head:measure", 1),
    Part("overlap", "Messages beside kernels", "overlap:measure", 2),
    Part("shared", "Ranks that share one GPU", "real_ranks:shared", 3),
    Part("several", "Ranks on several GPUs", "real_ranks:several", 4),
)
