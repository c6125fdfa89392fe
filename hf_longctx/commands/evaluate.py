"""`hf-longctx evaluate`: what a model makes of long documents, and what it finds in them, across ranks.

    hf-longctx evaluate runs/mine --against embedded:smollm2-135m --output evaluation
    torchrun --nproc_per_node 8 -m hf_longctx evaluate runs/mine --data my.yaml --lengths 32768,131072

Started by torchrun or `accelerate launch`, all processes take part; otherwise `--ranks` processes are started here. Every
rank loads the model and the documents; the first one shows what was found. evaluation/ says what is measured, and what is
sent.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_longctx.commands.shared.inference_precision import (
    DTYPE_HELP,
    InferenceDtype,
    InferencePrecision,
    inference_precision,
)
from hf_longctx.commands.shared.loading import UNCERTIFIED_HELP
from hf_longctx.commands.shared.tokens import read_size, token_count
from hf_longctx.whole_files import written_whole

if TYPE_CHECKING:
    from rich.console import Console

    from hf_longctx.inference.evaluation.evaluate import Evaluation

LOSSES, RETRIEVAL = ("position", "length"), ("passkey", "needle")
TASKS = (*LOSSES, *RETRIEVAL)

HIDDEN_IN: tuple[tuple[int, ...], ...] = ((1024,), (1024, 4096))
"""Lengths in tokens, on processors and on GPUs: a small model reads hundreds of tokens a second on a core. Documents are joined
up to the longest of these everywhere."""
TRIALS = (1, 4)
"""Texts for each length and place, on processors and on GPUs."""


@dataclass(frozen=True)
class Wanted:
    """Options of one evaluation."""

    model: str
    against: str | None
    data: str
    split: str | None
    tasks: tuple[str, ...] | None
    """None: all that can be done"""
    lengths: tuple[int, ...] | None
    """None: HIDDEN_IN, by device"""
    depths: int
    trials: int | None
    """None: TRIALS, by device"""
    seed: int
    near: int
    capacity: int | None
    dtype: InferenceDtype
    output: Path | None
    uncertified: bool = False


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Directory of a model, checkpoint, run or adapter; a hub id; embedded:smollm2-135m.",
            show_default=False,
        ),
    ],
    against: Annotated[str | None, typer.Option(help="Compare with another model.", show_default=False)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Read documents: a YAML file's, or files, a directory, a hub's data set. By default what the run MODEL held "
            "out, or was trained on where it held out nothing; of other models embedded:python-sources.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Take this split of the data; by default a YAML file's eval_split, or test.", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Do some of position, length, passkey and needle; by default all, or the first two where there is no tokenizer.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Hide a passkey or needle in texts of so many tokens; by default 1024,4096, or 1024 on processors.",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[int, typer.Option(min=1, help="Hide it at so many places, from beginning to end.")] = 5,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Make so many texts for each length and place; by default 4, or 1 on processors.",
            show_default=False,
        ),
    ] = None,
    near: Annotated[
        int,
        typer.Option(
            parser=token_count(0), help="Measure the loss near by, too, with so many tokens of context; 0: do not."
        ),
    ] = 512,
    capacity: Annotated[
        int | None,
        typer.Option(
            parser=token_count(),
            help="Run so many tokens on a process at once; by default what is needed.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[InferenceDtype, typer.Option(help=DTYPE_HELP)] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Draw by this seed what is hidden and where.")] = 0,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Start so many processes; by default one per GPU here.", show_default=False),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on processors, even if there is a GPU.")] = False,
    uncertified: Annotated[bool, typer.Option("--uncertified", help=UNCERTIFIED_HELP)] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write evaluation.json and pictures there.", show_default=False)
    ] = None,
) -> None:
    """Measure loss by position and length, and what is found in long texts; compare two models.

    Example: hf-longctx evaluate embedded:smollm2-135m --lengths 512 --depths 3 --output evaluation
    """
    from hf_longctx.commands.checkpoints.evaluated_documents import data_of
    from hf_longctx.commands.shared.loading import resolved
    from hf_longctx.commands.shared.outputs import refuse_unwritable
    from hf_longctx.commands.shared.ranks import launched, on_ranks

    wanted = Wanted(
        model=model,
        against=against,
        data=data_of(model) if data is None else data,
        split=split,
        tasks=None if tasks is None else _tasks(tasks),
        lengths=None if lengths is None else _lengths(lengths),
        depths=depths,
        trials=trials,
        seed=seed,
        near=near,
        capacity=capacity,
        dtype=dtype,
        output=output,
        uncertified=uncertified,
    )
    if not launched():  # what is wrong with a name is said before processes start
        if output is not None:
            refuse_unwritable(output, f"--output {output}")
        for name in (model, *([against] if against else [])):
            resolved(name)
    on_ranks(evaluate_on_rank, wanted, ranks=ranks, cpu=cpu)


def _tasks(given: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"--tasks {', '.join(unknown)} unknown; valid: {', '.join(TASKS)}, separated by commas")
    if not names:
        raise ValueError(f"--tasks {given!r} names none; valid: {', '.join(TASKS)}, separated by commas")
    return names


def _lengths(given: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({read_size(text.strip()) for text in given.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or lengths[0] < 1:
        raise ValueError(f"--lengths {given!r} must be numbers of tokens, separated by commas: 1024,4096, or 1K,4K")
    return lengths


def evaluate_on_rank(device: Any, exchange: Any, wanted: Wanted) -> None:
    """Do one rank's part of it."""
    from hf_longctx.commands.checkpoints.evaluated_documents import read_rows
    from hf_longctx.commands.shared.loading import resolved
    from hf_longctx.commands.shared.ranks import first_process_first, is_first
    from hf_longctx.inference.evaluation.evaluate import compared_json
    from hf_longctx.inference.evaluation.losses import as_documents
    from hf_longctx.inference.evaluation.retrieval import even_depths, make_trials, pieces_of
    from hf_longctx.report.training_runs.saved_weights import weights_hash

    lengths = wanted.lengths or HIDDEN_IN[device.type != "cpu"]
    names = [wanted.model, *([wanted.against] if wanted.against else [])]
    with first_process_first():
        paths = [resolved(name) for name in names]
        tokenizer = _tokenizer(paths, wanted)
        tasks = wanted.tasks or (LOSSES if tokenizer is None else TASKS)
        hidden = [task for task in tasks if task in RETRIEVAL]
        documents = as_documents(
            read_rows(wanted.data, wanted.split, max(wanted.lengths or HIDDEN_IN[True]), tokenizer)
        )
    haystack = []
    if "needle" in hidden:
        haystack = pieces_of(tokenizer, [tokenizer.decode(document.ids) for document in documents])
    depths, times = even_depths(wanted.depths), wanted.trials or TRIALS[device.type != "cpu"]
    trials = make_trials(tokenizer, hidden, lengths, depths, trials=times, haystack=haystack, seed=wanted.seed)
    if len(hidden) == len(tasks):
        documents = []
    if is_first() and trials and wanted.tasks is None:
        _announce(trials)
    weights = {"weights": weights_hash(Path(paths[0]))} if is_first() else {}
    precision = inference_precision(paths, wanted.dtype, device)
    evaluations, dtypes = zip(
        *(
            _evaluated(path, name, device, exchange, wanted, documents, trials, precision)
            for path, name in zip(paths, names)
        )
    )
    if not is_first():
        return
    if tokenizer is None and wanted.tasks is None:
        print(f"No tokenizer beside {wanted.model}: {' and '.join(RETRIEVAL)} are left out")
    results: dict[str, Any] = {"model": wanted.model} | weights | _asked_for(evaluations[0].to_json(), tasks)
    if wanted.against:
        results["against"] = {"model": wanted.against} | _asked_for(evaluations[1].to_json(), tasks)
        if difference := _asked_for(compared_json(*evaluations), tasks):
            results["difference"] = difference
    results["environment"] = environment(device, exchange, wanted, dtypes)
    report(results, wanted.output)


def _announce(trials: Sequence[Any]) -> None:
    """Say how much there is to read in what was not asked for by name."""
    tokens = sum(len(trial.prompt) + len(trial.answer) for trial in trials)
    typer.echo(
        f"{' and '.join(RETRIEVAL)}: {len(trials)} texts, together {tokens:,} tokens; --lengths, --depths and --trials make them "
        f"fewer, --tasks {','.join(LOSSES)} leaves them out",
        err=True,
    )


def _tokenizer(paths: Sequence[str], wanted: Wanted) -> Any:
    """The model's; None where it has none and documents are tokens already. Two models must have the same one."""
    from hf_longctx.commands.shared.loading import load_tokenizer
    from hf_longctx.settings import EMBEDDED_DATA

    try:
        tokenizers = [load_tokenizer(path) for path in paths]
    except ValueError as error:
        if wanted.data == EMBEDDED_DATA:
            raise
        if any(task in RETRIEVAL for task in wanted.tasks or ()):
            raise ValueError(
                f"{error}; or --tasks {','.join(LOSSES)}, which need none where documents are tokens"
            ) from error
        return None
    if any(tokenizer.get_vocab() != tokenizers[0].get_vocab() for tokenizer in tokenizers):
        raise ValueError(
            f"{wanted.model} and {wanted.against} have different vocabularies: their losses are of different tokens, and cannot "
            "be compared. Valid: two models with one tokenizer"
        )
    return tokenizers[0]


def _evaluated(
    path: str,
    name: str,
    device: Any,
    exchange: Any,
    wanted: Wanted,
    documents: Sequence[Any],
    trials: Sequence[Any],
    precision: InferencePrecision,
) -> tuple[Evaluation, str]:
    """Evaluate, and return what was found with what it was computed in."""
    from hf_longctx.commands.checkpoints.checkpoint_weights import advice
    from hf_longctx.commands.shared.loading import load_model
    from hf_longctx.inference.evaluation.evaluate import evaluate_model

    model = load_model(path, precision.weights, device, wanted.uncertified)
    _refuse_beyond_positions(model, documents, trials, wanted)
    with _bar(name) as show, precision.computing(device, keep_casts=False):
        evaluation = evaluate_model(
            model, documents, trials, exchange=exchange, capacity=wanted.capacity, near=wanted.near, on_progress=show
        )
    if evaluation.losses is not None and not math.isfinite(evaluation.losses.loss):
        raise ValueError(
            f"the loss of {name} is {evaluation.losses.loss}, computed in {precision.said_of(model)}: some of its logits are not "
            f"finite. {advice(model.dtype)}"
        )
    return evaluation, precision.said_of(model)


def _refuse_beyond_positions(model: Any, documents: Sequence[Any], trials: Sequence[Any], wanted: Wanted) -> None:
    """Raise ValueError for documents and texts that are longer than a model has positions for, naming the options that help."""
    from hf_longctx.models.documents import longest_of, refuse_beyond_positions
    from hf_longctx.settings import EMBEDDED_DATA

    most = longest_of(model)
    texts = [len(trial.prompt) + len(trial.answer) - 1 for trial in trials]
    refuse_beyond_positions(model, max(texts, default=0), "a text of --lengths", f": --lengths {most}")
    lengths = [len(document.ids) for document in documents]
    if lengths:
        longest = max(lengths)
        which = f"document {lengths.index(longest)} of {wanted.data}"
        shorter = f"--lengths {most}, or other --data" if wanted.data == EMBEDDED_DATA else "other --data"
        refuse_beyond_positions(model, longest, which, f": {shorter}")


@contextmanager
def _bar(name: str) -> Iterator[Any]:
    """A progress bar over tokens, of the first rank."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from hf_longctx.commands.shared.ranks import is_first

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    silent = not (is_first() and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _asked_for(results: dict[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Leave out the tables that --tasks does."""
    hidden = {f"by_{task}" for task in LOSSES if task not in tasks}
    return {key: value for key, value in results.items() if key not in hidden}


def environment(device: Any, exchange: Any, wanted: Wanted, dtypes: Sequence[str]) -> dict[str, str]:
    """Describe what the results were found with. `dtypes`: what the models were computed in, in their order."""
    from importlib.metadata import version

    import torch

    from hf_longctx.commands.checkpoints.evaluated_documents import described

    return {
        "data": described(wanted.data, wanted.split),
        "near": str(wanted.near),
        "seed": str(wanted.seed),
        "dtype": ", ".join(dict.fromkeys(dtypes)),
        "ranks": str(exchange.world_size if exchange is not None else 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
    } | {name: version(name) for name in ("hf_longctx", "torch", "transformers")}


def report(results: dict[str, Any], output: Path | None) -> None:
    """Tables for the terminal; evaluation.json and pictures for `output`."""
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.inference.evaluation.result_tables import show

    console = screen()
    show(results, console)
    if output is not None:
        _write(results, output, console)


def _write(results: dict[str, Any], output: Path, console: Console) -> None:
    from hf_longctx.report.pictures.canvas import PictureError
    from hf_longctx.report.pictures.evaluation_pictures import draw_evaluation

    output.mkdir(parents=True, exist_ok=True)
    with written_whole(output / "evaluation.json") as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    written = [output / "evaluation.json"]
    try:
        written += draw_evaluation(results, output)
    except PictureError as error:
        console.print(f"no pictures: {error}", soft_wrap=True)
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)
