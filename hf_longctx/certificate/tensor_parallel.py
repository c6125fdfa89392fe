"""Transformers' tensor parallelism, tried before a model is trained with it: a plan that leaves out a gradient, or a layer that
mixes features which lie on several ranks, is noticed by nobody else. Seen in 5.23: of 101 model types with a plan that
runs, Apertus (gradients of its activation's parameters), Gemma 3n and HRM (forward too).

    tiny copy, whole, on each rank        loss and gradients of a document, float32
    the same weights, tp_size=2           loss and gradients, put together from pairs of ranks, which zero3 makes one

Of tp_size=4 and more the same plan is tried, by twos: the copy has few heads. Sent: what transformers sends, the copy, its
gradients, and each rank's verdict. Every rank of the default process group takes part.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_longctx.certificate.certificate import quiet_and_alone
from hf_longctx.certificate.exactness import Answer, difference
from hf_longctx.certificate.kept_certificates import key_of
from hf_longctx.certificate.tiny_config import tiny_configuration
from hf_longctx.certificate.tiny_model import tiny_model
from hf_longctx.certificate.tokens import ordinary_tokens

TOKENS = 24
TRIED = 2
"""Ranks that share the copy."""
TOLERANCE = 1e-4
"""Largest difference, as a part of the largest gradient and of the loss. Rounding in float32 made 2e-6 in 98 types."""

Result = TypeVar("Result")
logger = logging.get_logger(__name__)
_seen: dict[str, str] = {}
"""Key of a class and configuration -> what was found in this process; "" where it is exact."""


def refuse_wrong_tensor_parallelism(model: Any, degree: int) -> None:
    """Raises ValueError, on all ranks, if a tiny copy of a model that was loaded with tp_size=`degree` gives another loss, or
    other gradients, over two ranks than on one. Where no copy can be tried, nothing is known, and rank 0 says so. Collective."""
    cls = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    if degree % TRIED:
        _say_unknown(f"tp_size={degree}, and a copy is tried over {TRIED} ranks")
        return
    key = key_of(cls, model.config, TRIED)
    if key not in _seen:
        _seen[key] = _problem(cls, model.config, model.device)
    if _seen[key]:
        raise ValueError(
            f"tp_size={degree}: transformers' tensor parallelism does not compute {cls.__name__} as one process does: in a tiny "
            f"copy over {TRIED} ranks, {_seen[key]}. Valid: no tp_size; documents are spread over ranks, and sharding='zero3' "
            "spreads weights"
        )


def _problem(cls: type, config: Any, device: torch.device) -> str:
    """Say what differs; "" if nothing does, or nothing could be tried."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet_and_alone(), _full_float32(), tempfile.TemporaryDirectory() as name:
            compared = _compared(cls, config, Path(name), device)
    except _Unknown as reason:
        _say_unknown(str(reason))
        return ""
    finally:
        if shown:
            logging.enable_progress_bar()
    error, where = compared
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, f"{where} differs by {error:.1e} of the largest" if error > TOLERANCE else "")
    return next(filter(None, verdicts), "")


def _compared(cls: type, config: Any, folder: Path, device: torch.device) -> tuple[float, str]:
    """Return the largest difference of a tiny copy's two answers, and where it is.

    Raises:
        _Unknown: a rank cannot give one; on all ranks.
    """
    right, ids = _by_all(lambda: _whole(cls, config, folder))
    files = [_by_all(lambda: {path.name: path.read_bytes() for path in folder.iterdir()})]
    dist.broadcast_object_list(files)

    def write() -> None:
        for name, content in files[0].items():
            (folder / name).write_bytes(content)

    _by_all(write)
    return _by_all(lambda: difference(_shared(cls, folder, ids.to(device)), right))


class _Unknown(Exception):
    """A rank could not do its part."""


def _by_all(work: Callable[[], Result]) -> Result:
    """Return the result of what all ranks do.

    Raises:
        _Unknown: one of them failed; on all ranks, with its reason.
    """
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:  # of modeling code, or of a full disk
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = next(filter(None, reasons), None)
    if failed is not None:
        raise _Unknown(failed)
    return cast(Result, result)


def _say_unknown(reason: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(f"whether tensor parallelism computes this model as one process does is not known: {reason}")


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Multiply in float32 itself where a run chose less (tf32=True): that rounds by more than TOLERANCE."""
    multiplying: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in multiplying]
    try:
        for backend in multiplying:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(multiplying, before):
            backend.fp32_precision = precision


def _whole(cls: type, config: Any, folder: Path) -> tuple[Answer, torch.Tensor]:
    """Save a tiny copy; return its answer for a document, and the document."""
    config = copy.deepcopy(config)
    config.distributed_config = None
    model = tiny_model(tiny_configuration(config, cls), torch.float32, cls=cls)
    model.save_pretrained(folder)  # on rank 0; elsewhere it writes nothing
    ids = ordinary_tokens(model.config, TOKENS)[None]
    return _answer(model, ids), ids


def _shared(cls: Any, folder: Path, ids: torch.Tensor) -> Answer:
    """Return the answer of the saved copy over pairs of ranks. Pairs are copies of each other, with the same document."""
    model = cls.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_size=TRIED, fsdp_size=dist.get_world_size() // TRIED),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return _answer(model.train(), ids)


def _answer(model: Any, ids: torch.Tensor) -> Answer:
    output = model(input_ids=ids, use_cache=False)
    logits = output.logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.to("cpu", torch.float64)
    return Answer(float(loss.detach()), gradients)
