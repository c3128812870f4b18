"""patch and unpatch, on tiny models of transformers, made from their configs."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch_cases as plain  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402

from rmsnorm_raw import nn  # noqa: E402
from rmsnorm_raw.errors import InvalidInput  # noqa: E402
from rmsnorm_raw.nn import norm, whole  # noqa: E402

#: model type -> the class of its norms, and how many a layer has
FAMILIES = {
    "llama": ("LlamaRMSNorm", 2),
    "mistral": ("MistralRMSNorm", 2),
    "qwen2": ("Qwen2RMSNorm", 2),
    "qwen3": ("Qwen3RMSNorm", 4),  # q and k too, a head at a time
    "gemma": ("GemmaRMSNorm", 2),
    "gemma2": ("Gemma2RMSNorm", 4),
    "gemma3_text": ("Gemma3RMSNorm", 6),
    "olmo2": ("Olmo2RMSNorm", 4),
}
LAYERS, VOCABULARY = 2, 64


def tiny(family: str, dtype: Any = torch.float32) -> Any:
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=0,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # weights of one would hide how they are used
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight.add_(0.3 * torch.randn_like(module.weight))
    return model


TOKENS = torch.arange(20).view(2, 10) * 3 % VOCABULARY


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def loss_and_gradients(model: Any) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_did(family: str, dtype: Any) -> None:
    """Bit for bit on a CPU: the plain formula is theirs, operation by operation."""
    model = tiny(family, dtype)
    kind, a_layer = FAMILIES[family]
    before, state, text = logits(model), list(model.state_dict()), repr(model)
    patched = nn.patch(model)
    assert len(patched.swapped) == a_layer * LAYERS + 1
    assert {norm.kind for norm in patched.swapped} == {kind}
    assert patched.left == ()
    assert list(model.state_dict()) == state
    assert repr(model) == text
    assert plain.same(logits(model), before)
    assert sorted(nn.unpatch(model)) == sorted(norm.name for norm in patched.swapped)
    assert plain.same(logits(model), before)
    assert nn.unpatch(model) == ()
    assert not any(type(module) in nn.patching._ORIGINALS for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_it_did(family: str) -> None:
    model = tiny(family)
    loss, gradients = loss_and_gradients(model)
    nn.patch(model)
    got_loss, got = loss_and_gradients(model)
    assert got_loss == loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_patched_model_is_compiled_in_one_graph(family: str) -> None:
    torch._dynamo.reset()
    model = tiny(family, torch.bfloat16)
    before = logits(model)
    nn.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert plain.same(logits(compiled), before)
    nn.unpatch(model)
    assert plain.same(logits(compiled), before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_kernels_compute_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    before = logits(model)
    nn.patch(model)
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_generation_goes_on() -> None:
    model = tiny("qwen3")
    more = {"max_new_tokens": 5, "do_sample": False}
    before = model.generate(TOKENS, **more)
    nn.patch(model)
    assert torch.equal(model.generate(TOKENS, **more), before)


def test_copies_pickles_and_saved_states(tmp_path: Any) -> None:
    model = tiny("gemma2")
    before = logits(model)
    count = len(nn.patch(model).swapped)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]  # fmt: skip
    for other in others:
        assert plain.same(logits(other), before)
        assert len(nn.unpatch(other)) == count
        assert plain.same(logits(other), before)
    assert len(nn.unpatch(model)) == count  # the copies' classes were their own affair
    nn.patch(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.same(logits(again), before)


def test_a_class_derived_from_a_patched_one_is_copied() -> None:
    """As those that shard or parametrise a module make."""
    module = torch.nn.RMSNorm(8)
    nn.patch(module)
    kind = module.__class__ = type("ShardedRMSNorm", (type(module),), {})
    made = copy.deepcopy(module)
    assert type(made) is kind
    assert torch.equal(made.weight, module.weight)
    assert made.weight is not module.weight


def test_hooks_and_attributes_stay() -> None:
    model = tiny("llama")
    first = model.model.layers[0].input_layernorm
    weight, seen = first.weight, []
    first.register_forward_hook(lambda *_: seen.append(1))
    first.note = "mine"
    nn.patch(model)
    logits(model)
    assert seen == [1]
    assert model.model.layers[0].input_layernorm is first
    assert first.weight is weight
    assert first.note == "mine"
    assert isinstance(first, LlamaRMSNorm)


# ---- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_norm_has_the_dtype_and_rounding_it_had(kind: Any, dtype: Any, weight_dtype: Any) -> None:
    """Llama's gives the promoted dtype, fp32 for a bf16 x and an fp32 weight."""
    module = kind(plain.COLS, eps=1e-5).to(weight_dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(plain.COLS))
    x = plain.maker(dtype, "cpu")(7, plain.COLS)
    x = x.view(7, 4, -1).transpose(0, 1).reshape(4, 7, -1) if plain.COLS % 4 else x
    want = module(x)
    assert nn.patch(module).swapped[0].name == ""
    assert plain.same(module(x), want)


def test_torchs_own_norm() -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.RMSNorm((3, 8), 1e-3, False))
    text, x = repr(model), torch.randn(5, 3, 8)
    want = model(x)
    patched = nn.patch(model)
    assert [norm.name for norm in patched.swapped] == ["0", "1"]
    assert isinstance(model[0], nn.RMSNorm)
    assert repr(model) == text
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(copy.deepcopy(model)(x), want)
    nn.unpatch(model)
    assert [type(module) for module in model] == [torch.nn.RMSNorm] * 2
    assert torch.equal(model(x), want)


def test_it_goes_the_way_of_our_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of equal results would pass with nothing swapped."""
    calls: list[Any] = []
    call = whole.call
    monkeypatch.setattr(whole, "call", lambda *a, **k: calls.append(a[5]) or call(*a, **k))
    module = LlamaRMSNorm(8)
    nn.patch(module)
    module(torch.ones(2, 8, dtype=torch.bfloat16))
    assert (calls[0].casting, calls[0].out_dtype) == ("llama", torch.float32)
    module = GemmaRMSNorm(8)
    nn.patch(module)
    module(torch.ones(2, 8))
    assert calls[1].weight_offset == 1.0
    monkeypatch.setattr(norm, "forward", lambda *a, **k: calls.append("plain") or (a[0], None))
    module = torch.nn.RMSNorm(8)
    nn.patch(module)
    module.requires_grad_(False)(torch.ones(2, 8))
    assert calls[2:] == ["plain"]


# ---- what is left alone --------------------------------------------------------------------------


class MyRMSNorm(LlamaRMSNorm):
    """A subclass may compute something else."""


class Scaled(torch.nn.RMSNorm):
    """A name without a norm in it."""


class TwiceRMSNorm(torch.nn.RMSNorm):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def reason(module: Any) -> str:
    kind = type(module)
    patched = nn.patch(torch.nn.Sequential(module))
    assert type(module) is kind
    assert patched.swapped == ()
    (left,) = patched.left
    assert (left.name, left.kind) == ("0", kind.__name__)
    return left.note


def test_what_is_not_known_is_left_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(MyRMSNorm(8)) == "a class that is not known: test_patch.MyRMSNorm"
    assert reason(TwiceRMSNorm(8)) == "a class that is not known: test_patch.TwiceRMSNorm"
    assert nn.patch(torch.nn.Sequential(Scaled(8), torch.nn.LayerNorm(8))).left == ()
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    assert reason(Gemma3nRMSNorm(8)) == "its forward is no formula that is known"
    module = LlamaRMSNorm(8)
    module.forward = lambda x: x
    assert reason(module) == "its forward was replaced, on the module itself"
    module = LlamaRMSNorm(8)
    module.weight = torch.nn.Parameter(torch.ones(2, 8))
    assert reason(module) == "its weight is not of one dimension"
    assert reason(nn.RMSNorm(8)) == "is ours already"
    module = LlamaRMSNorm(8)
    nn.patch(module)
    assert reason(module) == "is ours already"
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.RMSNorm(8), dim=0)
    assert "not known" in reason(module)


THEIRS = """
import torch

def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""


def forward_of(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return names["forward"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.variance_epsilon", "self.eps"),
        ("pow(2)", "pow(4)"),
        ("rsqrt", "sqrt"),
        ("self.weight * hidden_states.to(input_dtype)", "hidden_states.to(input_dtype)"),
        ("import torch", "import numpy as torch"),
        ("(self, hidden_states)", "(self, hidden_states, *rest)"),
        ("(self, hidden_states)", "(self, hidden_states=None)"),
        ("(self, hidden_states)", "(self, *, hidden_states)"),
        ("hidden_states", "x"),  # a caller may name it
        ("def forward", "import functools\n@functools.cache\ndef forward"),
    ],
)
def test_a_changed_forward_is_left(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert old in THEIRS
    monkeypatch.setattr(LlamaRMSNorm, "forward", forward_of(THEIRS.replace(old, new)))
    assert reason(LlamaRMSNorm(8)) == "its forward is no formula that is known"


def test_the_same_code_is_known_under_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text = THEIRS.replace("variance =", "v =").replace("rsqrt(variance", "rsqrt(v")
    monkeypatch.setattr(LlamaRMSNorm, "forward", forward_of(text))
    assert len(nn.patch(LlamaRMSNorm(8)).swapped) == 1


def test_a_changed_helper_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemmaRMSNorm, "_norm", lambda self, x: x)
    assert reason(GemmaRMSNorm(8)) == "its forward is no formula that is known"


def test_torchs_changed_forward_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", lambda self, x: x)
    assert reason(torch.nn.RMSNorm(8)) == "torch.nn.RMSNorm's forward was replaced"


def test_what_was_done_is_said() -> None:
    model = tiny("qwen3")
    model.model.layers[1].extra = torch.nn.Sequential(MyRMSNorm(8), torch.nn.RMSNorm(8))
    assert repr(nn.patch(model)) == (
        "10 swapped, 1 left\n"
        "  swapped 9 Qwen3RMSNorm (model.layers.0.self_attn.q_norm and 8 more): Llama's rounding\n"
        "  swapped 1 RMSNorm (model.layers.1.extra.1): as F.rms_norm\n"
        "  left 1 MyRMSNorm (model.layers.1.extra.0): a class that is not known: "
        "test_patch.MyRMSNorm"
    )
    assert repr(nn.patch(torch.nn.Linear(2, 2))) == "0 swapped, 0 left"
    module = LlamaRMSNorm(8)
    assert "swapped 1 LlamaRMSNorm (the model): Llama's rounding" in repr(nn.patch(module))


def test_nothing_of_transformers_is_imported() -> None:
    code = (
        "import sys, torch, rmsnorm_raw as rr; rr.nn.patch(torch.nn.RMSNorm(8));"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("call", [nn.patch, nn.unpatch])
@pytest.mark.parametrize("model", [3, None, torch.nn.RMSNorm, {"norm": torch.nn.RMSNorm(4)}])
def test_what_is_no_module_is_refused_with_what_to_give(call: Any, model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"give a torch\.nn\.Module"):
        call(model)
