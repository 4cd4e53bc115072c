"""Random training configurations in the words of stored plans; nothing here imports the product.

A configuration is a row of JSON fields as `decision` in plan.json has them, and a few of our own
that a decision does not say (`EXTRAS`). Rows are drawn to be consistent (degrees multiply to the
devices, layers add up, the batch divides), not to be launchable: formulas price more than targets
run. A fixed seed for each table; what is recorded holds the rows themselves, so that a comparison
never depends on the generator.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

Row = dict[str, Any]
T = TypeVar("T")

EXTRAS: Final = (
    *("busiest_ratio", "busiest_ratio_p99", "flash_attention", "dropout", "overlap_tensor"),
    *("recompute_products", "fused_grouped_mlp"),
)
MODULES: Final = (
    *("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"),
)
LAYER_SHARES: Final = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a row must agree with."""

    devices: int
    layers: int
    heads: int
    """Of keys and values."""
    experts: int
    """0: none."""
    modules: tuple[str, ...]
    """That the model has, of `MODULES`."""
    batch: int
    """Sequences of one step."""
    mtp_layers: int = 0
    fp8_recipe: str = ""


class Dice:
    """Choices by a fixed seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def one(self, choices: Sequence[T]) -> T:
        """Draw one of equal chances."""
        return choices[int(self._rng.integers(len(choices)))]

    def chance(self, ratio: float) -> bool:
        """Say yes so often."""
        return bool(self._rng.random() < ratio)

    def ratio(self, low: float, high: float) -> float:
        """Draw a number, three digits of it."""
        return round(low + (high - low) * float(self._rng.random()), 3)

    def parted(self, total: int, parts: int) -> tuple[int, ...]:
        """Part a number into so many of about one size, each at least 1."""
        found = [total // parts + (part < total % parts) for part in range(parts)]
        for _ in range(parts):
            taken, given = (int(self._rng.integers(parts)) for _ in range(2))
            if found[taken] > 1:
                found[taken] -= 1
                found[given] += 1
        return tuple(found)


def divisors(number: int, *, most: int | None = None) -> list[int]:
    """All divisors, smallest first."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def rows(
    count: int, *, seed: int, draw: Callable[[Dice], Row | None], most_tries: int = 200
) -> list[Row]:
    """Draw until so many are consistent."""
    dice, found = Dice(seed), []
    for _ in range(most_tries * count):
        row = draw(dice)
        if row is not None:
            found.append(row)
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} of {count} rows after {most_tries * count} tries")


def _degrees(dice: Dice, job: Job, *, most_context: int, most_stages: int) -> Row | None:
    tensor = dice.one(divisors(job.heads, most=8))
    context = dice.one(divisors(most_context))
    pipeline = dice.one(divisors(min(job.devices, 16)))
    if job.devices % (tensor * context * pipeline) or pipeline > job.layers:
        return None
    data = job.devices // (tensor * context * pipeline)
    ranks = tensor * context * data
    expert = dice.one(divisors(math.gcd(ranks, job.experts), most=64)) if job.experts else 1
    expert_tensor = dice.one(divisors(math.gcd(ranks // expert, tensor))) if job.experts else 1
    virtual = dice.one((1, 1, 2, 3, 4)) if pipeline > 1 else 1
    micro_batch = dice.one((1, 1, 2, 4))
    if pipeline * virtual > min(job.layers, most_stages) or job.batch % (micro_batch * data):
        return None
    if virtual > 1 and job.batch // (micro_batch * data) % pipeline:
        return None
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": context,
        "data_parallel_size": data,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "expert_data_parallel_size": ranks // (expert * expert_tensor),
        "micro_batch_size": micro_batch,
    }


def _layout(dice: Dice, job: Job, stages: int, *, is_alike: bool) -> tuple[int, ...] | None:
    if not is_alike:
        return dice.parted(job.layers, stages)
    each = -(-job.layers // stages)
    last = job.layers - each * (stages - 1)
    return (*([each] * (stages - 1)), last) if last >= 0 else None


def _again(dice: Dice, job: Job, layout: Sequence[int]) -> Row:
    """What is computed again; a share of the layers is said in layers, as plans say it."""
    level = dice.one(("none", "selective", "selective", "full"))
    modules: list[str] = []
    layers = None
    if level == "selective":
        modules = [module for module in job.modules if dice.chance(0.4)]
        if "moe" in modules:
            modules = [one for one in modules if one not in ("moe_act", "shared_experts")]
        level = level if modules else "none"
    if level == "full" and (share := dice.one(LAYER_SHARES)) < 1.0:
        layers = math.ceil(share * max(layout))
    return {
        "recompute": level,
        "recompute_modules": sorted(modules),
        "recompute_num_layers": layers,
        "stage_recompute": [level] * len(layout),
    }


def _copies(dice: Dice, row: Row) -> int | None:
    """Ranks that share one copy of the training state; None: all."""
    shared = row["data_parallel_size"] * row["context_parallel_size"]
    most = math.gcd(row["data_parallel_size"], row["expert_data_parallel_size"])
    copies = dice.one(divisors(most)) if row["zero_stage"] >= 2 and dice.chance(0.5) else 1
    return None if copies == 1 else shared // copies


def analytic_row(dice: Dice, job: Job) -> Row | None:
    """Draw what the analytic model can be asked about."""
    row = _degrees(dice, job, most_context=4, most_stages=24)
    if row is None:
        return None
    stages = row["pipeline_model_parallel_size"] * row["virtual_pipeline_model_parallel_size"]
    is_virtual = row["virtual_pipeline_model_parallel_size"] > 1
    layout = _layout(dice, job, stages, is_alike=is_virtual or dice.chance(0.3))
    if layout is None:
        return None
    row |= {
        "sequence_parallel": row["tensor_model_parallel_size"] > 1 and dice.chance(0.8),
        "zero_stage": dice.one((0, 1, 1, 2, 3)),
        "dispatcher": dice.one(("alltoall", "deepep", "hybridep")) if job.experts else "alltoall",
        "a2a_overlap": bool(job.experts) and dice.chance(0.3),
        "chunks": [dice.one((1, 1, 2, 4, 8)) if job.experts else 1] * stages,
        "pipeline_layout": list(layout),
        "mtp_num_layers": job.mtp_layers,
        "fp8_recipe": job.fp8_recipe,
        "schedule": dice.one(("1f1b", "1f1b", "zero_bubble")),
        "rank_order": dice.one(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")),
        "cuda_graph": dice.one(("none", "none", "partial", "full_iteration")),
        "overlap_grad_reduce": dice.chance(0.7),
        "ddp_bucket_size": dice.one((None, None, 10**7, 2 * 10**8)),
        "overlap_param_gather": dice.chance(0.7),
        "gradient_bytes": dice.one((4, 4, 2)),
        "optimizer_offload": dice.chance(0.15),
        "activation_offload": dice.chance(0.15),
        "ends_as_layers": dice.chance(0.2),
        **_again(dice, job, layout),
    }
    row["shard_ranks"] = _copies(dice, row)
    busiest = dice.ratio(1.0, 3.0) if job.experts and dice.chance(0.5) else 1.0
    extras = {
        "busiest_ratio": busiest,
        "busiest_ratio_p99": busiest * dice.ratio(1.0, 1.5),
        "flash_attention": not dice.chance(0.1),
        "dropout": dice.chance(0.1),
        "overlap_tensor": dice.chance(0.2),
        "recompute_products": row["recompute"] == "none" and dice.chance(0.2),
        "fused_grouped_mlp": bool(job.experts) and dice.chance(0.2),
    }
    assert tuple(extras) == EXTRAS
    return row | extras


def measured_row(dice: Dice, job: Job, *, nodes: int) -> Row | None:
    """Draw what the reference step can be asked about."""
    row = _degrees(dice, job, most_context=1, most_stages=12)
    if row is None:
        return None
    stages = row["pipeline_model_parallel_size"] * row["virtual_pipeline_model_parallel_size"]
    layout = _layout(dice, job, stages, is_alike=False)
    levels = ("none", "selective", "full") if job.experts else ("none", "full")
    strength = {level: number for number, level in enumerate(levels)}
    again = [dice.one(levels) for _ in range(stages)]
    strongest = max(again, key=lambda level: strength[level])
    ranks = row["data_parallel_size"] * row["tensor_model_parallel_size"]
    expert, per_node = row["expert_model_parallel_size"], job.devices // nodes
    is_far = expert > per_node and expert % per_node == 0 and dice.chance(0.5)
    return row | {
        "expert_tensor_parallel_size": 1,
        "expert_data_parallel_size": ranks // expert,
        "sequence_parallel": row["tensor_model_parallel_size"] > 1,
        "zero_stage": dice.one((0, 1, 2, 3)),
        "dispatcher": "hierarchical" if is_far else "alltoall",
        "recompute": strongest,
        "recompute_modules": ["moe"] if strongest == "selective" else [],
        "stage_recompute": again,
        "chunks": [
            1 if level == "none" or not job.experts else dice.one((1, 2, 4, 8)) for level in again
        ],
        "pipeline_layout": list(layout or ()),
    }
