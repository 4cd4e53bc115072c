"""The data type of a checkpoint's weights, from its `config.json`.

    quant_method        further field                              goal.quantization
    (absent)                                                       bf16
    fp8                 weight_block_size                          fp8_block, else fp8
                        and expert_dtype fp4 of the config         fp8_block_mxfp4
    fbgemm_fp8                                                     fp8
    mxfp4                                                          mxfp4
    modelopt            quant_algo FP8, NVFP4                      fp8, nvfp4
    compressed-tensors  format float-quantized, nvfp4-pack-…       fp8 (block: fp8_block), nvfp4
                        pack-quantized: 4 bits, groups of 32,      int4
                        attention, dense and shared networks ignored

Source: `quantization_config` as transformers' quantizers read it (FineGrainedFP8Config,
FbgemmFp8Config, Mxfp4Config, CompressedTensorsConfig) and as NVIDIA Model Optimizer exports it; the
released configs of DeepSeek-V3, DeepSeek-V4, Kimi-K2, Kimi-K2.5 and gpt-oss.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from tuner.errors import SpecError
from tuner.spec.files import read_json_object, shown_path, shown_value

UNQUANTIZED: Final[Literal["bf16"]] = "bf16"
_MODELOPT: Final[Mapping[str, str]] = {"FP8": "fp8", "NVFP4": "nvfp4"}
WeightPart = Literal["attention", "networks"]
_EXCEPTIONS: Final = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_PARTS: Final[Mapping[WeightPart, re.Pattern[str]]] = {
    "attention": re.compile(
        r"(self_attn|linear_attn|mixer)(\W*|.*\b(o|out)_proj.*|.*[(|]o(ut)?[|)].*)$"
    ),
    "networks": re.compile(r"(shared_experts?|mlp)(\W*|\W*down_proj.*)$"),
}
_LONGEST_NAME: Final = 200
_INT4_GROUP: Final = 32
_LAYER: Final = re.compile(r"layers\\?\.(\d+)")
_COMPRESSED: Final[Mapping[str, str]] = {
    "float-quantized": "fp8",
    "nvfp4-pack-quantized": "nvfp4",
}


def released_quantization(path: Path) -> str:
    """Return the type of a checkpoint's weights, as a value of `goal.quantization`.

    Args:
        path: of the `config.json`, or its folder.

    Raises:
        SpecError: it is unreadable, or the weights have a type that no plan is priced for.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json_object(file, what="model config")
    fields = _quantization_config(config)
    if fields is None:
        return UNQUANTIZED
    quantization = _weight_type(fields) if isinstance(fields, dict) else None
    if quantization == "fp8_block" and config.get("expert_dtype") == "fp4":
        return "fp8_block_mxfp4"
    if quantization is None:
        method = fields.get("quant_method") if isinstance(fields, dict) else fields
        raise SpecError(
            f"{shown_path(file)}: quantization_config: {shown_value(method)} weights are not priced"
            " as released; state the type to serve them in"
        )
    return quantization


def released_cache(config: Mapping[str, Any]) -> Literal["bf16", "fp8"]:
    """Return the type that a `config.json` asks for in the cache, bf16 where it names none.

    `kv_cache_scheme` of compressed-tensors and Model Optimizer, `kv_cache_quant_algo` of the latter
    (vLLM 0.32.0, utils/torch_utils.py and layers/attention/attention.py; SGLang 0.5.23,
    mem_cache/kv_cache_dtype.py; TensorRT-LLM, llmapi/llm_utils.py).
    """
    both = _released_fields(config)
    scheme = both.get("kv_cache_scheme") or both.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return (
            "fp8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else UNQUANTIZED
        )
    return "fp8" if isinstance(scheme, str) and scheme.lower().startswith("fp8") else UNQUANTIZED


def released_weights(config: Mapping[str, Any]) -> str:
    """Return the type that a `config.json` states for its weights; empty where it states none."""
    fields = _released_fields(config)
    return (_weight_type(fields) or "") if fields else ""


def int4_weight_bytes(config: Mapping[str, Any]) -> float:
    """Return the bytes of an int4 weight in a checkpoint's groups, of 32 where it states none.

    Model:   1/2 + (2 + z / 2) / g: a 16-bit scale for each group of g weights, and z, a 4-bit zero
             point unless weights are symmetric; channels (-1) have next to none of either
    Source:  `group_size` with `zero_point` or `sym` of AWQ, GPTQ and AutoRound, with `symmetric` in
             `config_groups` of compressed-tensors (vLLM 0.16.0, layers/quantization/awq.py,
             gptq_marlin.py: `scales`, `qzeros`; compressed_tensors/schemes/
             compressed_tensors_wNa16.py).
    """
    fields = _released_fields(config)
    for scheme in (*_weights(fields), fields):
        size, bits = scheme.get("group_size"), scheme.get("num_bits", scheme.get("bits"))
        is_int4 = bits == 4 and scheme.get("type", "int") == "int"
        if is_int4 and isinstance(size, int) and size:
            is_symmetric = scheme.get("symmetric", scheme.get("sym", not scheme.get("zero_point")))
            return 0.5 + (2.0 if is_symmetric else 2.5) / size * (size > 0)
    return 0.5 + 2.0 / _INT4_GROUP


def unquantized_parts(config: Mapping[str, Any], *, layers: int) -> tuple[WeightPart, ...]:
    """Return the parts that a checkpoint leaves in bf16 in at least half of its layers.

    A name, a pattern or a regular expression, which is not run, counts where it covers a part's
    last projection or says none (vLLM 0.33.0, model_executor/layers/quantization/).
    """
    fields, parts = _released_fields(config), list[WeightPart]()
    lists = [patterns for key in _EXCEPTIONS if isinstance(patterns := fields.get(key), list)]
    names = [
        name for exceptions in lists for name in map(str, exceptions) if len(name) <= _LONGEST_NAME
    ]
    for part, pattern in _PARTS.items():
        matches = [_LAYER.search(name) for name in names if pattern.search(name)]
        some = {match[1] for match in matches if match is not None}
        if None in matches or len(some) >= max(0.5 * layers, 1.0):
            parts.append(part)
    return tuple(parts)


def _quantization_config(config: Mapping[str, Any]) -> object:
    text, fields = config.get("text_config"), config.get("quantization_config")
    if fields is None and isinstance(text, dict):
        return text.get("quantization_config")
    return fields


def _released_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _quantization_config(config)
    if not isinstance(fields, dict):
        return {}
    inner = fields.get("quantization")
    return {**(inner if isinstance(inner, dict) else {}), **fields}


def _weight_type(fields: Mapping[str, Any]) -> str | None:
    match fields.get("quant_method"):
        case "fp8":
            return "fp8_block" if fields.get("weight_block_size") else "fp8"
        case "fbgemm_fp8":
            return "fp8"
        case "mxfp4":
            return "mxfp4"
        case "modelopt":
            return _MODELOPT.get(str(fields.get("quant_algo")))
        case "compressed-tensors" if fields.get("format") == "pack-quantized":
            return "int4" if _packs_experts(fields) else None
        case "compressed-tensors":
            quantization = _COMPRESSED.get(str(fields.get("format")))
            return "fp8_block" if quantization == "fp8" and _is_by_block(fields) else quantization
    return None


def _is_by_block(fields: Mapping[str, Any]) -> bool:
    return any(scheme.get("strategy") == "block" for scheme in _weights(fields))


def _packs_experts(fields: Mapping[str, Any]) -> bool:
    """Return whether routed experts alone are symmetric int4 in groups of 32, each with a scale."""
    int4 = {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}
    others = ("self_attn", "shared_experts", "mlp\\.(")
    weights, names = _weights(fields), fields.get("ignore")
    exceptions = " ".join(map(str, names)) if isinstance(names, list) else ""
    return (
        bool(weights)
        and all(scheme.items() >= int4.items() for scheme in weights)
        and all(part in exceptions for part in others)
    )


def _weights(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = fields.get("config_groups")
    members = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in members if isinstance(group, dict)]
    return [scheme for scheme in weights if isinstance(scheme, dict)]
