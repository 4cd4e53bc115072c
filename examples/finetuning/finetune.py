"""Fine-tune a causal language model of Transformers: all weights, LoRA or QLoRA.

    torchrun --nproc-per-node 8 finetune.py --settings finetune.json --model FOLDER \
        --tokens TOKENS.npy --steps 1000 --output OUT

`finetune.json` is written by `moetune plan` with `emit: [transformers-peft]`; what no plan depends
on comes from the command line. TOKENS.npy is an array [sequences, at least sequence_length] of
token ids; without it tokens are random, which is enough to time a step. `--random-weights` needs
only the configuration in FOLDER. Adapters, or all weights, are saved in OUT.

One device is used as it is. On several, `fully_shard` shards every layer (FSDP2); otherwise each
rank holds a copy and gradients are averaged once a step, after its last backward pass.

A processor keeps freed memory and the kernels that it has compiled (`keep_memory_and_kernels`).
"""

import argparse
import ctypes
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

HALF = torch.bfloat16

KEPT_BY_MALLOC = ((-4, 0), (-1, 2**31 - 1), (-2, 64 * 2**20))
"""glibc's M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD: freed blocks stay in the heap."""
KEPT_KERNELS = 4096
"""Of oneDNN, at about 0.6 MB each, where it keeps 1024: every expert has GEMMs of its own number of
rows, and compiling one of a new size takes as long as running it several times."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=Path, required=True, help="finetune.json of a plan")
    parser.add_argument("--model", type=Path, required=True, help="a folder of Transformers")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--tokens", type=Path, help="token ids, [sequences, length], as .npy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: any")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for what was trained")
    return parser.parse_args()


def start() -> tuple[torch.device, int, int]:
    """Join the other ranks; return the device, this rank and their number."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_memory_and_kernels()
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, rank, world


def keep_memory_and_kernels() -> None:
    """On a processor: reuse freed memory and compiled GEMMs instead of making them anew each step.

    To be called before the first GEMM. Without it, each gathered layer (FSDP2) and much of what is
    saved for the backward pass lies in pages that the kernel maps and clears again every step.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for setting, value in KEPT_BY_MALLOC if mallopt else ():
        mallopt(setting, value)


def require_kernels(names: list[str], device: torch.device) -> None:
    """Stop where a GPU would run PyTorch's operations instead of the kernels that were priced."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if lacking and device.type == "cuda":
        raise SystemExit(
            f"{', '.join(lacking)}: not installed; the plan has the time and memory of its kernels"
        )


def load(options: argparse.Namespace, settings: dict[str, Any], device: torch.device) -> nn.Module:
    """Build the model with its weights in bf16, 4-bit where adapters ask for it."""
    torch.manual_seed(options.seed)
    chosen = settings["adapters"]
    extra: dict[str, Any] = {}
    if chosen and chosen["quantise"]:
        from transformers import BitsAndBytesConfig

        extra = {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=HALF,
            ),
            "device_map": {"": device},
        }
    if options.random_weights:
        if extra:
            raise SystemExit("--random-weights: 4-bit weights are loaded from a checkpoint only")
        config = AutoConfig.from_pretrained(options.model)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=HALF)
    stored = getattr(AutoConfig.from_pretrained(options.model), "quantization_config", None)
    method = stored and (stored if isinstance(stored, dict) else vars(stored))["quant_method"]
    if method and not (extra and method == "bitsandbytes"):
        raise SystemExit(
            f"{options.model}: holds weights of {method}, and the plan has those of bf16, or of 4"
            " bits made from them: convert the checkpoint to bf16 first"
        )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=HALF, **extra)
    return model if extra else model.to(device)


def adapt(model: nn.Module, chosen: dict[str, Any]) -> nn.Module:
    """Freeze the model and attach adapters."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    config = LoraConfig(
        r=chosen["r"],
        lora_alpha=chosen["lora_alpha"],
        target_modules=chosen["target_modules"],
        target_parameters=chosen["target_parameters"] or None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=chosen["dtype"] == "fp32")


def shard(model: nn.Module) -> None:
    """Shard every layer, then the rest, over all ranks."""
    from torch.distributed.fsdp import fully_shard

    layers = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1]
    for layer in max(layers, key=len):
        fully_shard(layer)
    fully_shard(model)


def batches(
    options: argparse.Namespace, settings: dict[str, Any], *, vocabulary: int, rank: int, world: int
) -> Iterator[torch.Tensor]:
    """Yield the micro-batches of this rank, for ever."""
    rows, length = settings["micro_batch_size"], settings["sequence_length"]
    rng = np.random.default_rng(options.seed)
    stored = None if options.tokens is None else np.load(options.tokens, mmap_mode="r")
    if stored is not None and stored.shape[1] < length:
        raise SystemExit(f"--tokens: {stored.shape[1]} tokens a sequence, {length} are needed")
    while True:
        if stored is None:
            every = rng.integers(0, vocabulary, (world * rows, length))
        else:
            every = stored[rng.integers(0, len(stored), world * rows), :length]
        own = every[rank * rows : (rank + 1) * rows]
        yield torch.from_numpy(np.ascontiguousarray(own, dtype=np.int64))


def average(parameters: list[nn.Parameter], world: int) -> None:
    """Average the gradients of replicas, one buffer for each type."""
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        grads = [one.grad for one in parameters if one.dtype == dtype and one.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= world
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def peak_bytes(device: torch.device, world: int) -> int:
    """Return the largest peak of all ranks; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    peak = torch.tensor([float(torch.cuda.max_memory_allocated())], device=device)
    if world > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak.item())


def prepare(
    options: argparse.Namespace, settings: dict[str, Any], device: torch.device, *, sharded: bool
) -> nn.Module:
    """Build what is trained."""
    model = load(options, settings, device)
    model.config.use_cache = False
    if settings["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if settings["adapters"]:
        model = adapt(model, settings["adapters"])
    if sharded:
        shard(model)
    model.train()
    return model


def main() -> None:
    """Train, and print a line for each step."""
    options = parse()
    settings = json.loads(options.settings.read_text(encoding="utf-8"))
    device, rank, world = start()
    require_kernels(settings.get("kernels", []), device)
    is_sharded = settings["fully_shard"] and world > 1
    model = prepare(options, settings, device, sharded=is_sharded)
    vocabulary = model.config.vocab_size
    trained = [one for one in model.parameters() if one.requires_grad]
    if rank == 0:
        print(f"trained parameters: {sum(one.numel() for one in trained)}", flush=True)
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=device.type == "cuda")
    source = batches(options, settings, vocabulary=vocabulary, rank=rank, world=world)
    rounds = settings["gradient_accumulation_steps"]
    for step in range(1, options.steps + 1):
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for _ in range(rounds):
            tokens = next(source).to(device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / rounds
            loss.backward()
            total += loss.detach()
        if world > 1 and not is_sharded:
            average(trained, world)
        if options.clip:
            nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = total.item()  # waits for the device
        seconds, peak = time.perf_counter() - began, peak_bytes(device, world)
        if rank == 0:
            line = f"step {step} loss {shown:.4f} seconds {seconds:.4f} peak_bytes {peak}"
            print(line, flush=True)
    if options.output is not None:
        save(model, options.output, rank=rank, is_sharded=is_sharded)
    if world > 1:
        dist.destroy_process_group()


def save(model: nn.Module, folder: Path, *, rank: int, is_sharded: bool) -> None:
    """Write what was trained, gathered from all ranks."""
    state = None
    if is_sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


if __name__ == "__main__":
    main()
