"""Muon (torch's) for matrices of hidden layers beside AdamW (torch's) for everything else, as one optimizer.

Muon makes the momentum of a matrix orthogonal (Newton-Schulz, in bfloat16) before it steps. Embeddings, the output head, norms,
biases, and what has other than two dimensions (experts that lie in one tensor) are AdamW's, as the field does it. A matrix that
ranks hold in parts is gathered for that, one at a time, and every rank makes the same step of it:

    momentum of parts   ->  gathered [rows, columns]  ->  orthogonal, on every rank  ->  this rank's part of the step

Sent: each sharded matrix's momentum once a step, over the ranks that share it; nothing where every rank holds all of it. Learning
rates are one for both: by default the step is scaled to the size that AdamW's has (arXiv 2502.16982, `match_rms_adamw`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainingArguments

from hf_longctx.settings.fields import did_you_mean
from hf_longctx.settings.training import MUON

EXAMPLE = "momentum=0.95,nesterov=true,ns_steps=5"
SWITCHES = {"true": True, "false": False}
SCALES = ("original", "match_rms_adamw")


class Setting(NamedTuple):
    """An argument of torch's Muon: how a text is read, and which values it takes."""

    read: Callable[[str], Any]
    takes: Callable[[Any], bool]
    rule: str


SETTINGS = {
    "momentum": Setting(float, lambda value: 0 <= value < 1, "at least 0 and less than 1"),
    "nesterov": Setting(lambda text: SWITCHES[text.lower()], lambda _: True, "true or false"),
    "ns_steps": Setting(int, lambda value: 1 <= value < 100, "a whole number from 1 to 99"),
    "eps": Setting(float, lambda value: 0 < value < math.inf, "more than 0, and finite"),
    "adjust_lr_fn": Setting(str, lambda value: value in SCALES, f"one of {', '.join(SCALES)}"),
    "weight_decay": Setting(float, lambda value: 0 <= value < math.inf, "at least 0, and finite"),
}
"""Names that `training.optim_args` takes with Muon, all of matrices alone."""
TOKEN_ROWS = "trainable_tokens_delta"
"""Part of the name of embeddings of some tokens that PEFT trains."""
OF_EMBEDDINGS = ("lora_embedding_", TOKEN_ROWS)
"""Parts of the names of PEFT's matrices that stand for rows of embeddings."""
SCALE = SCALES[1]


class Muon(torch.optim.Optimizer):
    """One optimizer of two kinds of groups: those of Muon, which have `momentum`, and those of AdamW, which have `betas`.

    Args:
        params: groups of weights, as Trainer or PEFT make them; each becomes two, of which one may be empty.
        lr: of groups that have none.
        is_matrix: tells Muon's weights; weights of other than two dimensions never are.
        betas, eps: AdamW's.
        muon: arguments of torch.optim.Muon; a `weight_decay` there takes the place of the groups'.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        is_matrix: Callable[[torch.Tensor], bool],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        muon: dict[str, Any] | None = None,
    ) -> None:
        settings = {"adjust_lr_fn": SCALE} | (muon or {})
        decay = settings.pop("weight_decay", None)
        groups = [dict(group) for group in params]
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            weights = list(group["params"])
            of_matrices = [weight for weight in weights if weight.ndim == 2 and is_matrix(weight)]
            taken = {id(weight) for weight in of_matrices}
            own = {} if decay is None else {"weight_decay": decay}
            matrices.append(group | own | {"params": of_matrices})
            others.append(group | {"params": [weight for weight in weights if id(weight) not in taken]})
        self._muon = torch.optim.Muon(matrices, lr=lr, **settings)
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
        super().__init__(self._muon.param_groups + self._adamw.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step both. Collective where weights are in parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        whole, in_parts = self._groups_of_muon()
        # Groups and states may have been put in their place since: by a checkpoint, or by what shards the model.
        for optimizer, groups in ((self._muon, whole), (self._adamw, self._groups_of("betas"))):
            optimizer.param_groups, optimizer.state = groups, self.state
            optimizer.step()
        for weight, group in in_parts:
            self._step_in_parts(weight, group)
        return loss

    def _groups_of(self, setting: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if setting in group]

    def _groups_of_muon(self) -> tuple[list[dict[str, Any]], list[tuple[DTensor, dict[str, Any]]]]:
        """Muon's groups of the matrices that this rank holds whole; the others, with their groups."""
        whole, in_parts = [], []
        for group in self._groups_of("momentum"):
            whole.append(group | {"params": [weight for weight in group["params"] if not isinstance(weight, DTensor)]})
            in_parts += [(weight, group) for weight in group["params"] if isinstance(weight, DTensor)]
        return whole, in_parts

    def _step_in_parts(self, weight: DTensor, group: dict[str, Any]) -> None:
        """Do what torch's Muon does with a matrix [rows, columns] of which this rank holds a part."""
        gradient = weight.grad
        if gradient is None:
            return
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Any = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update: Any = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        step = _orthogonal_step(update.full_tensor(), group)
        # Every rank has all of it, and takes its part: nothing is sent.
        own = distribute_tensor(step, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
        weight.add_(own)


def _orthogonal_step(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return what torch's Muon adds to a weight [rows, columns] whose momentum is `update`."""
    step = torch.zeros_like(update)
    step.grad = update
    settings = {name: group[name] for name in ("lr", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")}
    torch.optim.Muon([step], momentum=0.0, nesterov=False, weight_decay=0.0, **settings).step()
    return step


def hidden_matrices(model: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the trained weights of a model, or of some stages of one, that Muon is for: matrices of hidden layers, LoRA's too."""
    ends: list[torch.nn.Module] = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    head = model.get_output_embeddings()
    ends += [head] if isinstance(head, torch.nn.Module) else []
    of_ends = {
        id(weight) for module in ends for name, weight in module.named_parameters() if not name.startswith("lora_")
    }
    for name, weight in model.named_parameters():
        named_so = any(part in name for part in OF_EMBEDDINGS)
        if weight.requires_grad and weight.ndim == 2 and id(weight) not in of_ends and not named_so:
            yield weight


def muon_and_settings(args: Any, model: Any) -> tuple[type[Muon], dict[str, Any]]:
    """Return the class and its arguments but for the weights, as Trainer.get_optimizer_cls_and_kwargs does.

    Raises:
        ValueError: `args.optim_args` says what Muon has not.
    """
    matrices = {id(weight) for weight in hidden_matrices(model)}
    return Muon, {
        "lr": args.learning_rate,
        "is_matrix": lambda weight: id(weight) in matrices,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "muon": muon_settings(args.optim_args),
    }


def muon_settings(given: str | None) -> dict[str, Any]:
    """Read `momentum=0.9,ns_steps=6`, the text of `optim_args`.

    Raises:
        ValueError: a name that torch's Muon has not, or that is there twice, or a value that it does not take.
    """
    settings: dict[str, Any] = {}
    for pair in filter(None, (given or "").replace(" ", "").split(",")):
        name, _, text = pair.partition("=")
        if name not in SETTINGS:
            near = did_you_mean(name, SETTINGS)
            raise ValueError(
                f"{pair!r} is nothing that Muon takes{near}; valid: {', '.join(SETTINGS)}, as in {EXAMPLE}"
            )
        if name in settings:
            raise ValueError(f"{pair!r} after {name}={settings[name]}: {name} is written twice; keep one")
        setting = SETTINGS[name]
        with suppress(KeyError, ValueError):
            settings[name] = setting.read(text)
        if name not in settings or not setting.takes(settings[name]):
            raise ValueError(f"{name} must be {setting.rule}, got {text!r}")
    return settings


def training_arguments(fields: dict[str, Any]) -> TrainingArguments:
    """Make TrainingArguments of a file's section. Their `optim` may be Muon, which transformers has no name for: it is set when
    they are made, and LongContextTrainer knows it. Unless a field says otherwise, a loss that is not finite is logged as it is
    (Trainer would log the mean of those before it, and 0 of a first step), and a machine without an accelerator computes on its
    processors (accelerate would not count several ranks there)."""
    on_cpu: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True}
    fields = {"logging_nan_inf_filter": False} | on_cpu | fields
    if fields.get("optim") != MUON:
        return TrainingArguments(**fields)
    args = TrainingArguments(**{name: value for name, value in fields.items() if name != "optim"})
    args.optim = MUON
    return args
