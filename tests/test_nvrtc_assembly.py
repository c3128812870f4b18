"""The text of NVRTC's code, with no GPU: the wheel's NVRTC in the place of CuPy's bindings."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
from nvrtc import library

from rmsnorm_raw.backends import nvrtc_assembly
from rmsnorm_raw.backends.nvrtc_assembly import NO_SASS, assembly
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

PROBLEM = Problem.backward(32768, 8192, "bf16")
SLUG = "b512-t512-v16-lds3bp-lk-ss-p1"
SOURCE = render(PROBLEM, Config.parse(SLUG), KNOWN["sm_90"])


class Nvrtc:
    """``cupy.cuda.nvrtc``, as far as it is used."""

    class NVRTCError(RuntimeError):
        pass

    def createProgram(
        self, text: str, name: str, headers: tuple[str, ...], names: tuple[str, ...]
    ) -> int:
        assert headers == names == ()
        program = ctypes.c_void_p()
        library().nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), 0, None, None
        )
        assert program.value is not None
        return program.value

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library().nvrtcCompileProgram(ctypes.c_void_p(program), len(options), given):
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def _text(self, what: str, program: int) -> bytes:
        size = ctypes.c_size_t()
        library()[f"nvrtcGet{what}Size"](ctypes.c_void_p(program), ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library()[f"nvrtcGet{what}"](ctypes.c_void_p(program), text)
        return text.raw

    def getPTX(self, program: int) -> bytes:
        return self._text("PTX", program)

    def getCUBIN(self, program: int) -> bytes:
        return self._text("CUBIN", program)

    def getProgramLog(self, program: int) -> str:
        return self._text("ProgramLog", program).decode().rstrip("\0")

    def destroyProgram(self, program: int) -> None:
        library().nvrtcDestroyProgram(ctypes.byref(ctypes.c_void_p(program)))


def nvdisasm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(nvrtc_assembly, "nvdisasm", lambda: [str(folder / "nvdisasm")])


def test_ptx_says_that_it_is_not_sass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_assembly, "nvdisasm", lambda: [])
    text = assembly(SOURCE, "sm_90", Nvrtc())
    assert text.startswith(NO_SASS.format(why="there is no nvdisasm"))
    assert text.count(".visible .entry") == len(SOURCE.entry_points)
    assert ".target sm_90" in text
    assert "cp.async.bulk" in text


def test_a_disassembler_is_given_the_code_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvdisasm(tmp_path, '[ "$1" = --print-code ] && head -c 4 "$2" | tail -c 3', monkeypatch)
    assert assembly(SOURCE, "sm_90", Nvrtc()) == "ELF"


def test_a_disassembler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvdisasm(tmp_path, "echo too old >&2; exit 3", monkeypatch)
    text = assembly(SOURCE, "sm_90", Nvrtc())
    assert re.match(r"// PTX, .*nvdisasm fails \(too old\)", text)
    assert ".visible .entry" in text


def test_sass_of_the_wheels_disassembler() -> None:
    if not nvrtc_assembly.nvdisasm():
        pytest.skip("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    text = assembly(SOURCE, "sm_90", Nvrtc())
    for entry_point in SOURCE.entry_points:
        assert f".text.{entry_point}:" in text
    assert "UBLKCP" in text  # the bulk copy


def test_a_source_that_does_not_compile_is_refused_with_slug_and_line() -> None:
    wrong = replace(SOURCE, text=SOURCE.text + "nonsense\n")
    last = wrong.text.count("\n")
    with pytest.raises(CompileError, match=rf"rmsnorm_backward\.hip\({last}\): error") as caught:
        assembly(wrong, "sm_90", Nvrtc())
    assert caught.value.slug == SLUG
