"""`hf-longctx export --format gguf`: transformers reads the same model and the same tokens back, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers import normalizers
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from transformers.utils.quantization_config import GgufConfig

from hf_longctx.commands.export import export
from hf_longctx.models.adapters.peft_adapters import add_lora
from tests.builders.small_tokenizers import byte_tokenizer, word_tokenizer
from tests.builders.tiny_models import TINY, _seeded, tiny_general, tiny_llama, tiny_mistral, tiny_mixtral
from tests.builders.transformers_versions import READS_GGUF

pytestmark = pytest.mark.skipif(not READS_GGUF, reason="this transformers reads other tokenizers back")
ROWS = 300
IDS = torch.arange(80)[None] % 257
WIDE = {"vocab_size": ROWS, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}


def saved(model: Any, folder: Path, tokenizer: Any = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or spoken()).save_pretrained(folder)
    return folder


def spoken() -> Any:
    """A tokenizer with merges, special and other added tokens, and a chat template."""
    tokenizer = byte_tokenizer(bos=True, merges=[("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|pad|>"})
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    return tokenizer


def read_back(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    how = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype, quantization_config=how)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def qwen2() -> Any:
    sizes = {key: value for key, value in TINY.items() if key != "head_dim"}
    return _seeded(Qwen2Config(**(sizes | WIDE)), torch.float32, "sdpa")


FAMILIES = {
    "llama": lambda: tiny_llama(**WIDE, note_of_the_makers="a key that no model looks at"),
    "llama, tied": lambda: tiny_llama(tie_word_embeddings=True, **WIDE),
    "mistral without a window": lambda: tiny_mistral(sliding_window=None, **WIDE),
    "qwen2": qwen2,
    "qwen3": lambda: tiny_general("qwen3", head_dim=128, **WIDE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_and_tokens_are_read_back(family: str, tmp_path: Path, capsys: Any):
    model = FAMILIES[family]()
    export(saved(model, tmp_path / "saved"), tmp_path / "out", file_format="gguf")
    assert "model.gguf" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    back = read_back(tmp_path / "out")
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=1e-5)
    assert back.config.tie_word_embeddings == model.config.tie_word_embeddings
    ours = AutoTokenizer.from_pretrained(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in ("the 12 other <think>thing<|im_end|>", "Ünï 你好"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<s>", "<|im_end|>", "<|pad|>")
    assert theirs.chat_template == ours.chat_template


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_cast_and_vectors_stay_whole(dtype: Any, tmp_path: Path):
    model = tiny_llama(**WIDE)
    export(saved(model, tmp_path / "saved"), tmp_path / "out", dtype=dtype, file_format="gguf")
    kind = {"bfloat16": GGMLQuantizationType.BF16, "float16": GGMLQuantizationType.F16}[dtype]
    for tensor in GGUFReader(tmp_path / "out" / "model.gguf").tensors:
        assert tensor.tensor_type == (GGMLQuantizationType.F32 if len(tensor.shape) == 1 else kind), tensor.name
    for name, tensor in read_back(tmp_path / "out").state_dict().items():
        expected = model.state_dict()[name]
        assert torch.equal(tensor, expected if expected.ndim == 1 else expected.to(getattr(torch, dtype)).float()), name


def test_an_adapter_is_merged_first(tmp_path: Path, capsys: Any):
    base = saved(tiny_llama(**WIDE), tmp_path / "base")
    model = add_lora(AutoModelForCausalLM.from_pretrained(base), r=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapter = saved(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds an adapter: give --merge too"):
        export(adapter, tmp_path / "out", file_format="gguf")
    export(adapter, tmp_path / "out", merge=True, file_format="gguf")
    assert f"{tmp_path / 'out'}: {adapter} merged into {base}, " in capsys.readouterr().out
    torch.testing.assert_close(logits(read_back(tmp_path / "out")), logits(model), rtol=0, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_mixtral(**WIDE), "writes llama, mistral, qwen2, qwen3, and this is a mixtral"),
        (lambda: tiny_mistral(**WIDE), r"another model back: sliding_window \(7; read back: None\)"),
        (lambda: tiny_llama(**WIDE, attention_bias=True), r"attention_bias \(True; read back: False\)"),
        (lambda: tiny_llama(**WIDE, hidden_act="gelu"), r"hidden_act \('gelu'; read back: 'silu'\)"),
        (lambda: tiny_general("qwen3", **WIDE), r"head_dim \(16; read back: 128\)"),
        (lambda: tiny_llama(**(WIDE | {"rope_parameters": YARN})), r"rope_parameters \(.*yarn"),
        (
            lambda: tiny_llama(**(WIDE | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 1024}})),
            r"rope_parameters \(.*llama3.*convert_hf_to_gguf.py",
        ),
    ],
    ids=["experts", "window", "bias", "activation", "head", "yarn", "llama3"],
)
def test_what_would_come_back_as_another_model_is_refused(make: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        export(saved(make(), tmp_path / "saved"), tmp_path / "out", file_format="gguf")
    assert not (tmp_path / "out").exists()


def test_tokenizers_that_the_file_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama(**WIDE)
    options: dict[str, Any] = {"file_format": "gguf"}
    with pytest.raises(ValueError, match="byte-level BPE, and this one is WordLevel"):
        export(saved(model, tmp_path / "words", word_tokenizer()), tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model 258 rows: .* has none"):
        export(saved(tiny_llama(**(WIDE | {"vocab_size": 258})), tmp_path / "few"), tmp_path / "out", **options)
    model.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="has no tokenizer"):
        export(tmp_path / "none", tmp_path / "out", **options)
    with pytest.raises(ValueError, match="one file: leave --max-file-size out"):
        export(saved(model, tmp_path / "saved"), tmp_path / "out", max_file_size="1GB", **options)
    # As where a reader splits otherwise than the tokenizer did: numbers of three digits.
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    monkeypatch.setitem(mapping.GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", r"\p{N}|\D+")
    with pytest.raises(ValueError, match=r"another tokenizer back: .* becomes tokens .* from token \d+ on"):
        export(tmp_path / "saved", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (normalizers.Replace("zz", "the"), r"changes texts by \[.*Replace.*\] before it cuts them.* read back by \[\]"),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), "Lowercase"),
        (normalizers.Sequence([normalizers.NFC()]), None),
    ],
    ids=["replaces", "lower", "composes"],
)
def test_what_is_done_to_texts_before_they_are_cut_is_not_lost_in_silence(
    normalizer: Any, message: str | None, tmp_path: Path, capsys: Any
):
    tokenizer = spoken()
    tokenizer.backend_tokenizer.normalizer = normalizer
    source = saved(tiny_llama(**WIDE), tmp_path / "saved", tokenizer)
    if message is None:
        export(source, tmp_path / "out", file_format="gguf")
        assert "cannot say that characters in parts (Unicode's NFD) are put together first" in capsys.readouterr().err
        return
    with pytest.raises(ValueError, match=message):
        export(source, tmp_path / "out", file_format="gguf")


def test_tokens_that_take_spaces_along_are_refused(tmp_path: Path):
    tokenizer = spoken()
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True, rstrip=True, special=True)], special_tokens=True)
    with pytest.raises(ValueError, match="another tokenizer back"):
        export(saved(tiny_llama(**WIDE), tmp_path / "saved", tokenizer), tmp_path / "out", file_format="gguf")


def test_a_tokenizer_of_bytes_alone_is_refused(tmp_path: Path):
    source = saved(tiny_llama(**WIDE), tmp_path / "saved", byte_tokenizer(merges=[]))
    with pytest.raises(ValueError, match="no tokenizer without merges back, and this one has none"):
        export(source, tmp_path / "out", file_format="gguf")
