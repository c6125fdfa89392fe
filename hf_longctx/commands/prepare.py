"""`hf-longctx prepare`: tokenise what a configuration trains on, once, and say what is in it.

Training finds it in the cache and begins at once; with --output, a folder that can be copied to other machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_longctx.commands.shared.overrides import Overrides

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from hf_longctx.settings import LongctxConfig

BAR = 40
"""Characters of the longest bar of the histogram."""


def prepare(
    config: Annotated[Path, typer.Argument(help="YAML file: its sections data and model.", show_default=False)],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Make this folder: a prepared data set per split.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start so many processes; by default one per processor, where there is much to do.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tokenise documents once, in parallel, and show how long they are.

    Example: hf-longctx prepare configs/chat.yaml --output data/prepared
    """
    from hf_longctx.commands.shared.outputs import refuse_unwritable
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.config import load_config
    from hf_longctx.run_documents import load_split, tokenizer_of
    from hf_longctx.settings.data import HELD_OUT

    chosen = load_config(config, overrides or [])
    if output is not None:
        refuse_unwritable(output, f"--output {output}")
    data = chosen.data if workers is None else chosen.data.model_copy(update={"workers": workers})
    tokenizer = tokenizer_of(chosen.model)
    console = screen()
    for split in filter(None, (data.train_split, data.held_out)):
        with _bar(split) as show:
            folder = data.train_split if split == HELD_OUT else split  # it lies there already, and is chosen from there
            dataset = load_split(data, split, tokenizer, output=output and output / folder, on_progress=show)
        _report(console, split, dataset, chosen.longctx)


class _bar:
    """A progress bar over bytes, with documents and tokens beside it."""

    def __init__(self, split: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[found]}"),
        )
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._progress.add_task(split, total=None, found="")

    def __enter__(self) -> Any:
        self._progress.start()
        return self._show

    def _show(self, now: Any) -> None:
        counts = f"{now.documents:,} documents, {now.tokens:,} tokens"
        if now.refused:
            counts += f", {now.refused:,} rows refused"
        self._progress.update(self._task, total=now.total_bytes, completed=now.bytes, found=counts)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def _report(console: Console, split: str, dataset: Dataset, longctx: LongctxConfig) -> None:
    import warnings

    from rich.table import Table
    from rich.text import Text

    from hf_longctx.data.length_index import LengthIndex
    from hf_longctx.data.long_documents import cut_documents
    from hf_longctx.data.prepared import REFUSED, PreparedDataset, length_table

    index = LengthIndex.from_dataset(dataset)
    lengths = length_table(index.lengths)
    if isinstance(dataset, PreparedDataset):
        table = Table("source", *("documents", "tokens", "learned", "longest", "bad rows", "empty rows"))
        for column in table.columns[1:]:
            column.justify = "right"
        for source in dataset.manifest.sources:
            counts = (
                source.documents,
                source.tokens,
                source.label_tokens,
                source.longest,
                source.bad_rows,
                source.empty_rows,
            )
            table.add_row(source.name, *(f"{count:,}" for count in counts))
        console.print(table)
        if sum(source.bad_rows + source.empty_rows for source in dataset.manifest.sources):
            console.print(f"What was left out: {dataset.directory / REFUSED}")
        console.print(Text.assemble((split, "bold"), f": {dataset.directory}"))
    console.print(
        f"{len(index):,} documents, {index.lengths.sum():,} tokens. p50 {lengths['p50']:,}, p90 {lengths['p90']:,}, "
        f"p99 {lengths['p99']:,}, longest {lengths['max']:,}"
    )
    most = max(lengths["histogram"].values())
    for edge, documents in lengths["histogram"].items():
        console.print(f"  up to {edge:>10,} {'█' * -(-BAR * documents // most):<{BAR}} {documents:,}")
    limit, policy = longctx.longest_document, longctx.long_documents
    if limit is not None and index.lengths.max() > limit:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cut_documents(dataset, index, policy, limit, longctx.overlap_tokens)
        console.print("\n".join(str(warning.message) for warning in caught))
