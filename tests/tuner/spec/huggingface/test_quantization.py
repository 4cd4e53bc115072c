"""The type that a checkpoint's weights were released in."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rows import Failures
from tuner.errors import SpecError
from tuner.spec.huggingface.quantization import (
    int4_weight_bytes,
    released_quantization,
    unquantized_parts,
)

MODELS = Path(__file__).parents[4] / "examples" / "models"


def test_released_configs_say_it(tmp_path: Path) -> None:
    shipped = {path.name for path in MODELS.iterdir() if path.is_dir()}
    result = {name: released_quantization(MODELS / name) for name in shipped}
    special = {name: one for name, one in result.items() if one != "bf16"}
    assert special == {
        "deepseek-v3": "fp8_block",
        "deepseek-v3.2": "fp8_block",
        "deepseek-v4-flash": "fp8_block_mxfp4",
        "minimax-m2": "fp8_block",
        "kimi-k2": "fp8_block",
        "kimi-k2.5": "int4",
        "gpt-oss-120b": "mxfp4",
        "gpt-oss-20b": "mxfp4",
    }
    with pytest.raises(SpecError):
        released_quantization(tmp_path)


def test_other_methods_are_read_or_refused(tmp_path: Path) -> None:
    block = {"config_groups": {"group_0": {"weights": {"strategy": "block"}}}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    int4 = {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}
    in_int4 = packed | {"config_groups": {"group_0": {"weights": int4}}}
    others = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up)_proj.*"]
    wide = {"config_groups": {"group_0": {"weights": int4 | {"group_size": 128}}}}
    cases: tuple[tuple[Any, str], ...] = (
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", **block}, "fp8_block"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (packed, ""),
        (in_int4, ""),
        (in_int4 | {"ignore": others}, "int4"),
        (in_int4 | {"ignore": others[1:]}, ""),
        (in_int4 | {"ignore": others[:2]}, ""),
        (packed | wide | {"ignore": others}, ""),
        ({"quant_method": "awq", "bits": 4}, ""),
        ("int4", ""),
    )
    failures = []
    for number, (written, expected) in enumerate(cases):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"quantization_config": written}))
        try:
            result = released_quantization(path)
        except SpecError as error:
            result = "" if "state the type to serve them in" in str(error) else str(error)
        if result != expected:
            failures.append(f"{written}: {result}")
    assert failures == []


def test_lists_of_exceptions_name_the_parts_that_stay_in_bf16(failures: Failures) -> None:
    each = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(126)]
    ends = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 125)]
    for key, names, expected in (
        ("modules_to_not_convert", ["lm_head", *each, *ends], {"attention"}),
        ("modules_to_not_convert", each[:62], set()),
        ("modules_to_not_convert", each[:63], {"attention"}),
        ("modules_to_not_convert", ["model.layers.*.self_attn"], {"attention"}),
        ("modules_to_not_convert", ["model.layers.3.self_attn.indexer.k_norm"], set()),
        ("modules_to_not_convert", ["model.layers.*.mlp.gate", "lm_head"], set()),
        ("ignore", ["re:.*self_attn.*", "re:.*mlp.gate$"], {"attention"}),
        ("ignore", ["re:.*self_attn\\.(q|k|v|o)_proj"], {"attention"}),
        ("ignore", ["re:.*self_attn.(q|k|v)_proj"], set()),
        ("ignored_layers", ["re:.*shared_experts.*"], {"networks"}),
        ("exclude_modules", ["model.layers.*.mlp.shared_expert.*"], {"networks"}),
        ("exclude_modules", ["model.layers.*.mlp.experts.*"], set()),
        ("exclude_modules", ["model.layers.*.linear_attn*"], {"attention"}),
        ("exclude_modules", ["model.layers.*.linear_attn.conv1d"], set()),
        ("exclude_modules", [7, None, "x" * 10**6], set()),
        ("exclude_modules", "self_attn", set()),
    ):
        with failures.of(key, str(names)[:80]):
            config = {"quantization_config": {key: names}}
            assert set(unquantized_parts(config, layers=126)) == expected
            assert set(unquantized_parts({"text_config": config}, layers=126)) == expected
    assert unquantized_parts({}, layers=126) == ()


def test_int4_weights_carry_the_scales_and_zero_points_of_their_groups(failures: Failures) -> None:
    packed = {"num_bits": 4, "type": "int", "group_size": 64, "symmetric": False}
    cases: tuple[tuple[dict[str, Any], float], ...] = (
        ({}, 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.51953125),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.515625),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}, 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 0.5625),
        ({"config_groups": {"group_0": {"weights": packed}}}, 0.5390625),
        ({"config_groups": {"group_0": {"weights": packed | {"type": "float"}}}}, 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, 0.5625),
    )
    for fields, expected in cases:
        with failures.of(fields):
            assert int4_weight_bytes({"quantization_config": fields}) == expected
