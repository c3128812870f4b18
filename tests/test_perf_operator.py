"""perf.whole_operator: its cells, their gate, its bars, a search, on the simulator."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import PROBES, Reading, Roofline, Variant
from rmsnorm_raw.measure import TIMING_PROTOCOL, Samples
from rmsnorm_raw.study import peer_gate
from rmsnorm_raw.study.providers import Provider
from rmsnorm_raw.study.whole_cells import WholeCell, whole_cells
from rmsnorm_raw.study.whole_providers import whole_providers

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[1]
#: one of each kind, of few elements
NAMES = (
    "residual-forward-32768x1024", "residual-backward-32768x1024", "heads-forward-8192x32x128",
    "heads-backward-8192x32x128", "fp8-dynamic-32768x4096", "fp8-dynamic-residual-32768x4096",
    "fp8-static-32768x4096", "fp8-static-residual-32768x4096", "plain-forward-32768x1024",
    "plain-backward-32768x1024",
)  # fmt: skip
BOTH = ("residual-forward", "residual-backward")
#: providers of the run that a test watches
HERE = ("ours", "quack")
QUACKS = (*BOTH, "heads-forward", "heads-backward", "plain-forward", "plain-backward")


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("perf.whole_operator")


def cell_of(start: str, backend: Backend) -> WholeCell:
    (name,) = (
        name for name in NAMES if name.startswith(f"{start}-") and name[len(start) + 1] in "83"
    )
    return next(cell for cell in whole_cells(backend) if cell.name == name)


def provider_of(cell: WholeCell, name: str) -> Provider:
    return next(p for p in whole_providers(cell.problem) if p.name == name)


# ---- the cells -----------------------------------------------------------------------------------


def test_the_cells_are_those_that_the_bars_are_about(cpu64: Backend) -> None:
    cells = whole_cells(cpu64)
    assert len({cell.name for cell in cells}) == len(cells) == 26
    assert {cell.kind for cell in cells} == {
        *BOTH, "heads-forward", "heads-backward", "plain-forward", "plain-backward",
        "fp8-dynamic", "fp8-static", "fp8-dynamic-residual", "fp8-static-residual",
    }  # fmt: skip
    widths = [c.problem.cols for c in cells if c.kind == "residual-backward"]
    assert widths == [1024, 2048, 4096, 8192]


def test_of_a_gpu_a_cell_has_the_rows_of_its_name(cpu64: Backend) -> None:
    class Gpu:
        device = replace(cpu64.device, simulated=False)

    rows = {cell.name: cell.problem.rows for cell in whole_cells(Gpu())}  # type: ignore[arg-type]
    assert rows["heads-forward-8192x32x128"] == 8192 * 32
    assert rows["fp8-dynamic-32768x8192"] == 32768


def test_x_of_the_heads_is_a_view_into_the_packed_tensor(cpu64: Backend) -> None:
    cell = cell_of("heads-forward", cpu64)
    for clone in cell.inputs:
        x = clone["x"]
        assert (tuple(x.shape), x.stride()) == ((12, 32, 128), (48 * 128, 128, 1))
        assert tuple(clone["weight"].shape) == (32, 128)
    (first, second) = (clone["x"].data_ptr() for clone in cell.inputs)
    assert first != second


@pytest.mark.parametrize("name", NAMES)
def test_ours_passes_both_gates_from_every_clone(name: str, cpu64: Backend) -> None:
    cell = next(cell for cell in whole_cells(cpu64) if cell.name == name)
    contender = provider_of(cell, "ours").prepare(cell)
    for output in cell.outputs[1].values():
        output.view(torch.uint8).fill_(0xFF)
    contender.calls[1]()
    assert contender.config.startswith("b")
    for output, first in zip(cell.outputs[1].values(), cell.outputs[0].values(), strict=True):
        assert torch.equal(output.view(torch.uint8), first.view(torch.uint8))


# ---- the gate ------------------------------------------------------------------------------------


def right(cell: WholeCell) -> dict[str, Any]:
    """What is right, by torch's own operations, in the outputs' dtypes."""
    t, problem = cell.inputs[0], cell.problem
    x, weight = t["x"].double(), t["weight"].double()
    if problem.op == "forward":
        h = x + t["residual"].double() if "residual" in t else x
        y = torch.nn.functional.rms_norm(h, h.shape[-1:], None, problem.eps) * weight
        found = {"residual_out": h.to(t["x"].dtype)}
        if problem.extras.scale == "dynamic":
            found["scale"] = (y.abs().amax(-1) / 448).float()
            y = y / found["scale"].double().unsqueeze(-1)
        elif problem.extras.scale == "static":
            y = (y / t["scale"].double()).clamp(-448, 448)
        return found | {"y": y.float().to(getattr(torch, problem.out_dtype))}
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], None, problem.eps) * weight
    dx, dweight = torch.autograd.grad(y, (x, weight), t["dout"].double())
    dx = dx + (t["dresidual_out"].double() if "dresidual_out" in t else 0.0)
    return {"dx": dx.bfloat16(), "dweight": dweight.bfloat16()}


@pytest.mark.parametrize("name", NAMES)
def test_the_gates_reference_is_torchs(
    name: str, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that are rounded once have half of the error that the limits allow."""
    cell = next(cell for cell in whole_cells(cpu64) if cell.name == name)
    row = cell.inputs[0]["x"][0].numel()
    monkeypatch.setattr(peer_gate, "GATE_ELEMENTS", 5 * row)  # several blocks and a rest
    verdict = cell.judge(right(cell))
    assert verdict.passed
    assert verdict.worst.keys() == set(peer_gate.judged(cell.problem))
    for output, worst in verdict.worst.items():
        assert worst < (0.1 if output == "scale" else 0.65), (output, worst)


@pytest.mark.parametrize("name", NAMES)
def test_the_gate_asks_for_every_output(name: str, cpu64: Backend) -> None:
    cell = next(cell for cell in whole_cells(cpu64) if cell.name == name)
    results = right(cell)
    for output in peer_gate.judged(cell.problem):
        off = results[output].double() * 1.06
        off = off.clamp(-448, 448) if output == "y" else off
        wrong = results | {output: off.float().to(results[output].dtype)}
        verdict = cell.judge(wrong)
        assert not verdict.passed
        assert f"relative L2 error of {output} is" in verdict.message
        holed = results[output].clone()
        holed.view(torch.uint8).view(-1)[-4:] = 0xFF  # a NaN
        assert not cell.judge(results | {output: holed}).passed


def test_the_gate_sees_an_input_that_was_written(cpu64: Backend) -> None:
    cell = cell_of("residual-backward", cpu64)
    results = right(cell)
    cell.inputs[0]["dresidual_out"][3, 5] += 1
    assert "dresidual_out was written, and it is an input" in cell.judge(results).message


# ---- the peers -----------------------------------------------------------------------------------


def module_of(name: str, **functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def norm(x: Any, weight: Any, residual: Any, eps: float) -> tuple[Any, Any]:
    h = x.float() if residual is None else x.float() + residual.float()
    y = torch.nn.functional.rms_norm(h, h.shape[-1:], None, eps) * weight.float()
    return y.to(x.dtype), h.to(x.dtype)


def gradients(x: Any, weight: Any, dout: Any, dresidual_out: Any) -> tuple[Any, Any]:
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    y = torch.nn.functional.rms_norm(leaves[0], x.shape[-1:], None, 1e-6) * leaves[1]
    dx, dweight = torch.autograd.grad(y, leaves, dout.double())
    if dresidual_out is not None:
        dx = dx + dresidual_out.double()
    return dx.to(x.dtype), dweight.to(weight.dtype)


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def rmsnorm_fwd(
        x: Any, weight: Any = None, bias: Any = None, residual: Any = None, *,
        eps: float = 1e-6, store_rstd: bool = False,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        assert store_rstd
        y, residual_out = norm(x, weight, residual, eps)
        return y, residual_out if residual is not None else x, torch.empty(x.shape[:-1])

    def rmsnorm_bwd(
        x: Any, weight: Any, dout: Any, rstd: Any, dresidual_out: Any = None
    ) -> tuple[Any, ...]:
        assert rstd.shape == x.shape[:-1]
        return *gradients(x, weight, dout, dresidual_out), None, None

    module = module_of("quack.rmsnorm", rmsnorm_fwd=rmsnorm_fwd, rmsnorm_bwd=rmsnorm_bwd)
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", module)
    # the package has a function in the module's place
    monkeypatch.setitem(sys.modules, "quack", module_of("quack", rmsnorm=lambda x: None))
    return module


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def forward(x: Any, r: Any, w: Any, eps: float, offset: float, mode: Any) -> tuple[Any, ...]:
        assert (offset, mode) == (0.0, "gemma")
        return *norm(x, w, r, eps), torch.empty(x.shape[0]), 1024, 4, 2, 1

    def backward(
        dy: Any, ds_out: Any, s: Any, w: Any, rstd: Any, offset: float, mode: int, block: int,
        warps: int, stages: int, in_place: bool,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        assert (offset, mode, block, warps, stages, in_place) == (0.0, 1, 1024, 4, 2, False)
        dx, dw = gradients(s, w, dy, ds_out)
        return dx, dx, dw

    name = "liger_kernel.ops.fused_add_rms_norm"
    module = module_of(
        name, fused_add_rms_norm_forward=forward, fused_add_rms_norm_backward=backward
    )
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("kind", QUACKS)
def test_quack_is_called_as_its_users_call_it(kind: str, quack: ModuleType, cpu64: Backend) -> None:
    cell = cell_of(kind, cpu64)
    contender = provider_of(cell, "quack").prepare(cell)
    for call in contender.calls:
        call()
    assert contender.config == "analytical default"
    assert contender.verdict.passed


@pytest.mark.parametrize("kind", BOTH)
def test_liger_is_called_with_its_gradient_apart(
    kind: str, liger: ModuleType, cpu64: Backend
) -> None:
    cell = cell_of(kind, cpu64)
    contender = provider_of(cell, "liger").prepare(cell)
    for call in contender.calls:
        call()
    assert contender.verdict.passed


def test_a_peer_without_the_residual_gets_no_time(
    perf: ModuleType, quack: ModuleType, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of("residual-backward", cpu64)
    right_one = quack.rmsnorm_bwd
    quack.rmsnorm_bwd = lambda *given, dresidual_out: right_one(*given)
    monkeypatch.setattr(Provider, "missing", lambda it: None if it.name in HERE else "not here")
    monkeypatch.setattr(Provider, "version", property(lambda it: "1"))
    ours, peer = perf.rows_of(cell, None)
    assert (ours["verdict"], peer["verdict"]) == ("PASS", "WrongResult")
    assert float(ours["median_us"]) > 0
    assert not peer["median_us"]
    assert "relative L2 error of dx is" in peer["note"]
    ((line, holds),) = (f for f in perf.findings([ours, peer]) if f[0].startswith("residual-b"))
    assert not holds
    assert line.endswith("residual-backward-32768x1024 quack: WrongResult: FAILS")


def test_who_is_asked_depends_on_the_operation(cpu64: Backend) -> None:
    names = {
        kind: [p.name for p in whole_providers(cell_of(kind, cpu64).problem)]
        for kind in (*QUACKS, "fp8-dynamic", "fp8-static-residual")
    }
    assert names["residual-forward"] == ["ours", "quack", "liger", "compile"]
    assert names["residual-backward"] == ["ours", "quack", "liger"]
    assert names["heads-forward"] == names["plain-backward"] == ["ours", "quack"]
    assert names["fp8-dynamic"] == names["fp8-static-residual"] == ["ours", "compile"]


# ---- the bars ------------------------------------------------------------------------------------


def rows_at(
    residual: float = 1.0, backward: float = 1.05, heads: float = 1.0, fp8: float = 1 / 1.15
) -> list[dict[str, str]]:
    """Rows at which every bar just holds: others' times over ours, which are 100 us."""
    found = []
    for width in (1024, 8192):
        shape = f"32768x{width}"
        found += [
            (
                f"residual-forward-{shape}",
                {"quack": 100 * residual, "compile": 150.0, "liger": 9.0},
            ),
            (f"residual-backward-{shape}", {"quack": 100 * backward, "liger": 9.0}),
            (f"fp8-dynamic-{shape}", {"copy": 100 * fp8, "compile": 9.0}),
            (f"fp8-dynamic-residual-{shape}", {"copy": 9.0}),
        ]
    found.append(("heads-forward-8192x32x128", {"quack": 100 * heads}))
    found.append(("heads-backward-8192x32x128", {"quack": 9.0}))
    return [
        {"cell": cell, "provider": name, "verdict": "PASS", "median_us": f"{us:.6f}"}
        for cell, others in found
        for name, us in ({"ours": 100.0} | others).items()
    ]


def failing(perf: ModuleType, rows: list[dict[str, str]]) -> list[str]:
    return [line for line, holds in perf.findings(rows) if not holds]


def test_every_bar_holds_at_its_edge(perf: ModuleType) -> None:
    found = perf.findings(rows_at(1.0000001, 1.0500001, 1.0000001, 1.0000001 / 1.15))
    assert len(found) == len(perf.BARS) == 4
    assert all(holds for _, holds in found), found
    assert "no figure" not in "".join(line for line, _ in found)


@pytest.mark.parametrize(
    ("slow", "kind"),
    [
        ({"residual": 0.99}, "residual-forward"),
        ({"backward": 1.04}, "residual-backward"),
        ({"heads": 0.99}, "heads-forward"),
        ({"fp8": 1 / 1.16}, "fp8-dynamic"),
    ],
)
def test_what_is_slower_than_its_bar_fails(
    slow: dict[str, float], kind: str, perf: ModuleType
) -> None:
    (line,) = failing(perf, rows_at(**({"backward": 1.06, "fp8": 0.9, "heads": 1.1} | slow)))
    assert line.startswith(f"{kind}, ")
    assert line.endswith("FAILS")


def test_one_cell_under_its_least_fails_whatever_the_mean(perf: ModuleType) -> None:
    rows = rows_at(1.2, 1.06, 1.1, 0.9)
    rows[1]["median_us"] = "97.0"
    assert rows[1]["provider"] == "quack"
    (line,) = failing(perf, rows)
    assert "geometric mean 1.079 over 2 cells, least 0.970 (residual-forward-32768x1024)" in line


def test_the_faster_of_two_peers_counts(perf: ModuleType) -> None:
    rows = rows_at(1.2, 1.06, 1.1, 0.9)
    for row in rows:
        if row["provider"] == "compile" and row["cell"].startswith("residual-forward"):
            row["median_us"] = "99.0"
    assert failing(perf, rows)


def test_a_missing_peer_is_named_and_fails_nothing(perf: ModuleType) -> None:
    without = [row for row in rows_at() if row["provider"] in ("ours", "copy")]
    found = perf.findings(without)
    assert [holds for _, holds in found] == [True] * 4
    assert sum("quack not here, so there is no figure" in line for line, _ in found) == 2
    assert "quack and compile not here" in found[0][0]
    assert all("not run" in line for line, _ in perf.findings([]))


def test_of_two_peers_the_one_that_is_here_is_named(perf: ModuleType) -> None:
    rows = [row for row in rows_at() if row["provider"] != "quack"]
    (line, holds), *_ = perf.findings(rows)
    assert line.startswith("residual-forward, compile / ours: geometric mean 1.500 over 2 cells")
    assert holds


def test_ours_without_a_time_fails_its_bar(perf: ModuleType) -> None:
    rows = rows_at(1.2, 1.06, 1.1, 0.9)
    broken = next(row for row in rows if row["cell"].startswith("heads-f"))
    broken |= {"verdict": "WrongResult", "median_us": ""}
    assert failing(perf, rows) == [
        "heads-forward, quack / ours: heads-forward-8192x32x128 ours: WrongResult: FAILS"
    ]


# ---- the rows, and a search ----------------------------------------------------------------------


def test_the_rows_of_a_cell_name_it_and_have_its_times(
    perf: ModuleType, quack: ModuleType, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provider, "missing", lambda it: None if it.name in HERE else "not here")
    monkeypatch.setattr(Provider, "version", property(lambda it: "1"))
    cell = cell_of("heads-forward", cpu64)
    rows = perf.rows_of(cell, None)
    assert [row["provider"] for row in rows] == ["ours", "quack"]
    for row in rows:
        assert row.keys() == set(perf.COLUMNS)
        assert row["cell"] == "heads-forward-8192x32x128"
        assert row["verdict"] == "PASS"
        assert float(row["low_us"]) <= float(row["median_us"]) <= float(row["high_us"])
        assert not row["gbps"]  # simulated
    assert [row["provider"] for row in perf.rows_of(cell, None, peers=False)] == ["ours"]
    lines = [*perf.table(rows)]
    assert len(lines) == 3
    assert "1.000  b" in lines[1]


def test_the_probe_takes_the_time_of_as_many_bytes(perf: ModuleType, cpu64: Backend) -> None:
    class Opening:
        class variant:
            slug = "b512-u4"

        gbps = 4000.0

        @classmethod
        def reading(cls, probe: str) -> Any:
            assert probe == "copy"
            return cls

    cell = cell_of("fp8-dynamic", cpu64)
    row = perf._probe_row(cell, Opening)
    moved = 12 * 4096 * 3 + 2 * 4096 + 12 * 4  # x and y, the weight, a scale a row
    assert float(row["median_us"]) == pytest.approx(moved / 4000 / 1e3, abs=1e-3)


def test_a_search_has_the_ladders_config_beside_the_others(
    perf: ModuleType, cpu64: Backend
) -> None:
    cell = cell_of("heads-forward", cpu64)
    slugs = ["b128-t16-v16-reg", "b64-t64-v16-reg-lk"]
    configs, refused = perf.chosen(cell, slugs, 3)
    assert configs[0] == perf.default_config(cell.problem, cpu64.device)
    assert configs[1].slug == "b128-t16-v16-reg"
    assert len(configs) == len(set(configs)) == 5
    (row,) = refused
    assert (row["config"], row["verdict"], row["median_us"]) == (slugs[1], "constraints", "")
    assert row["note"]
    rows = perf.search(cell, configs)
    assert {row["config"] for row in rows} == {config.slug for config in configs}
    ratios = [float(row["ratio"]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    (ladder,) = (row for row in rows if row["config"] == configs[0].slug)
    assert math.isclose(float(ladder["ratio"]), 1.0)
    assert ladder["note"] == "the ladder's"
    assert all(row.keys() == set(perf.SEARCH_COLUMNS) for row in (*rows, *refused))
    lines = [*perf.search_lines(cell.name, [*rows, *refused])]
    assert [line.split()[4] for line in lines[1:-1]] == [row["config"] for row in rows]
    assert lines[-1].startswith("  1 of 6 constraints: ")


def test_a_config_that_fails_its_gate_has_a_row_and_no_time(
    perf: ModuleType, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of("heads-forward", cpu64)
    configs, _ = perf.chosen(cell, [], 2)
    judge = WholeCell.judge
    judged: list[Any] = []

    def second_is_wrong(self: WholeCell, results: Any) -> Any:
        judged.append(results)
        verdict = judge(self, results)
        return replace(verdict, passed=False, message="y is off") if len(judged) == 2 else verdict

    monkeypatch.setattr(WholeCell, "judge", second_is_wrong)
    rows = perf.search(cell, configs)
    assert [row["verdict"] for row in rows] == ["PASS", "PASS", "WrongResult"]
    assert rows[-1]["config"] == configs[1].slug
    assert not rows[-1]["median_us"]
    assert "y is off" in rows[-1]["note"]


# ---- torch.compile, and the suite ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["residual-forward", "fp8-dynamic", "fp8-dynamic-residual", "fp8-static-residual"]
)
def test_compile_passes_its_gate(
    kind: str, cpu64: Backend, compile_options: list[dict[str, Any]]
) -> None:
    cell = cell_of(kind, cpu64)
    contender = provider_of(cell, "compile").prepare(cell)
    assert contender.verdict.passed
    assert compile_options == [{"dynamic": False, "fullgraph": True}]
    for call in contender.calls:
        call()


def test_the_cells_are_a_suite() -> None:
    pytest.importorskip("pytest_benchmark", reason="pip install pytest-benchmark")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "perf", "--benchmark-only", "-p", "no:cacheprovider",
            "-k", "operator and (heads-forward or fp8-dynamic-32768x4096)",
        ],
        cwd=ROOT, capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        | {"RMSNORM_RAW_BACKEND": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout[done.stdout.index("rmsnorm_raw beside its peers") :]
    assert "times are simulated" in printed
    for group in ("operator-heads-forward-8192x32x128", "operator-fp8-dynamic-32768x4096"):
        assert f"\n{group}" in printed
    assert "2 passed, 2 skipped" in printed


# ---- the command ---------------------------------------------------------------------------------


def roofline(gbps: float) -> Roofline:
    times_us = (1e6 / gbps,) * 6
    readings = [
        Reading(probe, Variant(), 10**9, Samples(times_us, "cold", "", 1)) for probe in PROBES
    ]
    return Roofline("a GPU", 10**9, tuple(readings))


@pytest.mark.parametrize("heads_ratio", [0.5, 1.5])
def test_the_command_writes_its_tables_and_fails_with_a_bar(
    heads_ratio: float, perf: ModuleType, quack: ModuleType, cpu64: Backend, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On the simulator in a GPU's place, with a peer whose times are ours by a factor."""

    def timed(contenders: Any, *rest: Any, **options: Any) -> list[Samples]:
        times_us = [100.0, 100 * heads_ratio][: len(contenders)]
        times_us += [100.0] * (len(contenders) - len(times_us))
        return [Samples((us,) * 6, "cold", "stopped", 2) for us in times_us]

    command = importlib.import_module("perf.command_line")
    monkeypatch.setattr(command, "on_gpu", lambda name, out: cpu64)
    monkeypatch.setattr(perf.bandwidth, "roofline", lambda backend, stream: roofline(1.25))
    monkeypatch.setattr(
        perf.bandwidth, "remeasure", lambda opening, backend, stream: roofline(1.2625)
    )
    monkeypatch.setattr(perf.measure, "time_interleaved", timed)
    monkeypatch.setattr(Provider, "missing", lambda it: None if it.name in HERE else "not here")
    monkeypatch.setattr(Provider, "version", property(lambda it: "1"))
    options = ["--cells", "heads-f,dynamic-32768x4096", "--search", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["perf.whole_operator", *options])
    assert perf.main() == int(heads_ratio < 1)
    with (tmp_path / "operator.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["cell"], row["provider"]): row for row in csv.DictReader(file)}
    heads, fp8 = "heads-forward-8192x32x128", "fp8-dynamic-32768x4096"
    assert list(rows) == [(heads, "ours"), (heads, "quack"), (fp8, "ours"), (fp8, "copy")]
    assert float(rows[heads, "quack"]["median_us"]) == 100 * heads_ratio
    cell = next(cell for cell in whole_cells(cpu64) if cell.name == heads)
    gbps = cell.problem.logical_bytes() / 100 / 1e3
    assert float(rows[heads, "ours"]["gbps"]) == pytest.approx(gbps, abs=0.05)
    assert float(rows[heads, "ours"]["pct_matched"]) == pytest.approx(80 * gbps, abs=0.01)
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert facts["missing"] == ["not here"]
    assert facts["timing_protocol"] == TIMING_PROTOCOL
    assert facts["drift_pct"] == pytest.approx(1.0)
    assert facts["command"].startswith("python -m perf.whole_operator --cells heads-f,")
    text = (tmp_path / "operator.txt").read_text(encoding="utf-8")
    assert f"heads-forward, quack / ours: geometric mean {heads_ratio:.3f}" in text
    assert "not here\n" in text
    assert "residual-backward, quack / ours: not run" in text
    with (tmp_path / "search.csv").open(newline="", encoding="utf-8") as file:
        found = [row["cell"] for row in csv.DictReader(file)]
    assert found == [heads] * 3 + [fp8] * 3
    assert f"{heads}: 3 configs, speed over the ladder's" in capsys.readouterr().out


def test_a_part_that_no_cell_has_ends_the_command(
    perf: ModuleType, cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module("perf.command_line")
    monkeypatch.setattr(command, "on_gpu", lambda name, out: cpu64)
    monkeypatch.setattr(sys, "argv", ["perf.whole_operator", "--cells", "fp4"])
    with pytest.raises(SystemExit, match="--cells fp4: no cell has one of these in its name"):
        perf.main()
