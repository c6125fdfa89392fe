"""Every model type of transformers on the device, by tiny copies: is it as exact as it is in float64 on a CPU?

Each type's default configuration is certified as `patch_model` does, on processors; then its copy runs as the trainer runs it
before training (certificate/as_run.py): on the device, in each of PRECISIONS, with the kernels and the implementation of experts
that a run takes there. The families that people fine-tune come first, then the others, as long as there is time.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from acceptance.record import Bench

PRECISIONS: dict[str, dict[str, str]] = {
    "bfloat16": {"weights": "bfloat16"},
    "autocast": {"weights": "float32", "autocast": "bfloat16"},
    "float16 autocast": {"weights": "float32", "autocast": "float16"},
    "float32": {"weights": "float32"},
}
TINY_FAMILIES = ("llama", "gemma2")
MOST_PROCESSES = 12
SHARE_OF_TIME = 0.9
"""Of the part's time, after which nothing more is waited for."""

Outcome = tuple[str, str, str]
"""precision, verdict, what it says"""


def measure(bench: Bench) -> None:
    """Check family by family.

    Raises:
        RuntimeError: a copy differs by more than rounding, or fails where the plain one runs.
    """
    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    for family, outcomes in _as_checked(bench, families(bench.tiny)):
        for precision, verdict, says in outcomes:
            verdicts[verdict] += 1
            row = {"family": family, "precision": precision, "verdict": verdict, "says": says}
            bench.table("Families", [row] if verdict != "within" else [])
            if verdict in ("differs", "failed"):
                wrong.append(f"{family} in {precision}: {says}")
    counts = {verdict: str(count) for verdict, count in sorted(verdicts.items())}
    bench.table("Verdicts", [counts], {f"families/{verdict}": count for verdict, count in verdicts.items()})
    if wrong:
        raise RuntimeError(f"{len(wrong)} copies are wrong on this device: {wrong[0]}")


def families(tiny: bool) -> list[str]:
    """Model types, those that people fine-tune first."""
    from model_coverage import MOST_USED
    from tiny_copies import NOT_TEXT
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if tiny:
        return list(TINY_FAMILIES)
    others = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(MOST_USED) - set(NOT_TEXT))
    random.Random(0).shuffle(others)  # where time ends, the rest is no alphabetical half
    return [*MOST_USED, *others]


def _as_checked(bench: Bench, names: Sequence[str]) -> Iterator[tuple[str, list[Outcome]]]:
    """Each family with its outcomes, in the order in which they come, until the time is used up."""
    processes = 1 if bench.tiny else max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    futures: dict[Future[list[Outcome]], str] = {pool.submit(checked, name, str(bench.device)): name for name in names}
    waiting = set(futures.values())
    try:
        for future in as_completed(futures, timeout=max(1.0, SHARE_OF_TIME * bench.left())):
            waiting.discard(futures[future])
            error = future.exception()
            yield futures[future], [("any", "failed", str(error))] if error else future.result()
    except TimeoutError:
        bench.note(f"The time was used up before {len(waiting)} of {len(names)}: {', '.join(sorted(waiting))}.")
    finally:
        running = list(pool._processes.values())
        pool.shutdown(wait=not waiting, cancel_futures=True)
        for process in running:
            process.kill()


def checked(family: str, device: str) -> list[Outcome]:
    """Outcomes of one family in each precision; runs in a process of its own."""
    import torch
    from tiny_copies import configuration
    from transformers.utils import logging

    from hf_longctx.certificate import new_certificate
    from hf_longctx.certificate.as_run import Conditions, new_run_check
    from hf_longctx.certificate.certificate import quiet_and_alone
    from hf_longctx.certificate.tiny_model import causal_lm_class, own_configuration

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        config = configuration(family)
        cls: Any = causal_lm_class(config)
        own = own_configuration(cls, config)
        certificate = new_certificate(cls, own)
    except Exception as error:
        return [("any", "refused", _short(error))]
    if not certificate.exact:
        return [("any", "refused", certificate.reason)]
    outcomes: list[Outcome] = []
    for precision, chosen in PRECISIONS.items():
        experts = "grouped_mm" if getattr(cls, "_can_set_experts_implementation", bool)() else None
        try:
            with quiet_and_alone():
                check = new_run_check(certificate, cls, own, Conditions(device=device, experts=experts, **chosen))
            outcomes.append(
                (precision, check.verdict, check.reason or f"{check.error:.1e} of at most {check.bound:.1e}")
            )
        except Exception as error:
            outcomes.append((precision, "failed", _short(error)))
    return outcomes


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]
