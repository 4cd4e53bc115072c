"""A checkpoint with renumbered experts computes what it did."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.expect import refused
from tests.patience import patient_s
from tests.rows import Failures, each_row
from tests.tuner.engines.placement.testing import sample_placement, without_replicas
from tests.tuner.engines.testing import write_emitted
from tuner.engines.megatron_lm.checkpoint import permute_checkpoint, read_permutation
from tuner.engines.place_writers import emit_placement
from tuner.engines.placement.expert_names import parse_name
from tuner.errors import OutputError, SpecError

EXPERTS = 6

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",
}
_LATENT: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": EXPERTS}, (0, 1)),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 8, "head_dim": 8},
        (0, 1),
    ),
    "OLMoE": ("Olmoe", {"num_experts": EXPERTS}, (0, 1)),
    "DeepSeek-V3": ("DeepseekV3", {**_LATENT, "n_group": 1, "topk_group": 1}, (1,)),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": EXPERTS, "head_dim": 8, "rope_scaling": None},
        (1,),
    ),
}
"""By family: the class's prefix, its own sizes, its MoE layers to renumber."""

TOKENS = torch.arange(36).reshape(3, 12) % 50


def _save(name: str, folder: Path, **changes: Any) -> torch.Tensor:
    """Write a small random model in several shards; return its logits."""
    prefix, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**(_SIZES | sizes | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            # A new model's bias is zero, so that a bias left behind would not show.
            if "correction_bias" in key or "router.bias" in key:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    model.save_pretrained(folder, max_shard_size="6KB")
    return _logits(name, folder)


def _logits(name: str, folder: Path) -> torch.Tensor:
    model = getattr(transformers, f"{MODELS[name][0]}ForCausalLM").from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def _permutation(layers: tuple[int, ...], experts: int = EXPERTS) -> dict[int, tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return {layer: tuple(rng.permutation(experts).tolist()) for layer in layers}


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_the_same_and_experts_do_not(name: str, tmp_path: Path) -> None:
    before = _save(name, tmp_path / "old")
    permutation = _permutation(MODELS[name][2])
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation=permutation)
    after = _logits(name, tmp_path / "new")
    # Routers normalise in float32 and sum in another order now.
    assert float((before - after).abs().max()) < 1e-6 * float(before.abs().max())
    assert _names(tmp_path / "new") == _names(tmp_path / "old")
    moved = [
        key
        for path in (tmp_path / "old").glob("*.safetensors")
        for key, tensor in load_file(path).items()
        if "expert" in key and not torch.equal(tensor, _tensor(tmp_path / "new", key))
    ]
    assert moved


def _tensor(folder: Path, key: str) -> torch.Tensor:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if key in tensors:
            return tensors[key]
    raise KeyError(key)


@pytest.mark.filterwarnings("ignore")
def test_renumbering_only_the_experts_would_have_shown(tmp_path: Path) -> None:
    before = _save("Mixtral", tmp_path / "old")
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation=_permutation((0, 1)))
    gates = {
        key: _tensor(tmp_path / "old", key) for key in _names(tmp_path / "old") if "gate" in key
    }
    for path in (tmp_path / "new").glob("*.safetensors"):
        tensors = load_file(path)
        save_file(tensors | {k: gates[k] for k in tensors if k in gates}, path, {"format": "pt"})
    assert float((before - _logits("Mixtral", tmp_path / "new")).abs().max()) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_the_index_names_the_shard_that_holds_each_tensor(tmp_path: Path) -> None:
    _save("Qwen3-MoE", tmp_path / "old")
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation=_permutation((0, 1)))
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == _names(tmp_path / "old")
    for key, shard in index["weight_map"].items():
        with safe_open(tmp_path / "new" / shard, "pt") as file:
            assert key in file.keys()  # noqa: SIM118 - no mapping
    assert (tmp_path / "new" / "config.json").read_text() == (
        tmp_path / "old" / "config.json"
    ).read_text()


def _write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(dict(tensors), folder / "model.safetensors")


def _megatron(layout: str) -> dict[str, torch.Tensor]:
    """Return one layer of three experts whose tensors say whose they are."""
    head = "decoder.layers.5.mlp."
    tensors = {
        f"{head}router.weight": torch.arange(3.0)[:, None].repeat(1, 4),
        f"{head}router.expert_bias": torch.arange(3.0),
        f"{head}shared_experts.linear_fc1.weight": torch.full((2, 2), 9.0),
    }
    for expert in range(3):
        for part in ("linear_fc1", "linear_fc2"):
            name = (
                f"{head}experts.{part}.weight{expert}"
                if layout == "grouped"
                else f"{head}experts.local_experts.{expert}.{part}.weight"
            )
            tensors[name] = torch.full((2, 2), float(expert), dtype=torch.bfloat16)
    return tensors


@each_row("layout", ("grouped", "sequential"))
def test_megatron_names_are_renumbered_with_the_router(tmp_path: Path, layout: str) -> None:
    tensors = _megatron(layout)
    folder = tmp_path / layout
    folder.mkdir()
    _write_checkpoint(folder / "old", tensors)
    permute_checkpoint(folder / "old", folder / "new", permutation={5: (2, 0, 1)})
    new = load_file(folder / "new" / "model.safetensors")
    assert set(new) == set(tensors)
    # New expert 0 is old expert 2, and so is the router's first row.
    assert new["decoder.layers.5.mlp.router.weight"][:, 0].tolist() == [2.0, 0.0, 1.0]
    assert new["decoder.layers.5.mlp.router.expert_bias"].tolist() == [2.0, 0.0, 1.0]
    assert new["decoder.layers.5.mlp.shared_experts.linear_fc1.weight"][0, 0] == 9.0
    for key, tensor in new.items():
        part = parse_name(key)
        if part is not None and part.expert is not None:
            assert tensor[0, 0] == (2.0, 0.0, 1.0)[part.expert], key


def test_the_emitted_script_renumbers_a_checkpoint(tmp_path: Path) -> None:
    decision = without_replicas(layer_ids=(0, 5), num_layers=6)
    write_emitted(tmp_path / "launch", emit_placement("megatron", sample_placement(decision)))
    tensors = {
        f"decoder.layers.{layer}.mlp.{name}": torch.full((6, 2), float(layer))
        for layer in (0, 5)
        for name in ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    tensors["decoder.layers.5.mlp.router.weight"] = torch.arange(6.0)[:, None].repeat(1, 2)
    _write_checkpoint(tmp_path / "old", tensors)
    root = Path(__file__).parents[4]
    subprocess.run(
        [sys.executable, str(tmp_path / "launch/apply.py"), "old", "new"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        check=True,
        timeout=patient_s(120),
    )
    router = load_file(tmp_path / "new/model.safetensors")["decoder.layers.5.mlp.router.weight"]
    assert router[:, 0].tolist() == list(map(float, decision.physical_to_logical[1]))
    assert "--expert-model-parallel-size 3" in (tmp_path / "launch/README.txt").read_text()


def test_layers_outside_the_main_stack_are_unchanged(tmp_path: Path) -> None:
    draft = {f"mtp.{key.removeprefix('decoder.')}": t for key, t in _megatron("grouped").items()}
    _write_checkpoint(tmp_path / "old", _megatron("grouped") | draft)
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={5: (2, 0, 1)})
    new = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(new[key], tensor) for key, tensor in draft.items())


def test_routing_groups_may_move_but_not_split(tmp_path: Path) -> None:
    _write_checkpoint(tmp_path / "old", _megatron("grouped") | _fourth_expert())
    (tmp_path / "old" / "config.json").write_text(json.dumps({"n_group": 2, "topk_group": 1}))
    with pytest.raises(SpecError, match=r"1 of 2 groups of 2 experts.*splits a group"):
        permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={5: (0, 2, 1, 3)})
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={5: (3, 2, 0, 1)})
    assert (tmp_path / "new").is_dir()


def _fourth_expert() -> dict[str, torch.Tensor]:
    head = "decoder.layers.5.mlp."
    return {
        f"{head}router.weight": torch.arange(4.0)[:, None].repeat(1, 4),
        f"{head}router.expert_bias": torch.arange(4.0),
        f"{head}experts.linear_fc1.weight3": torch.full((2, 2), 3.0),
        f"{head}experts.linear_fc2.weight3": torch.full((2, 2), 3.0),
    }


def _without(*parts: str) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for key, tensor in _megatron("grouped").items()
        if not any(part in key for part in parts)
    }


def test_what_cannot_be_renumbered_is_refused_before_anything_is_written(
    tmp_path: Path, failures: Failures
) -> None:
    grouped = _megatron("grouped")
    odd = {"decoder.layers.5.mlp.experts.weight1": torch.ones(2, 2)}
    cases: list[tuple[dict[str, torch.Tensor], dict[int, tuple[int, ...]], str]] = [
        (grouped, {5: (0, 0, 1)}, "no permutation of experts.*redundant_experts 0"),
        (grouped, {5: (0, 1)}, r"has shape \[3(, 4)?\], the permutation 2 experts"),
        (grouped, {4: (0, 1, 2)}, "layer 4: the checkpoint has no router"),
        (_without("weight2"), {5: (0, 1, 2)}, "layer 5: the checkpoint has 2 experts"),
        (
            _without("experts.linear") | odd,
            {5: (0, 1, 2)},
            "not an expert layout that can be renumbered",
        ),
    ]
    for number, (tensors, permutation, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        _write_checkpoint(folder / "old", tensors)
        with failures.of(message):
            with refused(SpecError, match=message):
                permute_checkpoint(folder / "old", folder / "new", permutation=permutation)
            assert sorted(path.name for path in folder.iterdir()) == ["old"]


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, failures: Failures) -> None:
    (tmp_path / "old").mkdir()
    for data in (
        b"",
        b"\xff" * 8,
        (4).to_bytes(8, "little") + b"none",
        (30).to_bytes(8, "little") + b'{"a":{"shape":[1]}}           ',
        (2).to_bytes(8, "little") + b"{}" + b"rest",
    ):
        (tmp_path / "old" / "model.safetensors").write_bytes(data)
        with failures.of(data):
            with refused(SpecError):
                permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={0: (0,)})
            assert not (tmp_path / "new").exists()


def test_weights_in_other_formats_stay_behind(tmp_path: Path) -> None:
    _write_checkpoint(tmp_path / "old", _megatron("grouped"))
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"old numbers")
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={5: (2, 0, 1)})
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    _write_checkpoint(tmp_path / "old", _megatron("grouped"))
    (tmp_path / "new").mkdir()
    with pytest.raises(OutputError, match="exists"):
        permute_checkpoint(tmp_path / "old", tmp_path / "new", permutation={5: (2, 0, 1)})


@each_row("text", ("[]", "{", '{"layer_ids": [1], "permutation": [[0, 0]]}', "[" * 9999))
def test_a_file_that_is_no_permutation_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expert_permutation.json"
    path.write_text(text)
    with refused(SpecError):
        read_permutation(path)
