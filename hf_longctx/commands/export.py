"""`hf-longctx export`: a checkpoint of training -> a folder that transformers, and what reads its format, loads.

A checkpoint holds whole weights whatever the sharding of the run was, and `from_pretrained` reads it as it is. What an export
adds:

- the checkpoint's files are compared with their checksums; a run's output directory without a model of its own stands for its
  newest valid checkpoint;
- optimizer, random numbers and what else only resuming needs stay behind;
- weights are cast to --dtype, split into files of --max-file-size, and named as in published checkpoints: of Mixtral, one
  weight for each expert (experts.3.w1), which other programs read, and not the stacked ones that transformers trains;
- adapters stay adapters, or are merged into their base (--merge, commands/checkpoints/merging.py);
- --format gguf: one file for llama.cpp and its kin instead of all these (commands/checkpoints/gguf_file.py).

One process, on CPU. Weights are read, cast and written file by file: no more than one file of the output is in memory at once,
and of the input one weight, or those few that are published as one. (A merge holds the whole model.) Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_longctx.commands.checkpoints.checkpoint_weights import ADAPTER_WEIGHTS, INDEX, CheckpointWeights, cast
from hf_longctx.commands.shared.loading import ADAPTER, Dtype

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
BESIDE = (
    *TOKENIZER,
    "additional_chat_templates/*",
    "generation_config.json",
    "README.md",
    "LICENSE*",
    "evaluation.json",
)
"""Files that belong to a model and are copied as they are; config.json is written anew."""
FILE_SIZE = "5GB"


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="Directory of a checkpoint, a run, a model or an adapter.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write; empty or not there yet.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Write weights in this dtype; auto: as they are.")] = "auto",
    max_file_size: Annotated[str, typer.Option(help="Let a safetensors file have so many bytes at most.")] = FILE_SIZE,
    merge: Annotated[bool, typer.Option("--merge", help="Put an adapter into the weights it stands on.")] = False,
    base: Annotated[
        str | None, typer.Option(help="Take those weights from here, if they have moved.", show_default=False)
    ] = None,
    file_format: Annotated[
        Literal["safetensors", "gguf"],
        typer.Option("--format", help="Write such files; gguf: one, of Llama, Mistral, Qwen2 and Qwen3."),
    ] = "safetensors",
) -> None:
    """Export a checkpoint as a plain model, with nothing of training.

    Example: hf-longctx export runs/tiny/checkpoint-3 runs/exported --dtype bfloat16
    """
    from hf_longctx.checkpoint.folder import MANIFEST, CheckpointError, problem_of, share
    from hf_longctx.commands.checkpoints.gguf_file import refuse_without_package, write_gguf
    from hf_longctx.commands.checkpoints.merging import merge_adapter
    from hf_longctx.commands.shared.loading import readable_weights, resolved
    from hf_longctx.commands.shared.outputs import refuse_unwritable
    from hf_longctx.whole_files import built_whole

    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is no directory: CHECKPOINT is one that a run or save_pretrained has written")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty directory: give another OUTPUT, or remove it")
    refuse_unwritable(output.parent, f"OUTPUT {output}")
    file_bytes(max_file_size)
    source = Path(resolved(str(checkpoint)))
    if (source / MANIFEST).is_file() and (problem := problem_of(source)):
        raise CheckpointError(f"{problem}: this checkpoint cannot be exported; take another one")
    is_adapter = (source / ADAPTER).is_file()
    if (merge or base) and not is_adapter:
        given = "--merge" if merge else "--base"
        raise ValueError(f"{given}, but {source} holds no adapter ({ADAPTER}): leave {given} out")
    if base and not merge:
        raise ValueError("--base says which weights an adapter is merged into: give --merge too, or leave it out")
    if file_format == "gguf":
        refuse_without_package()
        if is_adapter and not merge:
            raise ValueError(f"--format gguf writes whole models, and {source} holds an adapter: give --merge too")
        if max_file_size != FILE_SIZE:
            raise ValueError("--format gguf writes one file: leave --max-file-size out")
        with built_whole(output) as folder, tempfile.TemporaryDirectory(dir=output.parent) as beside:
            if merge:
                merge_adapter(source, Path(beside) / "merged", base=base, dtype=dtype, called=output)
            with readable_weights(source):
                write_gguf(Path(beside) / "merged" if merge else source, folder, dtype)
        _say(output, "GGUF", source)
        return
    if merge:
        merge_adapter(source, output, base=base, dtype=dtype)
        return
    with built_whole(output) as folder, readable_weights(source):
        if is_adapter:
            export_adapter(source, folder, dtype)
        else:
            export_model(source, folder, dtype, max_file_size)
        _copy_beside(source, folder)
        share(folder)
    _say(output, "adapter" if is_adapter else "model", source)


def _say(output: Path, what: str, source: Path) -> None:
    print(f"{output}: {what} of {source}")
    for path in sorted(output.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(output)}  {path.stat().st_size:,} bytes")


def file_bytes(given: str) -> int:
    """Read a size as huggingface_hub does. Raises ValueError unless it is one, of a byte at least."""
    match = re.fullmatch(r"(\d+(\.\d+)?)([KMGT]B)", given.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(f"--max-file-size {given!r} must be a number and one of KB, MB, GB, TB; for instance 5GB")
    return int(float(match[1]) * 1000 ** (1 + "KMGT".index(match[3][0].upper())))


def export_model(source: Path, folder: Path, dtype: Dtype, max_file_size: str) -> None:
    """Writes configuration and weights of a model.

    Raises:
        ValueError: there are no safetensors, quantised weights shall be cast, or publishing would lose some.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None) is not None and dtype != "auto":
        raise ValueError(f"{source} holds quantised weights, which cannot be cast: --dtype auto, got {dtype}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def published(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights as other programs know them: themselves, or others in their place, with their names."""
        parts = revert_weight_conversion(model, dict(tensors))
        return {part_name: _cast(part_name, part, dtype) for part_name, part in parts.items()}

    weights = CheckpointWeights(source)
    planned: dict[str, torch.Tensor] = {}
    origin: dict[str, tuple[str, ...]] = {}
    for group in published_together(published, dict(weights.shapes())):
        parts = published(group)
        refuse_lost(group, parts, origin)
        planned |= parts
        origin |= dict.fromkeys(parts, tuple(group))
    split = split_torch_state_dict_into_shards(
        planned, filename_pattern="model{suffix}.safetensors", max_shard_size=max_file_size
    )
    if larger := [
        f"{file} ({size:,} bytes)"
        for file, names in split.filename_to_tensors.items()
        if (size := sum(planned[name].nbytes for name in names)) > file_bytes(max_file_size)
    ]:
        typer.echo(f"one weight alone is larger than --max-file-size {max_file_size}: {', '.join(larger)}", err=True)
    for file, names in split.filename_to_tensors.items():
        file_weights: dict[str, torch.Tensor] = {}
        for group_names in dict.fromkeys(origin[part_name] for part_name in names):
            parts = published({name: weights.read(name) for name in group_names})
            # A part of a larger tensor is copied, or it would keep the whole of it.
            file_weights |= {
                part_name: parts[part_name].clone().contiguous() for part_name in names if part_name in parts
            }
        _save(file_weights, folder / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    if dtype != "auto":
        config.dtype = dtype
    config.save_pretrained(folder)


def published_together(
    published: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], weights: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Group weights that are published as one, as a matrix of queries, keys and values is: each of these alone would be published
    under the same names.

    Args:
        published: weights -> what is published of them.
        weights: without memory.
    """
    groups: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        groups.setdefault(tuple(published({name: weight})), {})[name] = weight
    return list(groups.values())


def refuse_lost(group: Mapping[str, Tensor], parts: Mapping[str, Tensor], taken: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError where publishing weights would lose some of their numbers.

    Args:
        group: weights that are published together.
        parts: what is published of them.
        taken: published name of other weights -> their names.
    """
    if twice := sorted(parts.keys() & taken.keys()):
        raise ValueError(f"{', '.join(taken[twice[0]])} and {', '.join(group)} would both be published as {twice[0]}")
    before, after = (sum(weight.numel() for weight in weights.values()) for weights in (group, parts))
    if before != after:
        raise ValueError(
            f"{', '.join(group)} hold {before:,} numbers, and what is published of them ({', '.join(parts)}) would hold {after:,}"
        )


def export_adapter(source: Path, folder: Path, dtype: Dtype) -> None:
    """Writes an adapter as PEFT reads it, with the configuration beside it, if any."""
    if not (source / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{source} holds {ADAPTER} and no {ADAPTER_WEIGHTS}: its weights are missing, or a pickle")
    weights = CheckpointWeights(source, ADAPTER_WEIGHTS)
    _save({name: _cast(name, weights.read(name), dtype) for name in weights.files}, folder / ADAPTER_WEIGHTS)
    for name in (ADAPTER, "config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def _cast(name: str, tensor: Any, dtype: Dtype) -> Any:
    """Numbers with a point only: an index or a packed weight is none."""
    import torch

    return tensor if dtype == "auto" else cast(name, tensor, getattr(torch, dtype))


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _copy_beside(source: Path, folder: Path) -> None:
    """Copies what belongs to a model beside weights and configuration."""
    for path in {path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()}:
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
