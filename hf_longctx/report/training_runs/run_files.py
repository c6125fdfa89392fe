"""Rules for the files of a run that pages and cards are made of, and how one is read.

Other keys are let through. What a file does not have, a report leaves out; what is there and is something else than a run
writes is an error that names the file and the place in it.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError

LARGEST_EXPONENT = 700.0
"""Largest exponent of which a float still holds the exponential."""


class Anything(BaseModel):
    """Any keys."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def _or_nothing(given: Any) -> Any:
    return None if given == {} else given


class _Losses(Anything):
    """Losses of tokens at some positions, or in documents of some lengths."""

    begin: int = Field(alias="from")
    end: int = Field(alias="to")
    tokens: int
    loss: float


class _Cell(Anything):
    """How often something hidden was found."""

    task: str
    length: int
    depth: float
    trials: int
    found: int


class Evaluation(Anything):
    """evaluation.json"""

    weights: str | None = None
    """of which weights it is (saved_weights.py); None: not known, as in files of earlier versions"""
    loss: float | None = None
    by_position: list[_Losses] = []
    by_length: list[_Losses] = []
    retrieval: list[_Cell] = []


class _Logged(Anything):
    """Measurements that were logged at once."""

    step: StrictInt = 0


class State(Anything):
    """trainer_state.json"""

    log_history: list[_Logged] = []


class Results(Anything):
    """results.json"""

    eval_loss_before: float = 0.0


class _Model(Anything):
    parameters: int
    trained_parameters: int
    dtype: str
    adapter: dict[str, Any] | None = None
    rope: dict[str, Any] | None = None
    certificate: str | None = None
    """what is known of its exactness over layouts"""


class _Documents(Anything):
    begin: int = Field(alias="from")
    end: int = Field(alias="to")
    documents: int
    tokens: int


class _Data(Anything):
    sources: list[str]
    datasets: list[str]
    documents: int
    tokens: int
    p50: int
    p90: int
    p99: int
    longest: int
    by_length: list[_Documents] = []


class _Parallelism(Anything):
    devices: int
    planner: str
    sharding: str
    capacity: int
    pipeline_stages: int = 1


class _Training(Anything):
    steps: int
    epochs: float
    optim: str
    learning_rate: float
    lr_scheduler_type: str
    autocast: str | None
    precision: str | None = None
    """what `bf16: auto` came to, and why; None: somebody chose it"""
    seconds: float | None = None
    """of training, at all starts; None: not known"""
    seed: int


class _Longest(Anything):
    row: int
    tokens: int
    ranks: int


class _Slow(Anything):
    step: int
    seconds: float
    longest: _Longest
    rows: list[int] = []
    """of the step's documents in the data set; records of earlier versions have none"""
    plan: dict[str, Any]


class Record(Anything):
    """run.json; of sections, all or nothing."""

    name: str
    model: Annotated[_Model | None, BeforeValidator(_or_nothing)]
    data: Annotated[_Data | None, BeforeValidator(_or_nothing)]
    parallelism: Annotated[_Parallelism | None, BeforeValidator(_or_nothing)]
    training: Annotated[_Training | None, BeforeValidator(_or_nothing)]
    environment: dict[str, str]
    slowest: list[_Slow]
    configuration: dict[str, Any] | None


def read_file(path: Path, kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON object in a file, as it is; empty where there is no such file.

    Raises:
        ValueError: it cannot be read, or is not of this kind.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    refuse_other(path, content, kind)
    return content


def refuse_other(path: Path, content: dict[str, Any], kind: type[BaseModel]) -> None:
    """Raises ValueError for what is not of this kind; `path` is what it was read from."""
    try:
        kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: {where}: {first['msg']}: no run and no `hf-longctx evaluate` writes it so. Remove the file, or bring back "
            "the one that was written"
        ) from None


def perplexity(loss: float) -> float:
    """exp(loss), infinite where no number holds it."""
    return math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
