"""Pointers followed to the memory operations that they go to, on instructions written by hand."""

from __future__ import annotations

from assembly import kernel

from rmsnorm_raw.backends.provenance import memory_arguments

#: x at 0, its stride at 8, y at 16: two pointers and a number
ARGS = ("global_buffer", "by_value", "global_buffer")
ARGUMENTS = "s_load_dwordx4 s[4:7], s[0:1], 0x0"
OUTPUT = "s_load_dwordx2 s[8:9], s[0:1], 0x10"


def goes_to(*lines: str) -> list[str]:
    """The pointers of each memory operation, in order; "+0" is x and "+16" is y."""
    args = [{".value_kind": kind, ".offset": str(8 * i)} for i, kind in enumerate(ARGS)]
    built = kernel(ARGUMENTS, OUTPUT, *lines, "s_endpgm", args=args)
    found = memory_arguments(built)
    return [" ".join(sorted(found.get(one.offset, ()))) for one in built.asm if one.access]


def test_a_pointer_with_an_offset() -> None:
    assert goes_to(
        "v_lshl_add_u64 v[2:3], s[4:5], 0, v[6:7]", "global_load_dwordx4 v[8:11], v[2:3], off",
        "global_store_dwordx4 v1, v[8:11], s[8:9]",
    ) == ["+0", "+16"]  # fmt: skip


def test_an_address_by_carries_and_by_lanes() -> None:
    assert goes_to(
        "v_mov_b32_e32 v1, s5", "v_add_co_u32_e32 v2, vcc, s4, v0",
        "v_addc_co_u32_e32 v3, vcc, 0, v1, vcc", "v_readfirstlane_b32 s12, v2",
        "v_readfirstlane_b32 s13, v3", "s_and_b32 s13, s13, 0xffff",
        "buffer_load_dwordx4 v4, s[12:15], 0 offen lds",
    ) == ["+0"]  # fmt: skip


def test_what_is_loaded_is_no_address_any_more() -> None:
    assert goes_to(
        "global_load_dword v4, v0, s[4:5]", "global_store_dwordx2 v[4:5], v[6:7], off",
    ) == ["+0", ""]  # fmt: skip
    # nor is a number among the arguments, or a register that something else is put into
    assert goes_to("global_load_dword v4, v0, s[6:7]") == [""]
    assert goes_to("s_mov_b64 s[4:5], 0", "global_load_dword v4, v0, s[4:5]") == [""]


def test_branches_that_end_alike_go_to_both() -> None:
    assert goes_to(
        "s_cbranch_scc0 @5", "s_mov_b64 s[12:13], s[4:5]", "s_branch @6",
        "s_mov_b64 s[12:13], s[8:9]", "global_store_dword v0, v1, s[12:13]",
    ) == ["+0 +16"]  # fmt: skip


def test_a_pointer_that_a_loop_carries() -> None:
    assert goes_to(
        "v_mov_b64_e32 v[2:3], s[8:9]", "v_mov_b64_e32 v[4:5], 0",
        "global_store_dword v[4:5], v1, off", "v_lshl_add_u64 v[4:5], v[2:3], 0, 16",
        "s_cbranch_scc1 @4",
    ) == ["+16"]  # fmt: skip


def test_what_is_left_in_an_upper_half_does_not_reach_a_lower_one() -> None:
    # v7 still holds half of x's address; of the product's sum only the lower half is used
    assert goes_to(
        "v_mov_b64_e32 v[6:7], s[4:5]", "v_mov_b32_e32 v6, v0",
        "v_mad_u64_u32 v[2:3], s[2:3], s6, v1, v[6:7]", "v_mov_b32_e32 v3, 0",
        "v_lshl_add_u64 v[2:3], v[2:3], 0, s[8:9]", "global_store_dword v[2:3], v1, off",
    ) == ["+16"]  # fmt: skip
