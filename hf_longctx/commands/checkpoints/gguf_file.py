"""A checkpoint in safetensors -> one file model.gguf, with llama.cpp's names, which transformers reads back.

Llama, Mistral, Qwen2 and Qwen3 with a byte-level BPE tokenizer. Matrices keep their dtype or get --dtype; vectors (norms and
biases) are float32, as llama.cpp wants them. Of Llama and Mistral, rows of queries and keys are put in the order of rotation by
neighbours: heads of `[2, D/2]` rows become `[D/2, 2]`, which readers undo.

A file says less of a model than its configuration does. Configuration and tokenizer are therefore read back with transformers,
and what comes back as another model, or cuts texts into other tokens, is refused, with what is different. Weights are written
one at a time. One process, on CPU.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from hf_longctx.commands.shared.loading import Dtype

FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of transformers -> architecture in the file. llama.cpp, too, calls a Mistral a Llama."""
ELSEWHERE = "llama.cpp's convert_hf_to_gguf.py knows more: hf-longctx export without --format gguf makes the folder that it reads"
SPLITS = {"llama3": "llama-bpe", "qwen2": "qwen2", "tekken": "tekken"}
"""Names of splitting patterns in transformers -> names in the file. llama.cpp refuses a name that it does not know."""
SAID_OF_NOTHING = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
}
"""Keys of a configuration that change no logits, or are read from elsewhere: tokens from the tokenizer, ties from the weights.
A window in `layer_types` shows in `sliding_window` too."""
TEXTS = (
    "Hello, world! It's 12,345.67 o'clock; don't you think?",
    "  two spaces,\ttabs\n\n\nand   lines\r\n  end here   ",
    "def f(x: int) -> list[str]:\n    return [str(x ** 2)] * 3  # 0x1F, 1e-9\n",
    "Ünïcödé: 你好,世界。 Привет мир! مرحبا 🙂👍🏽 ñandú ½ ²",
    "CamelCase snake_case HTTPServer2Go ALLCAPS we'LL",
)
"""Texts that pattern and merges of tokenizers cut differently."""
COMPOSED = {"type": "NFC"}
"""The normalizer that puts characters together."""


def write_gguf(source: Path, folder: Path, dtype: Dtype) -> None:
    """Writes `folder`/model.gguf.

    Args:
        source: a plain checkpoint with a tokenizer.
        folder: to write into.
        dtype: of matrices; auto: as they are.

    Raises:
        ValueError: the model or its tokenizer is one that the file cannot hold, or a weight is missing.
        ImportError: the package gguf is missing.
    """
    refuse_without_package()
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_longctx.commands.checkpoints.checkpoint_weights import CheckpointWeights, cast
    from hf_longctx.commands.shared.loading import load_tokenizer

    config = AutoConfig.from_pretrained(source)
    refuse_configuration(config)
    tokenizer = load_tokenizer(str(source))
    weights = CheckpointWeights(source)
    with torch.device("meta"):
        expected = set(AutoModelForCausalLM.from_config(config).state_dict())
    if config.tie_word_embeddings:
        expected.discard("lm_head.weight")  # readers tie where it is not there
    if missing := sorted(expected - weights.files.keys()):
        raise ValueError(f"{source} lacks weights of its model: {', '.join(missing[:5])}")

    writer = GGUFWriter(folder / FILE, ARCHITECTURES[config.model_type])
    _add_configuration(writer, config)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = get_tensor_name_map(_architecture_of(config), config.num_hidden_layers)
    kinds = {
        "float32": GGMLQuantizationType.F32,
        "float16": GGMLQuantizationType.F16,
        "bfloat16": GGMLQuantizationType.BF16,
    }
    planned: dict[str, torch.dtype] = {}
    for name, like in weights.shapes():
        if name not in expected:
            continue
        stored = torch.float32 if like.ndim == 1 else like.dtype if dtype == "auto" else getattr(torch, dtype)
        kind = kinds.get(str(stored).removeprefix("torch."))
        if kind is None:
            raise ValueError(f"{name} is {stored}: --dtype must be float32, bfloat16 or float16, got {dtype}")
        planned[name] = stored
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor_info(
            f"{names.get_name(stem)}.{suffix}",
            like.shape,
            np.dtype(np.float32),
            like.numel() * stored.itemsize,
            kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, stored in planned.items():
        tensor = cast(name, _rotated_by_neighbours(name, weights.read(name), config), stored).contiguous()
        writer.write_tensor_data(tensor.view(torch.uint8).numpy())
    writer.close()
    _refuse_other_tokens(tokenizer, folder)


def _architecture_of(config: Any) -> Any:
    """gguf's number of an architecture."""
    from gguf import MODEL_ARCH_NAMES

    return next(key for key, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.model_type])


def refuse_without_package() -> None:
    """Raise ImportError where the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("--format gguf needs the package gguf: pip install 'hf_longctx[gguf]'")


def refuse_configuration(config: Any) -> None:
    """Raises ValueError unless transformers makes the same model of what the file says of it, and where it is one before 5.18,
    which reads other tokenizers back."""
    from gguf import GGUFWriter
    from transformers import AutoConfig
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    if not hasattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
        raise ValueError(
            "--format gguf needs transformers>=5.18, which reads tokenizers back as they were; installed: "
            f"{version('transformers')}. {ELSEWHERE}"
        )
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"--format gguf writes {', '.join(ARCHITECTURES)}, and this is a {config.model_type}. {ELSEWHERE}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("--format gguf takes weights that are not quantised, and these are")
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / FILE, ARCHITECTURES[config.model_type])
        _add_configuration(writer, config)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        back = AutoConfig.from_pretrained(folder, gguf_file=FILE).to_dict()
    known = type(config)().to_dict().keys() - SAID_OF_NOTHING  # what else a config.json holds, no model looks at
    ours = config.to_dict()
    lost = [
        f"{key} ({ours[key]!r}; read back: {back.get(key)!r})"
        for key in sorted(known & ours.keys())
        if not key.startswith("_") and not _same(ours[key], back.get(key))
    ]
    if lost:
        raise ValueError(f"--format gguf: transformers would read another model back: {'; '.join(lost)}. {ELSEWHERE}")


def _same(one: Any, other: Any) -> bool:
    """Whether two values mean the same; the file has numbers in float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
    return (one or None) == (other or None)


def _add_configuration(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"a {config.model_type}")  # not "mistral" alone: transformers gives that one a window
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Vocabulary, merges, kinds of tokens and the chat template of a byte-level BPE; rows without a token are unused ones.

    Raises:
        ValueError: it is another kind of tokenizer.
    """
    from gguf import TokenType

    described = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model = described.get("model", {})
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(described.get("pre_tokenizer")):
        kind = "SentencePiece's BPE" if model.get("type") == "BPE" else model.get("type", "no fast one")
        raise ValueError(f"--format gguf writes tokenizers of byte-level BPE, and this one is {kind}. {ELSEWHERE}")
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    for token, number in tokenizer.get_vocab().items():
        if number >= rows:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, and the model {rows} rows: {token!r} has none"
            )
        added = tokenizer.added_tokens_decoder.get(number)
        tokens[number] = token
        kinds[number] = (
            TokenType.NORMAL if added is None else TokenType.CONTROL if added.special else TokenType.USER_DEFINED
        )
    if not model["merges"]:
        raise ValueError(
            f"--format gguf: transformers reads no tokenizer without merges back, and this one has none. {ELSEWHERE}"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(described["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    begun = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(begun[:1] != plain[:1])
    writer.add_add_eos_token(begun[-1:] != plain[-1:])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _split_name(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the pattern that a text is split by before merges."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if any(part["type"] == "Digits" and part["individual_digits"] for part in parts):
        return "smollm"
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    return next((ours for theirs, ours in SPLITS.items() if patterns == [GGUF_PRE_TOKENIZER_SPLITS[theirs]]), "gpt-2")


def _rotated_by_neighbours(name: str, tensor: Any, config: Any) -> Any:
    """Queries and keys of Llama and Mistral with rows in the file's order; any other weight as it is."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or ARCHITECTURES[config.model_type] != "llama":
        return tensor
    return tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


def _refuse_other_tokens(tokenizer: Any, folder: Path) -> None:
    """Raise ValueError unless transformers reads the same tokenizer back. Characters in parts (e and an accent) may become other
    tokens than together, of which a line says so: llama.cpp puts none together, and Qwen's tokenizers do."""
    from transformers import AutoTokenizer

    back = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    added = tokenizer.added_tokens_decoder.values()
    beside = [glue.join(["", *map(str, added), ""]) for glue in (" x", " ", " x ")]
    before, then = _normalizers(tokenizer), _normalizers(back)
    if before == [COMPOSED] and not then:
        typer.echo(f"{FILE} cannot say that characters in parts (Unicode's NFD) are put together first", err=True)
    elif before != then:
        raise ValueError(
            f"--format gguf: the tokenizer changes texts by {before} before it cuts them, and the one that transformers would "
            f"read back by {then}. {ELSEWHERE}"
        )
    for text in (*TEXTS, *beside):
        if (ours := tokenizer(text)["input_ids"]) != (theirs := back(text)["input_ids"]):
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            raise ValueError(
                f"--format gguf: transformers would read another tokenizer back: {text!r} becomes tokens "
                f"{ours[place : place + 4]}, and {theirs[place : place + 4]} then, from token {place} on. {ELSEWHERE}"
            )


def _normalizers(tokenizer: Any) -> list[dict[str, Any]]:
    """Return what is done to a text before it is cut, step by step."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"]
    if described is None:
        return []
    return described["normalizers"] if described["type"] == "Sequence" else [described]
