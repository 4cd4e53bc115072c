"""Overrides, interpolations and sections of Hydra's settings."""

from tuner.engines.reading.hydra import (
    merged,
    override_values,
    resolved,
    scalar,
    value_at,
    yaml_values,
)


def test_overrides_are_nested_and_typed() -> None:
    words = ["python3", "a.b=1", "+a.c=True", "++a.d.e=null", "x=[1,2]", "y='t'"]
    words += ["--flag=1", "f=$HOME/z"]
    values, unknown = override_values(words)
    assert values == {"a": {"b": 1, "c": True, "d": {"e": None}}, "x": [1, 2], "y": "t"}
    assert unknown == ("f",)
    assert (scalar("1e-6"), scalar("0.5"), scalar("a: b: c")) == (1e-6, 0.5, "a: b: c")


def test_later_settings_are_over_earlier_ones_section_by_section() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {
        "a": {"b": 1, "c": 3},
        "d": 4,
    }
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert override_values(["a=1", "a.b=2"])[0] == {"a": {"b": 2}}


def test_interpolations_are_resolved_or_left_out() -> None:
    values = {
        "n": 4096,
        "m": {"x": "${n}", "product": "${mul:${n}, ${m.k}}", "k": 2},
        "other": "${oc.select:absent.key,7}",
        "known": "${oc.select:absent.default,7}",
        "lost": "${now:%Y}",
        "loop": "${loop}",
    }
    found = resolved(values, {"absent.default": 9})
    assert found == {
        "n": 4096,
        "m": {"x": 4096, "product": 8192, "k": 2},
        "other": 7,
        "known": 9,
    }
    assert value_at(found, "m.k") == 2
    assert value_at(found, "m.z") is value_at(found, "n.z") is None


def test_what_is_no_mapping_is_no_configuration() -> None:
    assert yaml_values("- 1\n- 2\n") is None
    assert yaml_values("a: [") is None
    assert yaml_values("a: {b: 1}\n") == {"a": {"b": 1}}
