"""Held-out loss of two checkpoints with plain transformers: each document alone, stock attention, nothing of hf_longctx.

python scripts/compare_checkpoint.py BEFORE AFTER --documents DATASET_DIR --split test

A checkpoint may be an adapter of PEFT: it is loaded on the weights that it names, with the configuration beside it, if any.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from peft import PeftConfig, PeftModel
from rich.console import Console
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM


def load(checkpoint: str) -> Any:
    """A model in float32, with its adapter where the checkpoint is one."""
    if not (Path(checkpoint) / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    base = PeftConfig.from_pretrained(checkpoint).base_model_name_or_path
    config = AutoConfig.from_pretrained(checkpoint if (Path(checkpoint) / "config.json").is_file() else base)
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32), checkpoint
    )


def held_out_loss(checkpoint: str, documents: list[list[int]]) -> float:
    """Cross-entropy per predicted token over all documents, float32 weights under bfloat16 autocast."""
    model = load(checkpoint).eval()
    total, predicted = 0.0, 0
    for document in track(documents, description=f"plain transformers, {checkpoint}", transient=True):
        tokens = torch.tensor([document])
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        total += float(loss) * (len(document) - 1)
        predicted += len(document) - 1
    return total / predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a checkpoint directory")
    parser.add_argument("after", help="another")
    parser.add_argument("--documents", required=True, help="a directory made by save_to_disk, with a column input_ids")
    parser.add_argument("--split", default="test")
    args = parser.parse_args()
    documents = [document for document in load_from_disk(args.documents)[args.split]["input_ids"] if len(document) > 1]
    before, after = (held_out_loss(checkpoint, documents) for checkpoint in (args.before, args.after))
    console = Console(highlight=False)
    console.print(f"held-out loss, plain transformers: {before:.4f} before, {after:.4f} after")
    if after >= before:
        sys.exit("the held-out loss did not fall")


if __name__ == "__main__":
    main()
