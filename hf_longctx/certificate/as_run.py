"""Runs a certified model's tiny copy once more as the model will be trained: on its device, in its precision, with its kernels.

The certificate compares in float64, where errors and rounding cannot be confused. Here the reference is the same: the plain model
in float64, with weights rounded to the run's dtype. The copy over a layout may differ from it by what rounding does:

    bound = 4 * max(rounding of the plain model under the same conditions, 4 * eps)

of the largest gradient, and of the loss. eps is that of the dtype that products are computed in: the floor is 1.9e-6 in float32,
1.6e-2 in float16, 0.125 in bfloat16. Measured on CPU: 0.5 to 1.5 times the plain model's rounding, which is 3 to 12 eps in
float32 and 1 to 4 in bfloat16. Experts may be chosen otherwise where two are about as good, which is no error and changes
gradients by a tenth of the largest. So a copy beyond its bound is drawn anew, and one that differs in every draw is computed
wrongly. Where the plain model's own rounding makes bounds over 0.25, nothing can be told, and that is said.

Kernel "auto" may take another kernel for the copy's smaller heads. Then the copy gets the one that the model's heads would get.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from hf_longctx.attention.kernels import AttentionCall, KernelError, select_kernel
from hf_longctx.certificate import kept_certificates as cache
from hf_longctx.certificate.certificate import Certificate, patched_copy, quiet_and_alone
from hf_longctx.certificate.drawn_documents import documents_for, steps_for
from hf_longctx.certificate.exactness import answer_over, difference, plain_answer
from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of
from hf_longctx.certificate.float64 import float64_throughout
from hf_longctx.certificate.sharing import made_on_rank_0
from hf_longctx.certificate.tiny_config import tiny_configuration
from hf_longctx.certificate.tiny_model import own_configuration, tiny_model

MULTIPLE, LEAST_EPS = 4.0, 4.0
"""Factors of the bound above: of the plain model's rounding, and of eps in its floor."""
LARGEST_BOUND = 0.25
"""Share of the largest gradient beyond which a bound means nothing: planted errors differ by 0.03 and more, most by about 1."""
DRAWS = 4
"""Most draws of weights for one check."""
KERNEL_PACKAGES = (
    *("flash-attn", "flash_attn_3", "flash-attn-4", "liger-kernel", "triton"),
    *("flash-linear-attention", "mamba-ssm", "causal-conv1d", "kernels"),
)
"""Distributions with kernels that models and this package call where they are installed."""


@dataclass(frozen=True)
class Conditions:
    """Holds device, precision and kernels of a run."""

    device: str
    """Such as "cpu" or "cuda:0"."""
    weights: str
    """Their dtype, such as "float32"."""
    autocast: str | None = None
    """Dtype of products, where it is another one."""
    kernel: str = "auto"
    liger_kernels: bool = True
    experts: str | None = None
    """transformers' implementation of experts, where the model has a choice."""

    @property
    def eps(self) -> float:
        """Relative rounding of products."""
        return torch.finfo(getattr(torch, self.autocast or self.weights)).eps

    def __str__(self) -> str:
        precision = f"{self.autocast} autocast over {self.weights}" if self.autocast else self.weights
        experts = f", experts {self.experts}" if self.experts else ""
        return f"{_device_name(self.device)}, {precision}, kernel {self.kernel}{experts}"


@dataclass(frozen=True)
class RunCheck:
    """The result of running a tiny copy under the conditions of a run."""

    conditions: str
    verdict: Literal["within", "differs", "not covered"]
    error: float = float("nan")
    """The largest difference, as exactness.py has it."""
    bound: float = float("nan")
    reason: str = ""
    """Why it is not within the bound."""

    def __str__(self) -> str:
        if self.verdict == "within":
            return f"as run ({self.conditions}): {self.error:.1e}, within the rounding allowed, {self.bound:.1e}"
        return f"as run ({self.conditions}): {self.verdict}: {self.reason}"


_CHECKS: dict[str, RunCheck] = {}


def run_check(model: Any, conditions: Conditions) -> RunCheck:
    """Return how the copy of a patched model does under the conditions of a run: from this process or from disk, else anew. Each
    rank of the default process group calls this, and rank 0 runs the copy.

    Raises:
        ValueError: the copy differs by more than rounding, in every draw; says by how much. Or this rank has another model,
            code or conditions than rank 0.
        RuntimeError, TimeoutError: rank 0 has nothing; see sharing.py.
    """
    anywhere = replace(conditions, device=torch.device(conditions.device).type)  # ranks have devices of other numbers
    facts = cache.facts_of(type(model), model.config, str(anywhere))
    check = made_on_rank_0(facts, lambda: _known_check(model, conditions), RunCheck)
    if check.verdict == "differs":
        raise ValueError(
            f"{type(model).__name__} is not computed exactly over layouts {check}. It is exact in float64 on CPU. Valid: another "
            "kernel, device or precision"
        )
    return check


def _known_check(model: Any, conditions: Conditions) -> RunCheck:
    packages = tuple(_version(package) for package in KERNEL_PACKAGES)
    # As text, they name the kind of device and not its number.
    here = (str(conditions), conditions.liger_kernels)
    key = cache.key_of(type(model), model.config, here, packages, model.longctx_certificate.given)
    if key not in _CHECKS:
        check = cache.read(key, RunCheck)
        if check is None:
            with quiet_and_alone():
                check = new_run_check(model.longctx_certificate, type(model), model.config, conditions)
            if check.verdict == "within":
                cache.write(key, check)
        _CHECKS[key] = check
    return _CHECKS[key]


def new_run_check(certificate: Certificate, cls: type, config: Any, conditions: Conditions) -> RunCheck:
    """Run the copy of a certified model under the conditions of a run.

    Raises:
        RuntimeError: the copy fails over layouts where it runs as a plain model: a fault of this package, or of a kernel.
    """
    description = str(conditions)
    step = steps_for(certificate.traits)[-1]
    checks = []
    tiny = _tiny(certificate, cls, config)
    for seed in range(DRAWS):
        try:
            kernel = _kernel(own_configuration(cls, config), tiny, conditions)
            right, plain, model = _copies(cls, tiny, certificate, conditions, kernel, seed)
            documents = documents_for(tiny)
            with float64_throughout():
                answer = plain_answer(right, documents)
            on_device = tuple(document.to(conditions.device) for document in documents)
            try:
                with _as_run(conditions):
                    rounding, _ = difference(plain_answer(plain, on_device), answer)
            except Exception as problem:  # of modeling code: a dtype or a device that it does not have
                reason = f"the plain copy does not run so either: {_in_short(problem)}"
                return RunCheck(description, "not covered", reason=reason)
            with _as_run(conditions):
                error, where = difference(answer_over(model, on_device, step), answer)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except KernelError as problem:
            return RunCheck(description, "not covered", reason=f"the copy's heads do not suit the kernel: {problem}")
        except Exception as problem:
            raise RuntimeError(
                f"the tiny copy of {cls.__name__} fails over a layout ({description}), where the plain one runs: "
                f"{_in_short(problem)}. "
                "This is a fault of hf_longctx or of a kernel, which training would meet too. Valid: another kernel, device or "
                "precision"
            ) from problem
        bound = MULTIPLE * max(rounding, LEAST_EPS * conditions.eps)
        if error <= bound <= LARGEST_BOUND:
            return RunCheck(description, "within", error, bound)
        checks.append((error, bound, where))
    error, bound, where = min(checks)
    if all(error > bound for error, bound, _ in checks):
        reason = f"{where} differs by {error:.1e} of the largest, where rounding may make {bound:.1e}"
        return RunCheck(description, "differs", error, bound, f"{reason} (the best of {DRAWS} draws)")
    reason = f"the plain model itself rounds so much that differences up to {bound:.1e} mean nothing"
    return RunCheck(description, "not covered", error, bound, reason)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _tiny(certificate: Certificate, cls: type, config: Any) -> Any:
    """Return the configuration of the copy that was certified."""
    if certificate.given:
        return type(own_configuration(cls, config)).from_dict(dict(certificate.given))
    return tiny_configuration(config, cls)


def _copies(
    cls: type, tiny: Any, certificate: Certificate, conditions: Conditions, kernel: str, seed: int
) -> tuple[Any, Any, Any]:
    """Return a plain model in float64 on CPU, a plain and a patched one under the conditions of a run, of the same weights."""
    weights = getattr(torch, conditions.weights)
    right = tiny_model(tiny, seed=seed, cls=cls)
    for parameter in right.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weights).double()
    plain = _like(right, tiny_model(tiny, torch.float32, seed, cls), weights, conditions)
    patched = patched_copy(
        tiny_model(tiny, torch.float32, seed, cls), certificate.traits, kernel, conditions.liger_kernels
    )
    return right, plain, _like(right, patched, weights, conditions)


def _like(right: Any, model: Any, weights: torch.dtype, conditions: Conditions) -> Any:
    """Return a model with the weights of `right`: buffers, such as frequencies, are float32 in every run."""
    model.load_state_dict(right.state_dict())
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weights)
    if conditions.experts and conditions.experts != "eager":
        model.set_experts_implementation(conditions.experts)
    return model.to(conditions.device)


@contextlib.contextmanager
def _as_run(conditions: Conditions) -> Iterator[None]:
    dtype = getattr(torch, conditions.autocast) if conditions.autocast else None
    with torch.autocast(torch.device(conditions.device).type, dtype=dtype, enabled=dtype is not None):
        yield


def _kernel(config: Any, tiny: Any, conditions: Conditions) -> str:
    """Return the name of the kernel for the copy: that of the model's heads where "auto" would take another for the copy's."""
    if conditions.kernel != "auto":
        return conditions.kernel
    dims = [_head_dim(configuration) for configuration in (config, tiny)]
    dtype = getattr(torch, conditions.autocast or conditions.weights)
    calls = [AttentionCall.of_heads(1, 1, dim, dtype, conditions.device) for dim in dims if dim is not None]
    names = [select_kernel(call).name for call in calls]
    return "auto" if len(set(names)) < 2 else names[0]


def _head_dim(config: Any) -> int | None:
    """Return the largest head dim that the configuration of a decoder names, or hidden size / heads; None without attention."""
    text = config.get_text_config(decoder=True)
    named = [size for name, size in text.to_dict().items() if kind_of(name) is Kind.HEAD_DIM and is_size(size)]
    if named:
        return max(named)
    heads = getattr(text, "num_attention_heads", None)
    return text.hidden_size // heads if heads else None


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else torch.device(device).type


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
