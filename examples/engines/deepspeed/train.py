"""Trains a small Mixture-of-Experts model of transformers with DeepSpeed: a program to start from.

    TRAIN=train.py bash PLAN/launch/deepspeed/run.sh --model config.json --steps 8 --sequence 256

What a plan decides (batch, precision, ZeRO, AutoTP, AutoEP) is in the `deepspeed.json` that run.sh
names; the model, the text, the optimizer and the learning rate belong to this program. Text: the
sources of Python's standard library, byte by byte, so that nothing is downloaded.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--recompute", action="store_true", help="recompute every layer")
    parser.add_argument("--seed", type=int, default=0)
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


def bytes_of_text(most: int = 4_000_000) -> torch.Tensor:
    """Return the text as byte values, at most so many."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(text[:most]), dtype=torch.uint8).long()


def micro_batches(engine: Any, *, sequence: int, seed: int) -> Iterator[torch.Tensor]:
    """Draw micro-batches of token ids [sequences, tokens], others on every replica."""
    text = bytes_of_text()
    # Tensor ranks are neighbours and read the same.
    replica = engine.global_rank // max(1, engine.autotp_size())
    generator = torch.Generator().manual_seed(seed + replica)
    count = engine.train_micro_batch_size_per_gpu()
    while True:
        starts = torch.randint(len(text) - sequence, (count,), generator=generator)
        yield torch.stack([text[start : start + sequence] for start in starts.tolist()])


def main() -> None:
    """Train."""
    chosen = options()
    written = json.loads(Path(chosen.deepspeed_config).read_text(encoding="utf-8"))
    torch.manual_seed(chosen.seed)
    model = model_of(chosen.model, recompute=chosen.recompute)
    optimizer = None
    if "optimizer" not in written:
        optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.learning_rate)
    engine, *_ = deepspeed.initialize(args=chosen, model=model, optimizer=optimizer)
    batches = micro_batches(engine, sequence=chosen.sequence, seed=chosen.seed)
    for step in range(chosen.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            ids = next(batches).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
