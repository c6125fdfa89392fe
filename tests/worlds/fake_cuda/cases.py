"""Which steps are run: models at their real widths, ranks, and what is done with a document of so many tokens."""

from dataclasses import dataclass

from hf_longctx.hardware.published import ARCHITECTURES, LLAMA_31_8B, LLAMA_31_70B, Architecture

MODELS: dict[str, Architecture] = {
    "llama-8b": LLAMA_31_8B,
    "llama-70b": LLAMA_31_70B,
    "mixtral-8x7b": ARCHITECTURES["mistral-8x7b"],
}


SPLIT_SIZES = "tokens of each expert"
"""What transformers' expert parallelism makes the host wait for, once a layer and forward."""
ROUTERS = ("uniform", "half to one")
"""Tokens choose all experts alike, or the first expert gets half of all choices."""


@dataclass(frozen=True)
class Case:
    """One step of one rank."""

    model: str
    """one of MODELS"""
    ranks: int
    capacity: int
    """tokens of a rank and micro-batch"""
    longest: int
    """tokens of the longest document; another has a quarter of them, and the others are drawn"""
    ranks_per_node: int = 8
    documents: int = 6
    """drawn for each rank"""
    sharding: str = "ddp"
    layers: int = 3
    offload: float = 0.0
    ulysses: int = 1
    keep_last_slice: bool = False
    tensor_parallel: int = 1
    """processes that share each rank's heads, neighbours on a node"""
    expert_parallel: int = 1
    """processes that the experts of a layer are spread over; with zero3"""
    router: str = "uniform"
    """one of ROUTERS: what tokens choose, where experts are spread"""
    stages: int = 1
    """of a pipeline; `layers` are those of each"""

    @property
    def name(self) -> str:
        extras = [f"offload {self.offload}"] if self.offload else []
        extras += [f"ulysses {self.ulysses}"] if self.ulysses > 1 else []
        extras += ["last slice kept"] if self.keep_last_slice else []
        extras += [f"tensor parallel {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        extras += [f"experts over {self.expert_parallel}, {self.router}"] if self.expert_parallel > 1 else []
        extras += [f"{self.stages} stages"] if self.stages > 1 else []
        return ", ".join([self.model, f"{self.longest // 1024}K on {self.ranks} ranks", self.sharding, *extras])
