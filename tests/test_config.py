"""Config: the slug is the config's one name, and the parser takes no guess."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import InvalidConfig

configs = st.builds(
    lambda path, ring, **knobs: Config(path=path, **(ring if path == "lds" else {}), **knobs),
    path=st.sampled_from(["registers", "pingpong", "lds", "two_pass"]),
    ring=st.fixed_dictionaries(
        {"stages": st.integers(2, 8), "bulk": st.booleans(), "reread": st.booleans()}
    ),
    block=st.sampled_from([64, 128, 192, 256, 512, 1024]),
    threads_per_row=st.sampled_from([8, 32, 64, 192, 1024]),
    vec=st.sampled_from([2, 4, 8, 16]),
    load_policy=st.sampled_from(["default", "keep", "stream"]),
    store_policy=st.sampled_from(["default", "keep", "stream"]),
    waves_per_eu=st.sampled_from([0, 1, 2, 4]),
    min_blocks=st.integers(0, 8),
    programs=st.sampled_from([0, 1, 2, 3, 4, 8]),
    finish=st.sampled_from(["kernel", "early", "last_block"]),
)


@given(configs)
def test_slug_round_trip(config: Config) -> None:
    assert Config.parse(config.slug) == config


@given(configs, st.randoms(use_true_random=False))
def test_knobs_come_in_any_order(config: Config, random: object) -> None:
    parts = config.slug.split("-")
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert Config.parse("-".join(parts)) == config


def test_omitted_knobs_have_fixed_defaults() -> None:
    assert Config.parse("b512") == Config(512, 512, 16, "registers")
    assert Config.parse("b512-t256-v16-lds3").stages == 3
    assert Config.parse("fk") == Config()


@pytest.mark.parametrize(
    ("slug", "near"),
    [
        ("b256-t128-v16-rag", "b256-t128-v16-reg"),
        ("b256-lsd3", "b256-lds3"),
        ("lds3-l", "lds3-ls"),  # another part begins with the same letter
        ("b256-v16-b256x", "b256-v16-t256"),  # the block is given
        ("B256-T128-V16", "b256-t128-v16"),
        ("b256_t128_v16_reg", "b256-t128-v16-reg"),
        ("b256 t128, v16", "b256-t128-v16"),
        ("b256-registers", "b256-reg"),
    ],
)
def test_unknown_slug_names_the_nearest(slug: str, near: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        Config.parse(slug)
    suggestion = str(error.value).split("nearest valid slug is ")[1].strip("'")
    assert suggestion == near
    Config.parse(suggestion)


@pytest.mark.parametrize("slug", ["fastest", "b256-reg-foo-bar", "b0", "hello world", "-"])
def test_a_slug_that_is_like_none_shows_one(slug: str) -> None:
    with pytest.raises(InvalidConfig, match="names no knob; a slug reads like 'b256-t256-v16-reg'"):
        Config.parse(slug)


@pytest.mark.parametrize("slug", ["ladder", "Ladder", "laddr", "LADDER "])
def test_the_ladder_is_known_and_is_no_slug(slug: str) -> None:
    with pytest.raises(InvalidConfig, match="config='ladder' is the ladder's choice"):
        Config.parse(slug)


def test_an_empty_slug_shows_one() -> None:
    with pytest.raises(InvalidConfig, match="reads like 'b256-t256-v16-reg'"):
        Config.parse(" ")


def test_a_knob_given_twice_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="block a second time"):
        Config.parse("b256-b512")


@given(st.text(alphabet="bltvwmpfksrdc2-0123456789", max_size=24))
def test_the_parser_never_fails_otherwise(text: str) -> None:
    try:
        config = Config.parse(text)
    except InvalidConfig:
        return
    assert Config.parse(config.slug) == config


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"path": "zz"}, "path='zz'.* is not one of registers, pingpong, lds, two_pass"),
        ({"load_policy": "nt"}, "load_policy='nt'.* is not one of default, keep, stream"),
        ({"finish": None}, "finish=None.* is not one of kernel, early, last_block"),
        ({"block": "256"}, "block='256'.* whole number"),
        ({"programs": -1}, "programs=-1.* whole number"),
    ],
)
def test_a_knob_has_one_of_its_values(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Config(**knobs)


@given(configs)
def test_the_repr_is_the_call_that_makes_it(config: Config) -> None:
    assert eval(repr(config)) == config
