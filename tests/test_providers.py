"""The providers on CPU tensors: their gate, and that the adapters call what they say they call."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rmsnorm_raw import bounds, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.clones import clone_plans
from rmsnorm_raw.errors import WrongResult
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study import peer_gate, tensors
from rmsnorm_raw.study import providers as study
from rmsnorm_raw.study.cells import cells
from rmsnorm_raw.study.providers import Cell, providers, recorded_winner

torch = pytest.importorskip("torch")

PAIRS = [(c.dtype, c.weight_dtype) for c in cells()[:10:2]]
PEERS = {provider.name: provider for provider in providers()}
#: the rows leave a rest of the gate's blocks below
ROWS, COLS = 37, 256


def cell_of(op: str, backend: Backend, dtype: str = "bf16", weight: str | None = "same") -> Cell:
    make = Problem.forward if op == "forward" else Problem.backward
    problem = make(ROWS, COLS, dtype, weight_dtype=weight)
    return Cell(problem, workbench.default_config(problem, backend.device), backend)


# ---- who there is --------------------------------------------------------------------------------


def test_ours_comes_first_then_the_five_peers() -> None:
    assert list(PEERS) == ["ours", "quack", "quack_searched", "liger", "torch", "compile"]


def test_compile_is_compared_in_bf16_alone() -> None:
    served = [problem for problem in cells() if PEERS["compile"].serves(problem)]
    assert len(served) == 18
    assert {(p.dtype, p.weight_dtype) for p in served} == {("bfloat16", "bfloat16")}
    assert all(PEERS["quack"].serves(problem) for problem in cells())


def test_what_is_missing_is_named_with_how_to_install_it() -> None:
    nowhere = dataclasses.replace(PEERS["liger"], module="no_such_package.ops.rms_norm")
    assert nowhere.missing() == "liger is not installed: pip install liger-kernel"
    assert PEERS["torch"].missing() is None
    assert PEERS["torch"].version == torch.__version__


def test_clones_exceed_the_cache_as_our_own_do(cpu64: Backend) -> None:
    cell = cell_of("forward", cpu64)
    gpu = SimpleNamespace(device=dataclasses.replace(cpu64.device, simulated=False))
    small, large = cell.problem, dataclasses.replace(cell.problem, rows=1 << 20, cols=4096)
    middle = dataclasses.replace(small, rows=65536)
    counts = [tensors.clones(problem, gpu) for problem in (small, large)]
    assert counts == [64, 2]
    count = tensors.clones(middle, gpu)
    cache_bytes = 3 * gpu.device.last_level_cache_bytes
    assert (count - 1) * middle.logical_bytes() <= cache_bytes < count * middle.logical_bytes()


# ---- the gate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "weight"), PAIRS)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_gates_reference_is_the_packages(
    op: str, dtype: str, weight: str, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64 results of the package's own reference have next to no error by torch's."""
    monkeypatch.setattr(peer_gate, "GATE_ELEMENTS", 8 * COLS)  # several blocks and a rest
    cell = cell_of(op, cpu64, dtype, weight)
    x, w = (cell.inputs[0][name].double().numpy() for name in ("x", "weight"))
    eps = cell.problem.eps
    if op == "forward":
        want = {"y": bounds.reference_forward(x, w, eps)[0]}
    else:
        dout = cell.inputs[0]["dout"].double().numpy()
        dx, dweight = bounds.reference_backward(dout, x, w, None, eps)
        want = {"dx": dx, "dweight": dweight}
    verdict = cell.judge({name: torch.from_numpy(values) for name, values in want.items()})
    assert verdict.passed
    assert max(verdict.worst.values()) < 1e-6


def right(cell: Cell) -> dict[str, Any]:
    t = cell.inputs[0]
    x, weight = (t[name].double().requires_grad_() for name in ("x", "weight"))
    y = torch.nn.functional.rms_norm(x, (COLS,), weight, cell.problem.eps)
    if cell.problem.op == "forward":
        return {"y": y.detach()}
    dx, dweight = torch.autograd.grad(y, (x, weight), t["dout"].double())
    return {"dx": dx, "dweight": dweight}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("output", ["y", "dx", "dweight"])
def test_an_output_passes_up_to_its_limit(output: str, dtype: str, cpu64: Backend) -> None:
    cell = cell_of("forward" if output == "y" else "backward", cpu64, dtype)
    limit = peer_gate.LIMITS[cell.problem.dtype]
    for share, passes in ((0.99, True), (1.01, False)):
        outputs = right(cell)
        outputs[output] *= 1 + share * limit
        verdict = cell.judge(outputs)
        assert verdict.passed is passes
        assert verdict.worst[output] == pytest.approx(share, rel=1e-3)
        assert (output in verdict.message) is not passes


def test_dweight_of_16_bit_activations_may_be_as_coarse_as_they_are(cpu64: Backend) -> None:
    cell = cell_of("backward", cpu64, "bf16", "fp32")
    results = right(cell)
    for factor, passes in ((1.002, True), (1.004, False)):
        coarse = results | {"dweight": results["dweight"] * factor}
        assert cell.judge(coarse).passed is passes


def test_a_nan_fails(cpu64: Backend) -> None:
    cell = cell_of("forward", cpu64)
    results = right(cell)
    results["y"][-1, -1] = torch.nan
    assert not cell.judge(results).passed


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("dtype", "weight"), PAIRS)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_torch_passes_its_gate(op: str, dtype: str, weight: str, cpu64: Backend) -> None:
    contender = PEERS["torch"].prepare(cell_of(op, cpu64, dtype, weight))
    assert contender.verdict.passed
    assert len(contender.calls) == 2
    for call in 2 * list(contender.calls):  # backward keeps its graph
        call()


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_compile_passes_its_gate_and_runs_again(
    op: str, cpu64: Backend, compile_options: list[dict[str, Any]]
) -> None:
    contender = PEERS["compile"].prepare(cell_of(op, cpu64))
    assert contender.verdict.passed
    assert compile_options == [{"dynamic": False}]
    for call in 2 * list(contender.calls):
        call()


def test_ours_passes_the_strict_gate(cpu64: Backend) -> None:
    cell = cell_of("backward", cpu64)
    contender = PEERS["ours"].prepare(cell)
    assert contender.config == cell.config.slug
    assert contender.verdict.worst.keys() == {"dx", "dweight"}
    contender.calls[0]()


def test_our_calls_keep_their_memory(cpu64: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = []

    def clones(*args: Any, **options: Any) -> Any:
        arena = clone_plans(*args, **options)
        owners.append(weakref.ref(arena.owner))
        return arena

    monkeypatch.setattr(study, "clone_plans", clones)
    contender = PEERS["ours"].prepare(cell_of("forward", cpu64))
    assert owners[0]() is not None
    del contender
    assert owners[0]() is None


def test_results_of_a_clone_are_kept_until_its_next_turn() -> None:
    made: list[Any] = []

    def operation() -> tuple[Any, ...]:
        made.append(torch.empty(1024))
        return (made[-1],)

    call = study._keeping(operation)
    call()
    first = made.pop()
    before = sys.getrefcount(first)
    call()
    assert sys.getrefcount(first) == before - 1


# ---- Quack and Liger, with stand-ins of their signatures -----------------------------------------


def differentiate(x: Any, weight: Any, dout: Any, eps: float = 1e-6) -> tuple[Any, Any]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (x, weight))
    y = torch.nn.functional.rms_norm(leaves[0], leaves[0].shape[-1:], leaves[1], eps)
    return torch.autograd.grad(y, leaves, dout)


@dataclasses.dataclass(frozen=True)
class RmsNormFwdConfig:
    num_threads: int
    threads_per_row: int
    cluster_n: int
    reload_from: str | None
    delay_w_load: bool = False


@dataclasses.dataclass(frozen=True)
class RmsNormBwdConfig:
    num_threads: int
    threads_per_row: int
    cluster_n: int
    reload_wdy: str | None
    reload_x: str | None
    use_tma: bool
    smem_stages: int = 2


class Tuned:
    """Quack's Autotuner: called without a config it finds one, ``fn`` wants one."""

    def __init__(self, function: Any, choice: Any) -> None:
        self.configs: list[Any] = []
        self.function = function
        self.choice = choice

    def fn(self, *args: Any, config: Any, **kwargs: Any) -> None:
        self.configs.append(config)
        self.function(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.best_config = SimpleNamespace(kwargs={"config": self.choice})
        self.fn(*args, **kwargs, config=self.choice)


SEARCHED = {
    "forward": RmsNormFwdConfig(128, 128, 1, None),
    "backward": RmsNormBwdConfig(128, 128, 1, None, None, False),
}


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Any:
    def forward_into(
        x: Any, weight: Any, out: Any, bias: Any = None, rstd: Any = None, eps: float = 1e-6
    ) -> None:
        out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))

    def rmsnorm_fwd(
        x: Any, weight: Any = None, *, eps: float = 1e-6, store_rstd: bool = False
    ) -> tuple[Any, Any, Any]:
        out = torch.empty_like(x)
        forward_into(x, weight, out, eps=eps)
        return out, x, torch.empty(x.shape[0]) if store_rstd else None

    def rmsnorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any) -> tuple[Any, ...]:
        return *differentiate(x, weight, dout), None, None

    def backward_into(
        x: Any, weight: Any, dout: Any, rstd: Any, dx: Any, dw_partial: Any = None,
        *, has_dw_partial: bool = False,
    ) -> None:  # fmt: skip
        assert has_dw_partial
        gradients = differentiate(x, weight, dout)
        dx.copy_(gradients[0])
        dw_partial.zero_()
        dw_partial[1] = gradients[1]

    module, configs = ModuleType("quack.rmsnorm"), ModuleType("quack.rmsnorm_config")
    vars(module).update(
        rmsnorm_fwd=rmsnorm_fwd,
        rmsnorm_bwd=rmsnorm_bwd,
        rmsnorm_fwd_tuned=Tuned(forward_into, SEARCHED["forward"]),
        rmsnorm_bwd_tuned=Tuned(backward_into, SEARCHED["backward"]),
    )
    vars(configs).update(
        RmsNormFwdConfig=RmsNormFwdConfig,
        RmsNormBwdConfig=RmsNormBwdConfig,
        get_sm_count=lambda cols, device: 5,
    )
    # the package has a function in the module's place
    package = ModuleType("quack")
    vars(package).update(rmsnorm=lambda x: None)
    for name, one in (("quack", package), (module.__name__, module), (configs.__name__, configs)):
        monkeypatch.setitem(sys.modules, name, one)
    return module


OPS = ["forward", "backward"]


@pytest.mark.parametrize("op", OPS)
def test_quack_is_called_with_its_default(op: str, quack: Any, cpu64: Backend) -> None:
    contender = PEERS["quack"].prepare(cell_of(op, cpu64))
    assert contender.config == "analytical default"
    contender.calls[1]()
    assert not quack.rmsnorm_fwd_tuned.configs
    assert not quack.rmsnorm_bwd_tuned.configs


def tuned_of(quack: Any, op: str) -> Tuned:
    found = quack.rmsnorm_fwd_tuned if op == "forward" else quack.rmsnorm_bwd_tuned
    assert isinstance(found, Tuned)
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_recorded_winner_is_what_runs(
    op: str, quack: Any, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = SEARCHED[op]
    monkeypatch.setattr(study, "recorded_winner", lambda problem: dataclasses.asdict(winner))
    contender = PEERS["quack_searched"].prepare(cell_of(op, cpu64))
    for call in contender.calls:
        call()
    assert tuned_of(quack, op).configs == 3 * [winner]  # the gate's, and one a clone
    assert contender.config == repr(winner)


@pytest.mark.parametrize("op", OPS)
def test_without_a_recorded_winner_the_default_runs_and_says_so(
    op: str, quack: Any, cpu64: Backend
) -> None:
    contender = PEERS["quack_searched"].prepare(cell_of(op, cpu64))
    assert "no winner is recorded" in contender.config
    assert not tuned_of(quack, op).configs


@pytest.mark.parametrize("op", OPS)
def test_quacks_own_search_is_asked_for_by_a_flag(op: str, quack: Any, cpu64: Backend) -> None:
    searching = providers(quack_search=True)[2]
    contender = searching.prepare(cell_of(op, cpu64))
    tuned = tuned_of(quack, op)
    assert tuned.best_config.kwargs["config"] is tuned.choice
    assert contender.config == repr(tuned.choice)


def test_every_recorded_winner_is_of_a_cell_of_the_study() -> None:
    found = [(problem, recorded_winner(problem)) for problem in cells()]
    fields = {
        "forward": {field.name for field in dataclasses.fields(RmsNormFwdConfig)},
        "backward": {field.name for field in dataclasses.fields(RmsNormBwdConfig)},
    }
    winners = [(problem, winner) for problem, winner in found if winner is not None]
    assert all(winner.keys() == fields[problem.op] for problem, winner in winners)
    archive = study.resources.files("rmsnorm_raw.study") / "archive" / "quack_searched.json"
    assert len(winners) == archive.read_text(encoding="utf-8").count('"config"')
    widest = Problem.backward(32768, 8192, "bf16")
    assert recorded_winner(widest) == {
        "num_threads": 128, "threads_per_row": 128, "cluster_n": 4, "reload_wdy": None,
        "reload_x": "smem", "use_tma": True, "smem_stages": 3,
    }  # fmt: skip


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    def rms_norm_forward(
        X: Any, W: Any, eps: float, offset: float, casting_mode: Any, row_mode: Any
    ) -> tuple[Any, ...]:
        assert (offset, casting_mode, row_mode) == (0.0, "llama", None)
        y = torch.nn.functional.rms_norm(X, X.shape[-1:], W, eps)
        return y, X, torch.empty(X.shape[0]), 256, 4, 0

    def rms_norm_backward(
        dY: Any, X: Any, W: Any, RSTD: Any, offset: float, casting_mode: int, BLOCK_SIZE: int,
        num_warps: int, in_place: bool, row_mode: Any, needs_dw: bool | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert (offset, casting_mode, BLOCK_SIZE, num_warps, row_mode) == (0.0, 0, 256, 4, None)
        dx, dweight = differentiate(X, W, dY)
        return (dY.copy_(dx) if in_place or module.overwrites else dx), dweight

    module = ModuleType("liger_kernel.ops.rms_norm")
    vars(module).update(
        rms_norm_forward=rms_norm_forward, rms_norm_backward=rms_norm_backward, overwrites=False
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("op", OPS)
def test_liger_is_called_and_leaves_dout_alone(op: str, liger: Any, cpu64: Backend) -> None:
    contender = PEERS["liger"].prepare(cell_of(op, cpu64))
    for call in contender.calls:
        call()
    assert contender.verdict.passed


def test_a_peer_that_overwrites_an_input_gets_no_time(liger: Any, cpu64: Backend) -> None:
    liger.overwrites = True
    with pytest.raises(WrongResult, match="dout was written, and it is an input; it gets no time"):
        PEERS["liger"].prepare(cell_of("backward", cpu64))


def test_a_peer_that_is_wrong_gets_no_time(liger: Any, cpu64: Backend) -> None:
    liger.rms_norm_forward = lambda X, *rest: (X,)
    with pytest.raises(WrongResult, match=r"relative L2 error of y is .*over 0\.003"):
        PEERS["liger"].prepare(cell_of("forward", cpu64))
