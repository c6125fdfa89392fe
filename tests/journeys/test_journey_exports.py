"""Someone who serves what was trained: the commands of docs/how_to/serving.md, as printed, on a run and on adapters."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from hf_longctx.cli import main
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import documents, fresh_accelerator_state
from tests.builders.transformers_versions import READS_GGUF
from tests.worlds.launched import ROOT


def printed() -> list[list[str]]:
    """Words of each command of the page's first block, comments left out."""
    block = (ROOT / "docs" / "how_to" / "serving.md").read_text().partition("```bash\n")[2].partition("```")[0]
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("hf-longctx ")]


def typed(*words: str) -> None:
    fresh_accelerator_state()
    assert main(list(words)) == 0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of all weights and one of adapters, as the page names them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer(bos=True, merges=[("t", "h"), ("th", "e")])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained("base")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained("base")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents([30, 40, 50, 60])))
    Path("run.yaml").write_text(
        "model: {path: base}\ndata: {path: rows.jsonl}\nlongctx: {capacity: 1k}\ntraining: {max_steps: 2, use_cpu: true, "
        "bf16: false, learning_rate: 0.05, report_to: [], save_strategy: 'no', output_dir: runs/mine}\n"
    )
    typed("train", "run.yaml")
    typed("train", "run.yaml", "model.lora.r=2", "training.output_dir=runs/chat")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().float()(input_ids=torch.arange(60)[None]).logits


def test_the_pages_commands_leave_what_transformers_and_peft_load(runs: None):
    commands = printed()
    assert [words[0] for words in commands] == ["export", "merge", "export"]
    for words in commands:
        if READS_GGUF or "gguf" not in words:
            typed(*words)
    load = AutoModelForCausalLM.from_pretrained
    base, exported = load("base"), load("exported")
    assert exported.dtype is torch.bfloat16
    assert {path.name for path in Path("exported").iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert not list(Path("exported").glob("*train*"))
    torch.testing.assert_close(logits(exported), logits(load("runs/mine")), rtol=0, atol=0.05)
    adapted = logits(PeftModel.from_pretrained(base, "runs/chat"))
    assert not torch.allclose(adapted, logits(load("base")), atol=1e-2), "adapters have learned"
    merged = load("runs/chat-merged")
    written = {"gguf_file": "model.gguf"}
    back = [load("chat-gguf", **written, quantization_config=GgufConfig(dequantize=True))] if READS_GGUF else []
    for model in (merged, *back):
        torch.testing.assert_close(logits(model), adapted, rtol=0, atol=1e-4)
    tokens = [
        AutoTokenizer.from_pretrained(folder, **how)("the <|im_end|>")["input_ids"]
        for folder, how in (("base", {}), ("exported", {}), *([("chat-gguf", written)] if READS_GGUF else []))
    ]
    assert all(cut == tokens[0] for cut in tokens)
