"""The options that name a problem: each command has them, and each problem can be named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rmsnorm_raw as rr
from rmsnorm_raw import cli
from rmsnorm_raw.problem import Problem

HERE = ("--rows", "6", "--cols", "64", "--backend", "cpu")
FORWARD, BACKWARD = ("--op", "fwd", *HERE), ("--op", "bwd", *HERE)


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, args)


def named(*args: str) -> str:
    """The problem that a command line names, as ``inspect`` says it."""
    result = run("inspect", *args, "--json")
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["problem"])


CASES: list[tuple[str, Problem]] = [
    ("", Problem.forward(6, 64, "bf16")),
    ("--bias", Problem.forward(6, 64, "bf16", bias_dtype="bf16")),
    (
        "--bias --weight-dtype fp32",
        Problem.forward(6, 64, "bf16", weight_dtype="fp32", bias_dtype="fp32"),
    ),
    (
        "--bias --weight-dtype none",
        Problem.forward(6, 64, "bf16", weight_dtype=None, bias_dtype="bf16"),
    ),
    ("--bias-dtype fp16", Problem.forward(6, 64, "bf16", bias_dtype="fp16")),
    ("--residual", Problem.forward(6, 64, "bf16", residual_dtype="bf16")),
    ("--residual-dtype fp32", Problem.forward(6, 64, "bf16", residual_dtype="fp32")),
    (
        "--residual --residual-out-dtype fp32",
        Problem.forward(6, 64, "bf16", residual_dtype="bf16", residual_out_dtype="fp32"),
    ),
    (
        "--residual --residual-out-dtype none",
        Problem.forward(6, 64, "bf16", residual_dtype="bf16", residual_out_dtype=None),
    ),
    (
        "--residual-out-dtype fp16",
        Problem.forward(6, 64, "bf16", residual_out_dtype="fp16"),
    ),
    (
        "--weight-offset 1 --casting llama --out-dtype fp32",
        Problem.forward(
            6, 64, "bf16", weight_offset=1.0, casting="llama", out_dtype="fp32"
        ),
    ),
    ("--casting gemma", Problem.forward(6, 64, "bf16")),
    (
        "--out-dtype fp8 --scale dynamic",
        Problem.forward(6, 64, "bf16", out_dtype="float8_e4m3fn", scale="dynamic"),
    ),
    (
        "--out-dtype float8_e4m3fn --scale static",
        Problem.forward(6, 64, "bf16", out_dtype="float8_e4m3fn", scale="static"),
    ),
    ("--heads 3 --per-head", Problem.forward(6, 64, "bf16", heads=3, per_head=True)),
    ("--heads 3", Problem.forward(6, 64, "bf16", heads=3)),
    ("--op bwd --bias", Problem.backward(6, 64, "bf16", bias_dtype="bf16")),
    ("--op bwd --residual", Problem.backward(6, 64, "bf16", dresidual_out_dtype="bf16")),
    (
        "--op bwd --dtype fp32 --dx-dtype bf16 --out-dtype bf16 --residual",
        Problem.backward(
            6, 64, "fp32", dx_dtype="bf16", out_dtype="bf16", dresidual_out_dtype="fp32",
            residual_dtype="fp32",
        ),
    ),
    (
        "--op bwd --residual --residual-dtype fp32 --residual-out-dtype none",
        Problem.backward(6, 64, "bf16", residual_dtype="fp32"),
    ),
    (
        "--op bwd --weight-offset 0.5 --heads 2 --per-head",
        Problem.backward(6, 64, "bf16", weight_offset=0.5, heads=2, per_head=True),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "problem"), CASES, ids=[line for line, _ in CASES])
def test_a_command_line_names_a_problem(line: str, problem: Problem) -> None:
    assert named(*FORWARD, *line.split()) == str(problem)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--dx-dtype fp32", "--dx-dtype is backward's"),
        ("--op bwd --casting llama", "--casting and --scale are the forward's"),
        ("--op bwd --scale dynamic", "--casting and --scale are the forward's"),
        ("--out-dtype fp8", "out_dtype is float8_e4m3fn and scale is 'none'"),
        ("--scale dynamic", "out_dtype is bfloat16 and scale is 'dynamic'"),
        ("--heads 4", "rows is 6, not a multiple of the 4 heads"),
        ("--per-head", "per_head wants several heads"),
        ("--bias-dtype fp64", "dtype 'fp64' is not supported"),
        ("--casting mistral", "'mistral' is not one of"),
        ("--scale 0.5", "'0.5' is not one of"),
        ("--weight-offset nan", "weight_offset is nan"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "bench", "tune"])
def test_what_does_not_go_together_is_one_message(
    command: str, line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(command, *FORWARD, *line.split())
    assert result.exit_code == 2, result.output
    assert message in re.sub(r"\s+", " ", result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_fp8_is_that_of_the_device_that_is_asked_about(rocm_stand_in: None) -> None:
    line = ("--op", "fwd", "--rows", "6", "--cols", "64", "--out-dtype", "fp8", "--scale", "static")
    assert "out float8_e4m3fnuz" in named(*line, "--arch", "gfx942")
    assert "out float8_e4m3fn," in named(*line, "--arch", "gfx950")


@pytest.mark.parametrize("missing", ["--op", "--rows", "--cols"])
@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_what_must_be_given(command: str, missing: str) -> None:
    at = FORWARD.index(missing)
    result = run(command, *FORWARD[:at], *FORWARD[at + 2 :])
    assert result.exit_code == 2
    assert f"Missing option '{missing}'" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "bench", "tune"])
def test_help_has_the_options_apart(command: str) -> None:
    text = run(command, "--help").stdout
    plain, _, beside = text.partition("Beside x and the weight")
    assert "--weight-dtype" in plain
    assert {"--bias", "--residual", "--per-head"} <= set(re.findall(r"--[\w-]+", beside))
    assert "--asked" not in text


def test_tune_says_what_is_known_of_such_a_problem(tmp_path: Path) -> None:
    line = "--residual --bias --effort none --out"
    result = run("tune", *BACKWARD, *line.split(), str(tmp_path))
    assert result.exit_code == 0, result.output
    problem = Problem.backward(6, 64, "bf16", bias_dtype="bf16", dresidual_out_dtype="bf16")
    slug = rr.default_config(problem, rr.get_backend("cpu").device).slug
    assert f"{problem} on " in result.stdout
    assert f'bias_dtype="bfloat16", config="{slug}")' in result.stdout
    header, row = (tmp_path / "tune.csv").read_text(encoding="utf-8").splitlines()
    assert header.split(",")[:6] == ["op", "m", "n", "act", "weight", "extras"]
    assert row.startswith('bwd,6,64,bf16,bf16,"bias bf16, residual_out bf16",LADDER')


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("--op fwd --residual --bias", "bias bf16, residual bf16, residual_out bf16"),
        ("--op fwd --out-dtype fp8 --scale dynamic", "out float8_e4m3fn, dynamic scale"),
        ("--op bwd --residual --heads 3 --per-head", "3 heads, a weight each, residual_out bf16"),
    ],
)
def test_bench_times_such_a_problem_and_says_what_it_was(
    line: str, extras: str, tmp_path: Path
) -> None:
    result = run("bench", *HERE, *line.split(), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert facts["row"]["extras"] == extras
    problem = eval(facts["problem"], {"Problem": Problem})
    assert str(problem.extras) == f" + {extras}"
    assert re.search(r"\bbeside\b.*\n.*" + re.escape(extras), result.stdout)
    assert "gate: passed" in result.stdout
