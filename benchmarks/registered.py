"""What attn_implementation="longctx" without `patch_model` does with a tiny model: exact, refused, or something else."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hf_longctx.certificate import float64_throughout, tiny_configuration, tiny_model
from hf_longctx.certificate.drawn_documents import documents_for, packed_layout
from hf_longctx.certificate.exactness import TOLERANCE
from hf_longctx.models.loss.own_logits import base_of

EXACT, REFUSED = "exact", "refused"


def registered(cls: type, config: Any) -> tuple[str, str]:
    """Return what a class gives with a layout, and without one: EXACT, REFUSED (a ValueError), or what is wrong; "-" where no
    tiny copy of its plain model runs."""
    with float64_throughout(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny = tiny_configuration(config, cls=cls)
            plain = tiny_model(tiny, cls=cls).eval()
            documents = documents_for(plain.config)
            right = [plain(input_ids=ids[None], use_cache=False).logits for ids in documents]
        except Exception:
            return "-", "-"
        try:
            model = tiny_model(tiny, cls=cls, attn_implementation="longctx").eval()
        except Exception as error:
            return _refusal(error), _refusal(error)
        packed, layout = torch.cat(documents)[None], packed_layout()
        with_layout = _outcome(
            lambda: [model(input_ids=packed, layout=layout, use_cache=False).logits], [torch.cat(right, 1)]
        )
        base = base_of(model)
        if with_layout == REFUSED and base is not model:  # whose output nobody can compare: it must be refused too
            with_layout = _outcome(lambda: [base(input_ids=packed, layout=layout, use_cache=False)[0]], None)
        alone = _outcome(lambda: [model(input_ids=ids[None], use_cache=False).logits for ids in documents], right)
        return with_layout, alone


def _outcome(run: Callable[[], list[torch.Tensor]], right: list[torch.Tensor] | None) -> str:
    try:
        results = run()
    except Exception as error:
        return _refusal(error)
    if right is None:
        return "wrong: the base model takes it"
    largest = max(float(logits.abs().max()) for logits in right)
    worst = max(float((ours - logits).abs().max()) for ours, logits in zip(results, right)) / largest
    return EXACT if worst <= TOLERANCE else f"wrong: {worst:.0e}"


def _refusal(error: Exception) -> str:
    """Tell refusals from crashes."""
    return REFUSED if isinstance(error, ValueError) else f"{type(error).__name__}: {str(error)[:80]}"
