"""Counts the tokens of each expert while torchtitan trains on the CPU, for a spec's `goal.routing`.

    ROUTING=routing.json torchrun --nproc-per-node 1 -m record_routing --module tiny_moe \
        --config tiny_moe_on_cpu --training.steps 8

Experts in parallel wait for the rank with the most tokens. torchtitan corrects the loads after
every step (an expert bias), so those of its own first steps count, not of random weights.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import train_on_cpu


def count_experts(counts: dict[torch.nn.Module, torch.Tensor]) -> None:
    """Let every router add the experts that it chooses to its counts."""
    from torchtitan.models.common.moe import TokenChoiceTopKRouter

    plain: Callable[..., tuple[torch.Tensor, ...]] = TokenChoiceTopKRouter.forward

    def counted(self: Any, *arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        scores, experts, every = plain(self, *arguments, **named)
        chosen = torch.bincount(experts.flatten(), minlength=self.num_experts)
        counts[self] = counts.get(self, 0) + chosen
        return scores, experts, every

    TokenChoiceTopKRouter.forward = counted


def main() -> None:
    """Train, then write the counts of all layers."""
    counts: dict[torch.nn.Module, torch.Tensor] = {}
    train_on_cpu.stand_in()
    count_experts(counts)
    from torchtitan.train import main as train

    train()
    rows, top_k = [row.tolist() for row in counts.values()], next(iter(counts)).top_k
    recording = {
        "model": "tiny_moe",
        "domain": "Python's standard library",
        "tokens": sum(rows[0]) // top_k,
        "top_k": top_k,
        "num_logical_experts": len(rows[0]),
        "layer_ids": list(range(len(rows))),
        "logical_count": rows,
    }
    file = Path(os.environ["ROUTING"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recording) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
