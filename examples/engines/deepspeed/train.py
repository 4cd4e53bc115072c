"""Trains a small Mixture-of-Experts model of transformers with DeepSpeed: a program to start from.

    TRAIN=train.py bash PLAN/launch/deepspeed/run.sh --model config.json --steps 8 --sequence 256
    python train.py --model config.json --sequence 256 --routing routing.json

The second command trains nothing: it writes which experts the model's tokens go to, for the spec's
`goal.routing`. Experts in parallel wait for the rank with the most tokens, in every layer.

What a plan decides (batch, precision, ZeRO, AutoTP, AutoEP) is in the `deepspeed.json` that run.sh
names, and the adapters, if it trains those alone, in `adapters.json`; the model, the text, the
optimizer and the learning rate belong to this program. Where CHECKPOINTS names a folder, it goes
on from the newest checkpoint there, saves one every SAVE_STEPS steps and keeps KEPT_CHECKPOINTS;
run.sh of a plan with `goal.reliability` sets both numbers. Text: the sources of Python's standard
library, byte by byte, so that nothing is downloaded.
"""

import argparse
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

CHECKPOINT: Final = re.compile(r"step-\d{1,12}")
"""Name of the folder of one, after its step."""


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--recompute", action="store_true", help="recompute every layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", type=Path, help="arguments of PEFT's LoraConfig, as JSON")
    parser.add_argument("--routing", type=Path, help="write the expert loads there, do not train")
    # The launcher of DeepSpeed gives it; torchrun sets LOCAL_RANK instead.
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def model_of(config: Path, *, recompute: bool) -> torch.nn.Module:
    """Build the model with random weights."""
    raw = json.loads(config.read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def adapted(model: torch.nn.Module, file: Path) -> torch.nn.Module:
    """Freeze the model and attach adapters (PEFT)."""
    from peft import LoraConfig, get_peft_model

    # Without it autograd enters no recomputed layer.
    model.enable_input_require_grads()
    chosen = json.loads(file.read_text(encoding="utf-8"))
    model = get_peft_model(model, LoraConfig(**chosen, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    return model


def bytes_of_text(most: int = 4_000_000) -> torch.Tensor:
    """Return the text as byte values, at most so many."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text[:most]), dtype=torch.uint8).long()


def sequences_of(
    text: torch.Tensor, generator: torch.Generator, count: int, sequence: int
) -> torch.Tensor:
    """Draw sequences [count, tokens] of the text."""
    starts = torch.randint(len(text) - sequence, (count,), generator=generator)
    return torch.stack([text[start : start + sequence] for start in starts.tolist()])


def micro_batches(engine: Any, *, sequence: int, seed: int) -> Iterator[torch.Tensor]:
    """Draw micro-batches of token ids [sequences, tokens], others on every replica."""
    text = bytes_of_text()
    # Tensor ranks are neighbours and read the same.
    replica = engine.global_rank // max(1, engine.autotp_size())
    generator = torch.Generator().manual_seed(seed + replica)
    count = engine.train_micro_batch_size_per_gpu()
    while True:
        yield sequences_of(text, generator, count, sequence)


def expert_loads(model: torch.nn.Module, ids: torch.Tensor) -> list[list[int]]:
    """Count the tokens of ids [sequences, tokens] by layer and expert; every layer has experts."""
    config = model.config
    with torch.no_grad():
        scores = model(input_ids=ids, output_router_logits=True).router_logits
    if len(scores) != config.num_hidden_layers:
        raise SystemExit("--routing: some layers of the model have no experts")
    chosen = [of.topk(config.num_experts_per_tok).indices.flatten() for of in scores]
    experts = scores[0].shape[-1]
    return [torch.bincount(of, minlength=experts).tolist() for of in chosen]


def write_routing(file: Path, model: torch.nn.Module, *, sequence: int, seed: int) -> None:
    """Write the expert loads of 64 sequences, in the layout that a spec's `goal.routing` names."""
    ids = sequences_of(bytes_of_text(), torch.Generator().manual_seed(seed), 64, sequence)
    counts = expert_loads(model, ids)
    recording = {
        "model": model.config.model_type,
        "domain": "Python's standard library",
        "tokens": ids.numel(),
        "top_k": model.config.num_experts_per_tok,
        "num_logical_experts": len(counts[0]),
        "layer_ids": list(range(len(counts))),
        "logical_count": counts,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recording) + "\n", encoding="utf-8")


def resume(engine: Any, folder: Path) -> int:
    """Load the newest finished checkpoint; return the steps that it has, 0 without one."""
    path, state = engine.load_checkpoint(str(folder))
    return 0 if path is None else state["step"]


def save(engine: Any, folder: Path, *, step: int, kept: int) -> None:
    """Save a checkpoint, then name it as the newest, then remove older ones.

    DeepSpeed's own `latest` is written while other ranks may still save.
    """
    engine.save_checkpoint(
        str(folder), tag=f"step-{step}", client_state={"step": step}, save_latest=False
    )
    deepspeed.comm.barrier()
    if engine.global_rank == 0:
        newest = folder / "latest.tmp"
        newest.write_text(f"step-{step}", encoding="utf-8")
        newest.replace(folder / "latest")
        remove_old(folder, step=step, kept=kept)


def remove_old(folder: Path, *, step: int, kept: int) -> None:
    """Keep the newest finished checkpoints; folders of other names are left alone."""
    found = {int(one.name[5:]): one for one in folder.iterdir() if CHECKPOINT.fullmatch(one.name)}
    # What a failure left unfinished is newer than the last that was loaded, and of its steps.
    for older in sorted(number for number in found if number <= step)[:-kept]:
        shutil.rmtree(found[older])


def train(chosen: argparse.Namespace, model: torch.nn.Module) -> None:
    """Train the model as the plan says."""
    written = json.loads(Path(chosen.deepspeed_config).read_text(encoding="utf-8"))
    optimizer = None
    if "optimizer" not in written:
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=chosen.learning_rate)
    engine, *_ = deepspeed.initialize(args=chosen, model=model, optimizer=optimizer)
    folder, done = os.environ.get("CHECKPOINTS"), 0
    every, kept = (int(os.environ.get(name, "0")) for name in ("SAVE_STEPS", "KEPT_CHECKPOINTS"))
    if folder:
        done = resume(engine, Path(folder))
    batches = micro_batches(engine, sequence=chosen.sequence, seed=chosen.seed)
    for _ in range(done * engine.gradient_accumulation_steps()):
        next(batches)
    for step in range(done, chosen.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            ids = next(batches).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if folder and every and (step + 1) % every == 0:
            save(engine, Path(folder), step=step + 1, kept=max(1, kept))
    deepspeed.comm.destroy_process_group()


def main() -> None:
    """Train, or write the expert loads."""
    chosen = options()
    torch.manual_seed(chosen.seed)
    model = model_of(chosen.model, recompute=chosen.recompute)
    if chosen.adapters is not None:
        model = adapted(model, chosen.adapters)
    if chosen.routing is None:
        train(chosen, model)
    else:
        write_routing(chosen.routing, model, sequence=chosen.sequence, seed=chosen.seed)


if __name__ == "__main__":
    main()
