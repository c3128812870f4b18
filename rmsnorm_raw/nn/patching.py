"""``patch`` and ``unpatch``: the RMSNorm modules of a finished model on our kernels.

A module is swapped by its class, so parameters, state, hooks, name and repr stay. Which formula a
Hugging Face class has, its own code says: its forward must compile to the same instructions as one
of those below, which are transformers' word for word. transformers is never imported.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch

from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.nn.norm import RMSNorm, rms_norm


class Norm(NamedTuple):
    """A norm of a model.

    Attributes:
        name: of the module, as ``named_modules`` has it.
        kind: its class's name.
        note: what it computes now, or why it was left.
    """

    name: str
    kind: str
    note: str


@dataclass(frozen=True, repr=False)
class Patched:
    """What :func:`patch` did, a line a kind of norm when printed.

    Attributes:
        swapped: the norms that are on our kernels now.
        left: the other modules that are called a norm of this kind, with the reason.
    """

    swapped: tuple[Norm, ...]
    left: tuple[Norm, ...]

    def __repr__(self) -> str:
        lines = [f"{len(self.swapped)} swapped, {len(self.left)} left"]
        for verb, norms in (("swapped", self.swapped), ("left", self.left)):
            counts = Counter((norm.kind, norm.note) for norm in norms)
            for (kind, note), count in counts.items():
                first = next(norm.name for norm in norms if (norm.kind, norm.note) == (kind, note))
                where = (first or "the model") + (f" and {count - 1} more" if count > 1 else "")
                lines.append(f"  {verb} {count} {kind} ({where}): {note}")
        return "\n".join(lines)


def patch(model: Any) -> Patched:
    """Put the RMSNorm modules of a model on our kernels, in place.

    These are torch.nn.RMSNorm and, of transformers, every RMSNorm whose code has a formula that is
    known here: those of Llama, Mistral, Qwen, Gemma and others. Weight offset, rounding and dtype
    of the result stay theirs. A subclass, a class from elsewhere, a forward that was changed, on
    the class or on the module, and what is ours already are left alone. Copies and pickles of a
    patched module are patched.

    Args:
        model: any torch.nn.Module; it may be a norm itself.

    Returns:
        What was swapped, and what was left and why; print it.

    Raises:
        InvalidInput: the model is no module.
    """
    _require_module(model)
    swapped, left = [], []
    for name, module in model.named_modules():
        kind = type(module)
        if "rmsnorm" not in kind.__name__.lower():
            continue
        formula, reason = _formula_of(module)
        if formula is None:
            left.append(Norm(name, kind.__name__, reason))
        else:
            module.__class__ = _on_ours(kind, formula)
            swapped.append(Norm(name, kind.__name__, formula.note))
    return Patched(tuple(swapped), tuple(left))


def unpatch(model: Any) -> tuple[str, ...]:
    """Give the modules that :func:`patch` swapped their own class again.

    Args:
        model: what was patched, or a part of it.

    Returns:
        Their names.

    Raises:
        InvalidInput: the model is no module.
    """
    _require_module(model)
    restored = []
    for name, module in model.named_modules():
        original = _ORIGINALS.get(type(module))
        if original is not None:
            module.__class__ = original
            restored.append(name)
    return tuple(restored)


def _require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"{model!r:.80}"
        raise InvalidInput(f"the model is {what}: give a torch.nn.Module, the model itself")


# ---- formulas ------------------------------------------------------------------------------------


class _Formula(NamedTuple):
    """A formula of transformers: how it is recognised, and what takes its place.

    Attributes:
        note: what it computes, in words.
        forward: with transformers' code.
        norm: the method that its forward calls; None for none.
        ours: forward on our kernels.
    """

    note: str
    forward: Any
    norm: Any
    ours: Callable[..., Any]


def _promoted(x: Any, weight: Any) -> Any:
    return torch.promote_types(x.dtype, weight.dtype)


def _llama(self: Any, hidden_states: Any) -> Any:
    weight = self.weight
    return rms_norm(
        hidden_states, weight, self.variance_epsilon, casting="llama",
        out_dtype=_promoted(hidden_states, weight),
    )  # fmt: skip


def _llama4(self: Any, x: Any) -> Any:
    weight = self.weight
    return rms_norm(x, weight, self.eps, casting="llama", out_dtype=_promoted(x, weight))


def _olmo2(self: Any, hidden_states: Any) -> Any:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _gemma(self: Any, x: Any) -> Any:
    return rms_norm(x, self.weight, self.eps, casting="gemma", weight_offset=1.0)


def _their_llama(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _their_olmo2(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _their_norm(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _their_llama4(self: Any, x: Any) -> Any:
    output = self._norm(x.float()).type_as(x)
    return output * self.weight


def _their_gemma(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


_TORCHS = _Formula("as F.rms_norm", None, None, RMSNorm.forward)
_FORMULAS = (
    _Formula("Llama's rounding", _their_llama, None, _llama),
    _Formula("Llama's rounding", _their_llama4, _their_norm, _llama4),
    _Formula("float32 to the end", _their_olmo2, None, _olmo2),
    _Formula("Gemma's 1 + weight", _their_gemma, _their_norm, _gemma),
)


def _formula_of(module: Any) -> tuple[_Formula | None, str]:
    """A module's formula; None, and why, where it is to be left alone."""
    if "forward" in vars(module):
        return None, "its forward was replaced, on the module itself"
    formula, reason = _formula_of_class(type(module))
    weight = module._parameters.get("weight")
    if formula is not None and formula is not _TORCHS and (weight is None or weight.dim() != 1):
        return None, "its weight is not of one dimension"
    return formula, reason


def _formula_of_class(kind: Any) -> tuple[_Formula | None, str]:
    if kind in _ORIGINALS or issubclass(kind, RMSNorm):
        return None, "is ours already"
    if kind is torch.nn.RMSNorm:
        forward = kind.forward
        if (forward.__module__, forward.__qualname__) != (kind.__module__, "RMSNorm.forward"):
            return None, "torch.nn.RMSNorm's forward was replaced"
        return _TORCHS, ""
    if not kind.__module__.startswith("transformers.models."):
        return None, f"a class that is not known: {kind.__module__}.{kind.__qualname__}"
    if kind.__call__ is torch.nn.Module.__call__:
        for formula in _FORMULAS:
            if _is_code_of(kind.forward, formula.forward) and (
                formula.norm is None or _is_code_of(kind._norm, formula.norm)
            ):
                return formula, ""
    return None, "its forward is no formula that is known"


def _is_code_of(theirs: Any, known: FunctionType) -> bool:
    """Whether a function does what a known one does, instruction by instruction."""
    if not isinstance(theirs, FunctionType):
        return False
    one, other = theirs.__code__, known.__code__
    names = ("co_code", "co_consts", "co_names", "co_argcount", "co_kwonlyargcount")
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and one.co_varnames[1 : one.co_argcount] == other.co_varnames[1 : other.co_argcount]
        and (one.co_flags ^ other.co_flags) & _ARGUMENT_FLAGS == 0
        and theirs.__globals__.get("torch") is torch
        and theirs.__closure__ is theirs.__defaults__ is None
    )


_ARGUMENT_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR


# ---- classes -------------------------------------------------------------------------------------

_ORIGINALS: dict[type, type] = {}
_OURS: dict[type, type] = {}


def _on_ours(original: type, formula: _Formula) -> type:
    """A class like the original, and a subclass of it, with our forward; made once."""
    if original not in _OURS:
        base = RMSNorm if original is torch.nn.RMSNorm else original
        names = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(original, name) for name in names}
        body |= {"forward": formula.ours, "__reduce_ex__": _reduce}
        _OURS[original] = type(original.__name__, (base,), body)
        _ORIGINALS[_OURS[original]] = original
    return _OURS[original]


def _reduce(self: Any, protocol: Any) -> Any:
    """For ``copy`` and ``pickle``, which cannot name the class."""
    original = _ORIGINALS.get(type(self))
    if original is None:  # a class that somebody derived from it
        return object.__reduce_ex__(self, protocol)
    _, _, state, *_ = super(type(self), self).__reduce_ex__(2)
    return _remade, (original,), state


def _remade(original: Any) -> Any:
    """A patched module without state; of the original class where its code is another one here."""
    module = original.__new__(original)
    formula, _ = _formula_of_class(original)
    if formula is not None:
        module.__class__ = _on_ours(original, formula)
    return module
