from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw.config import Config
from rmsnorm_raw.extras import Extras
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.records import SCHEMA, Damaged, Key, Record, document, parse, sha256

KEY = Key(
    schema=SCHEMA, op="backward", cols=8192, dtype="bfloat16", weight_dtype=None, store_rstd=True,
    has_rstd=True, need_dx=True, need_dweight=False, vec=16, rows_from=32768, device="NVIDIA H200",
    arch="sm_90", compute_units=132, compiler="NVRTC 13.0", cupy="14.1.0", kernels="ab" * 32,
    ladder=("b512-t512-v16-lds3bp-lk-ss-p1", ""), timing=1,
)  # fmt: skip
RECORD = Record(
    Config.parse("b512-t512-v16-lds4b-lk-ss-p1"),
    'FASTER 1.02x [1.01, 1.03], "cold" [and\nsteady]',
    {"cold": {"tuned": (370.25, 371.0), "ladder": (376.125,)}, "steady": {}},
    {"candidates": 61, "compile": 2},
    "12" * 32,
    "quick",
)
TEXT = document([(KEY, RECORD)]).encode()


def test_a_document_reads_back() -> None:
    assert parse(TEXT) == {KEY: RECORD}


def test_the_order_of_records_is_theirs_and_not_the_callers() -> None:
    pairs = [(replace(KEY, rows_from=rows), RECORD) for rows in (1, 64, 2048)]
    assert document(pairs) == document(pairs[::-1])
    assert parse(document(pairs).encode()) == dict(pairs)


def test_a_document_is_for_people_too() -> None:
    lines = TEXT.decode().splitlines()
    assert max(map(len, lines)) < 100
    assert '      "tuned": [370.25, 371.0]' in lines
    assert '    "config": "b512-t512-v16-lds4b-lk-ss-p1",' in lines


def test_times_keep_every_bit() -> None:
    times = tuple(math.sqrt(n) for n in range(2, 50))
    record = replace(RECORD, samples={"cold": {"tuned": times, "ladder": times}})
    assert parse(document([(KEY, record)]).encode())[KEY].samples["cold"]["tuned"] == times


def test_a_time_that_is_no_number_is_not_written() -> None:
    record = replace(RECORD, samples={"cold": {"tuned": (math.nan,), "ladder": ()}})
    with pytest.raises(ValueError, match="JSON"):
        document([(KEY, record)])


def test_other_fields_want_another_schema() -> None:
    """Whoever changes the fields raises SCHEMA, and then writes the new ones down here.

    ``extras`` came later under the same schema: a key without any is written as it was before.
    """
    assert SCHEMA == 1
    assert [field.name for field in fields(Key)] == [
        "schema", "op", "cols", "dtype", "weight_dtype", "store_rstd", "has_rstd", "need_dx",
        "need_dweight", "vec", "rows_from", "device", "arch", "compute_units", "compiler", "cupy",
        "kernels", "ladder", "timing", "extras",
    ]  # fmt: skip
    assert [field.name for field in fields(Record)] == [
        "config", "reason", "samples", "counts", "environment", "effort"
    ]  # fmt: skip


EXTRAS = [
    Extras(bias_dtype="float32"),
    Extras(residual_out_dtype="bfloat16"),
    Extras(residual_dtype="bfloat16"),
    Extras(out_dtype="float32"),
    Extras(dx_dtype="float16"),
    Extras(heads=32),
]


def test_a_key_with_extras_reads_back_and_is_another() -> None:
    keys = [KEY, *(replace(KEY, cols=4096, extras=extras) for extras in EXTRAS)]
    assert len({key.digest for key in keys}) == len(keys)
    text = document([(key, RECORD) for key in keys])
    assert parse(text.encode()) == dict.fromkeys(keys, RECORD)
    whole = json.loads(document([(keys[1], RECORD)]))
    assert whole["records"][0]["key"]["extras"] == {"bias_dtype": "float32"}


def test_a_key_without_extras_is_written_as_before_there_were_any() -> None:
    assert b"extras" not in TEXT
    assert KEY.digest == "e503820e4bc01a0ce6bdda6056b8e9abfb10143b5e50a34f3fe18da98f643765"


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1]])
def test_another_schema_has_no_records_and_is_not_damaged(schema: object) -> None:
    assert parse(json.dumps({"schema": schema, "records": 7}).encode()) == {}


@pytest.mark.parametrize(
    "text",
    ["", "7", "null", "[]", "{}", '{"schema": 1}', '{"schema": 1, "records": 7}', "[" * 100_000,
     '{"schema": 1, "records": [{}]}', '{"schema": NaN}', '{"schema": 1, "records": {"a": 1}}',
     "9" * 5000, "\ufeff{}"],
)  # fmt: skip
def test_other_json_is_damaged(text: str) -> None:
    with pytest.raises(Damaged):
        parse(text.encode())


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("key", {"cols": [1]}),
        ("key", {"more": 1}),
        ("key", {"ladder": 1}),
        ("key", {"extras": {"no_such": 1}}),
        ("key", {"extras": ["bias_dtype"]}),
        ("key", {"extras": {"scale": "dynamic"}}),  # there is no such problem
        ("key", {"extras": {"weight_offset": "1"}}),
        ("record", {"more": 1}),
        ("record", {"config": "b512-lds4x"}),
        ("record", {"config": None}),
        ("record", {"samples": [1]}),
    ],
)
def test_other_fields_are_damaged_whatever_the_checksum(
    part: str, change: dict[str, object]
) -> None:
    whole = json.loads(TEXT)
    (entry,) = whole["records"]
    entry[part] |= change
    entry["sha256"] = sha256({"key": entry["key"], "record": entry["record"]})
    with pytest.raises(Damaged):
        parse(json.dumps(whole).encode())


@given(st.integers(0, len(TEXT) - 1))
def test_a_document_cut_at_any_byte_is_damaged_or_whole(length: int) -> None:
    try:
        assert parse(TEXT[:length]) == {KEY: RECORD}
    except Damaged:
        assert length < len(TEXT.rstrip())


@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=1, max_size=8))
def test_bytes_written_over_it_never_give_another_record(at: int, junk: bytes) -> None:
    try:
        found = parse(TEXT[:at] + junk + TEXT[at + len(junk) :])
    except Damaged:
        return
    assert found in ({}, {KEY: RECORD})


@given(st.binary())
def test_junk_is_damaged(junk: bytes) -> None:
    with pytest.raises(Damaged):
        parse(junk)


@given(
    st.sampled_from(["forward", "backward"]),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from(["float16", "float32"]),
)
def test_the_key_names_a_problem(op: str, alignment: int, dtype: str) -> None:
    make = Problem.forward if op == "forward" else Problem.backward
    problem = make(512, 96, dtype, weight_dtype=None, alignment=max(alignment, 4))
    key = replace(
        KEY, op=problem.op, cols=96, dtype=dtype, need_dweight=problem.need_dweight,
        vec=problem.widest_vec, rows_from=512,
    )  # fmt: skip
    assert key.problem == problem
