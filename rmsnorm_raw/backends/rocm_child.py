"""The child process of :mod:`.offline`: AMD's hiprtc and comgr over ctypes, one source at a time.

A compiler crash ends its process, and so does an architecture that hiprtc does not know; hence a
process of its own. It is run by path, with the folder of the libraries as its argument, and takes
nothing from the package, so that it starts in 0.1 s. It reads one JSON object a line and answers
with one; the first line that it writes says whether the libraries loaded.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import struct
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any


class Hiprtc:
    """hiprtc.h: HIP text to a code object."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libhiprtc.so.7"), mode=ctypes.RTLD_GLOBAL)
        self._library.hiprtcGetErrorString.restype = c_char_p

    def compile(self, text: str, name: str, options: list[str]) -> tuple[bytes | None, str]:
        """(code object, log); no code object where the compiler refuses the text."""
        rtc, program = self._library, c_void_p()
        self._check(
            rtc.hiprtcCreateProgram(byref(program), text.encode(), name.encode(), 0, None, None)
        )
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        status = rtc.hiprtcCompileProgram(program, len(options), given)
        log = self._bytes(program, rtc.hiprtcGetProgramLogSize, rtc.hiprtcGetProgramLog)
        words = log.rstrip(b"\0").decode(errors="replace")
        if status:
            return None, words or rtc.hiprtcGetErrorString(status).decode()
        code = self._bytes(program, rtc.hiprtcGetCodeSize, rtc.hiprtcGetCode)
        self._check(rtc.hiprtcDestroyProgram(byref(program)))
        return code, words

    def _bytes(self, program: c_void_p, get_size: Any, get: Any) -> bytes:
        size = c_size_t()
        self._check(get_size(program, byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(get(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"hiprtc: {self._library.hiprtcGetErrorString(status).decode()}")


class Handle(ctypes.Structure):
    """Every object of comgr is one 64-bit number, passed by value."""

    _fields_ = (("handle", c_uint64),)


# enumerators of amd_comgr.h
DATA_KIND_EXECUTABLE = 8
METADATA_STRING, METADATA_MAP, METADATA_LIST = 1, 2, 3

READ_MEMORY = ctypes.CFUNCTYPE(c_uint64, c_uint64, c_void_p, c_uint64, c_void_p)
PRINT_INSTRUCTION = ctypes.CFUNCTYPE(None, c_char_p, c_void_p)
PRINT_ADDRESS = ctypes.CFUNCTYPE(None, c_uint64, c_void_p)
MAP_ENTRY = ctypes.CFUNCTYPE(c_int, Handle, Handle, c_void_p)


class Comgr:
    """amd_comgr.h: the metadata and the disassembly of a code object."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libamd_comgr.so.3"))

    def kernels(self, code: bytes) -> list[dict[str, Any]]:
        """``amdhsa.kernels`` of the metadata; every scalar is a string."""
        comgr, data, root = self._library, Handle(), Handle()
        self._check(comgr.amd_comgr_create_data(DATA_KIND_EXECUTABLE, byref(data)))
        self._check(comgr.amd_comgr_set_data(data, c_size_t(len(code)), code))
        self._check(comgr.amd_comgr_get_data_metadata(data, byref(root)))
        kernels: list[dict[str, Any]] = self._value(root)["amdhsa.kernels"]
        self._check(comgr.amd_comgr_destroy_metadata(root))
        self._check(comgr.amd_comgr_release_data(data))
        return kernels

    def _value(self, node: Handle) -> Any:
        comgr, kind, size = self._library, c_int(), c_size_t()
        self._check(comgr.amd_comgr_get_metadata_kind(node, byref(kind)))
        if kind.value == METADATA_STRING:
            self._check(comgr.amd_comgr_get_metadata_string(node, byref(size), None))
            buffer = ctypes.create_string_buffer(size.value)
            self._check(comgr.amd_comgr_get_metadata_string(node, byref(size), buffer))
            return buffer.value.decode()
        if kind.value == METADATA_LIST:
            self._check(comgr.amd_comgr_get_metadata_list_size(node, byref(size)))
            return [self._item(node, index) for index in range(size.value)]
        if kind.value != METADATA_MAP:
            raise RuntimeError(f"comgr: metadata of kind {kind.value}")
        entries: list[tuple[Any, Any]] = []

        def take(key: Handle, value: Handle, _: Any) -> int:
            entries.append((self._value(key), self._value(value)))
            return 0

        self._check(comgr.amd_comgr_iterate_map_metadata(node, MAP_ENTRY(take), None))
        return dict(entries)

    def _item(self, node: Handle, index: int) -> Any:
        item = Handle()
        self._check(self._library.amd_comgr_index_list_metadata(node, c_size_t(index), byref(item)))
        value = self._value(item)
        self._check(self._library.amd_comgr_destroy_metadata(item))
        return value

    def disassemble(self, machine_code: bytes, arch: str) -> list[tuple[int, str]]:
        """(offset, text) of each instruction of one function."""
        comgr, info, size = self._library, Handle(), c_uint64()
        lines: list[str] = []

        def read(address: int, target: int, wanted: int, _: Any) -> int:
            piece = machine_code[address : address + wanted]
            ctypes.memmove(target, piece, len(piece))
            return len(piece)

        callbacks = (
            READ_MEMORY(read),
            PRINT_INSTRUCTION(lambda text, _: lines.append(text.decode().strip())),
            PRINT_ADDRESS(lambda address, _: None),
        )
        isa = f"amdgcn-amd-amdhsa--{arch}".encode()
        self._check(comgr.amd_comgr_create_disassembly_info(isa, *callbacks, byref(info)))
        offsets, offset = [], 0
        while offset < len(machine_code):
            offsets.append(offset)
            self._check(
                comgr.amd_comgr_disassemble_instruction(info, c_uint64(offset), None, byref(size))
            )
            offset += size.value
        self._check(comgr.amd_comgr_destroy_disassembly_info(info))
        return list(zip(offsets, lines, strict=True))

    def _check(self, status: int) -> None:
        if status:
            words = c_char_p()
            self._library.amd_comgr_status_string(status, byref(words))
            raise RuntimeError(f"comgr: {(words.value or b'').decode()}")


# of the ELF-64 specification, little-endian: offsets of e_shoff and e_shnum, then the two records
E_SHOFF, E_SHNUM = 0x28, 0x3C
SECTION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
SHT_SYMTAB, SHT_DYNSYM, STT_FUNC = 2, 11, 2


def functions(code: bytes) -> dict[str, bytes]:
    """The machine code of each function that a code object exports."""
    (table,) = struct.unpack_from("<Q", code, E_SHOFF)
    (count,) = struct.unpack_from("<H", code, E_SHNUM)
    sections = [SECTION.unpack_from(code, table + i * SECTION.size) for i in range(count)]
    found = {}
    for _, kind, _, _, offset, size, names, *_ in sections:
        if kind not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        for name, info, _, section, value, length in SYMBOL.iter_unpack(
            code[offset : offset + size]
        ):
            if info & 15 == STT_FUNC and section:
                start = sections[names][4] + name
                text = code[start : code.index(b"\0", start)].decode()
                first = sections[section][4] + value - sections[section][3]
                found[text] = code[first : first + length]
    return found


def answer(hiprtc: Hiprtc, comgr: Comgr, request: dict[str, Any]) -> dict[str, Any]:
    """Compile one source: its code object (None where refused), log, metadata and instructions."""
    code, log = hiprtc.compile(request["text"], request["name"], request["options"])
    if code is None:
        return {"code": None, "log": log}
    machine_code = functions(code)
    kernels = [
        (kernel, comgr.disassemble(machine_code[kernel[".name"]], request["arch"]))
        for kernel in comgr.kernels(code)
    ]
    return {"code": base64.b64encode(code).decode(), "log": log, "kernels": kernels}


def main() -> None:
    """Load the libraries, then answer until stdin ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the libraries print is no reply
    try:
        folder = Path(sys.argv[1])
        tools = Hiprtc(folder), Comgr(folder)
    except OSError as error:
        print(json.dumps({"unavailable": str(error)}), file=replies, flush=True)
        return
    print(json.dumps({}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*tools, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
