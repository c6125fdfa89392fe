"""Which steps are run: models at their real widths, ranks, and what is done with a document of so many tokens."""

from dataclasses import dataclass

from hf_longctx.hardware.published import ARCHITECTURES, LLAMA_31_8B, LLAMA_31_70B, Architecture

MODELS: dict[str, Architecture] = {
    "llama-8b": LLAMA_31_8B,
    "llama-70b": LLAMA_31_70B,
    "mixtral-8x7b": ARCHITECTURES["mistral-8x7b"],
}


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

    @property
    def name(self) -> str:
        extras = [f"offload {self.offload}"] if self.offload else []
        extras += [f"ulysses {self.ulysses}"] if self.ulysses > 1 else []
        extras += ["last slice kept"] if self.keep_last_slice else []
        return ", ".join([self.model, f"{self.longest // 1024}K on {self.ranks} ranks", self.sharding, *extras])
