"""Real text that is there without a network: held-out source files of the installed packages, and long documents of them.

The embedded corpus (data/embedded/embedded_corpus.py) chooses held-out files of many lengths. Few single files are longer than
LONGEST_FILE tokens; where longer documents are asked for, files that follow one another in the order of their names (mostly
those of one folder) are joined, as a repository is read. Nothing is sent between ranks.
"""

import tempfile
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from hf_longctx.data.embedded.embedded_corpus import TRAIN_TOKENS, prepare_corpus

LONGEST_FILE = 8192
"""Tokens: of held-out files there are enough up to here."""
DOCUMENTS = 4
"""Tokens of the corpus / tokens of its longest document."""
TRAINING_DOCUMENTS = 7
"""Most documents of the corpus's other split: not used here, and short documents are fewer than it would have."""


def embedded_texts(tokenizer: Any, cache_dir: Path, longest: int) -> list[list[int]]:
    """Documents as tokens, about DOCUMENTS * longest tokens in all.

    Args:
        tokenizer: a fast one of transformers.
        longest: tokens of the longest document, at least 1024.

    Raises:
        ValueError: there is not as much text on this machine.
    """
    with tempfile.TemporaryDirectory() as folder:  # the tokenizer may come from a hub, and the corpus needs its file
        tokenizer.save_pretrained(folder)
        corpus = prepare_corpus(
            cache_dir,
            folder,
            max_tokens=min(TRAIN_TOKENS, TRAINING_DOCUMENTS * longest),
            held_out_tokens=DOCUMENTS * longest,
            max_document_tokens=min(longest, LONGEST_FILE),
        )
    files = load_from_disk(str(corpus))["test"]["input_ids"]
    return [list(file) for file in files] if longest <= LONGEST_FILE else joined(files, longest)


def joined(files: list[list[int]], longest: int) -> list[list[int]]:
    """Every second run of files with `longest` tokens becomes one document of just so many; the others stay as they are.
    With longest 4:   [a a] [b b b] [c] [d d] [e]   ->   [a a b b] [c] [d d] [e]
    """
    documents: list[list[int]] = []
    run: list[list[int]] = []
    joining = True
    for file in files:
        run.append(file)
        if sum(map(len, run)) >= longest:
            documents += [[token for part in run for token in part][:longest]] if joining else run
            run, joining = [], not joining
    return documents + run
