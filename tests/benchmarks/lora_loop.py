"""Runs examples/finetuning/finetune.py on this processor and writes a line for each run.

    PYTHON -m tests.benchmarks.lora_loop MODELS RUNS.csv
    torchrun --nproc-per-node 2 -m tests.benchmarks.lora_loop MODELS RUNS.csv

Python has torch, transformers and PEFT, and needs nothing of moetune. A rank has one thread; on two
of them every layer is sharded (FSDP2). The seconds are the median of the steps after `WARM_UP`: a
GEMM is compiled when its size first comes up, and experts get many numbers of rows.
The bytes saved for the backward pass are those of one step more, counted by autograd's hooks:
distinct storages, parameters aside. The columns are those of examples/profiles/h200-lora/runs.csv,
and the number of ranks.
"""

import csv
import importlib.util
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LOOP: Final = Path(__file__).parents[2] / "examples/finetuning/finetune.py"
STEPS: Final = 6
WARM_UP: Final = {"dense": 3, "experts": 16}
SETTINGS: Final = (
    # Method, rank, targets, sequences, tokens of one, checkpointing.
    ("lora", 8, "attention", 1, 512, 0),
    ("lora", 16, "attention+mlp", 2, 256, 0),
    ("lora", 64, "attention", 2, 512, 1),
)
MODULES: Final = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "attention+mlp": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
EXPERTS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def run(folder: Path, setting: tuple[Any, ...]) -> dict[str, Any]:
    """Train a few steps."""
    import torch
    from torch import nn

    spec = importlib.util.spec_from_file_location("finetune", LOOP)
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    method, lora_rank, targets, batch, sequence, checkpointing = setting
    rank, world = own_rank()
    has_experts = "num_experts" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    adapts_experts = has_experts and targets == "attention+mlp"
    settings = {
        "sequence_length": sequence,
        "micro_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "fully_shard": world > 1,
        "gradient_checkpointing": bool(checkpointing),
        "adapters": {
            "quantise": False,
            "dtype": "fp32",
            "r": lora_rank,
            "lora_alpha": 2 * lora_rank,
            "target_modules": MODULES["attention" if has_experts else targets],
            "target_parameters": EXPERTS if adapts_experts else [],
        },
    }
    options = Namespace(seed=0, random_weights=True, model=folder, tokens=None, lr=1e-4)
    torch.set_num_threads(1)
    loop.keep_memory_and_kernels()
    model = loop.prepare(options, settings, torch.device("cpu"), sharded=world > 1)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    source = loop.batches(
        options, settings, vocabulary=model.config.vocab_size, rank=rank, world=world
    )

    def step() -> None:
        tokens = next(source)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = []
    warm_up = WARM_UP["experts" if has_experts else "dense"]
    for _ in range(warm_up + STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    parameters = [local(one) for one in model.parameters()]
    owned = {one.untyped_storage().data_ptr() for one in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        # A gathered weight is a parameter of FSDP2's own, freed after its layer.
        of = tensor if tensor._base is None else tensor._base
        if storage.data_ptr() not in owned and not isinstance(of, nn.Parameter):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = next(source)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    saved = sum(kept.values())
    del loss
    states = [local(one) for state in optimizer.state.values() for one in state.values()]
    static = sum(one.nbytes for one in (*parameters, *states))
    return {
        "kind": "trial",
        "model": folder.name,
        "method": method,
        "rank": lora_rank,
        "targets": targets,
        "batch": batch,
        "sequence": sequence,
        "checkpointing": checkpointing,
        "weight_dtype": "bfloat16",
        "adapter_dtype": "float32",
        "autocast": 0,
        "kbit_prepare": 0,
        "optimizer_states": "param",
        "optimizer": "loop",
        "attention": "sdpa",
        "experts": "",
        "outcome": "ok",
        "static_bytes": static,
        "saved_bytes": saved,
        "step_s": round(statistics.median(seconds[warm_up:]), 6),
        "ranks": world,
    }


def own_rank() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rows(models: Path) -> Iterator[dict[str, Any]]:
    """Run every setting of every model."""
    for folder in sorted(models.iterdir()):
        for setting in SETTINGS:
            yield run(folder, setting)


def main() -> None:
    """Append the runs to a file."""
    models, out = map(Path, sys.argv[1:])
    rank, world = own_rank()
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    for row in rows(models):
        if rank:
            continue
        is_new = not out.is_file()
        with out.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
