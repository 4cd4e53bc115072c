"""Run many configurations in one job and keep what tests compare: losses, gradients, loads.

    python -P -m profilers.local_ranks --ranks N tests.profilers.steps.testing CASES.json RESULTS.pt
    python -P -m tests.profilers.steps.testing METERED.json FOLDER N...

CASES maps a name to a step configuration; rank 0 writes {name: Observed as a dict}. Importing torch
costs a rank seconds, so layouts share a job, and the second form imports it once for jobs of
several numbers of ranks: `casesN.json` in FOLDER become `resultsN.pt`. METERED names the cases
whose activation bytes are wanted, which takes longer than their steps; without it all are metered.
Gradients are put together again under names that do not depend on the layout, such as
`layers.1.ffn.routed.gate_up`.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from profilers.local_ranks import rank_environment, rendezvous_folder
from profilers.steps.config import StepConfig
from profilers.steps.layout import ParallelState, join
from profilers.steps.model import StageModel
from profilers.steps.run import start
from profilers.steps.training import Training
from tests.patience import patient_s

Piece = tuple[str, int, int, Tensor]
"""(name, axis to join along, place along it, values)."""


def observe(config: StepConfig, layout: ParallelState, *, is_metered: bool) -> dict[str, Any]:
    """Train `config.steps` steps: what each of them saw, and the gradients of the first."""
    training = Training(config, layout)
    losses, loads, chunks, crossed = [], [], [], []
    gradients: dict[str, Tensor] = {}
    for step in range(config.steps):
        training.prepare(step)
        loss = training.compute_gradients().double()
        if step == 0:
            gradients = whole_gradients(config, layout, training)
        training.update()
        load_LE, chunks_L, far_bytes = training.settle()
        dist.all_reduce(loss)
        losses.append(loss.item())
        loads.append(load_LE.tolist())
        chunks.append(chunks_L.tolist())
        crossed.append(far_bytes.item())
    peaks: list[int] = [0] * dist.get_world_size()
    if is_metered:
        dist.all_gather_object(peaks, training.metered(config.steps).peak_bytes)
    return {
        "losses": losses,
        "gradients": gradients,
        "loads": loads,
        "chunks": chunks,
        "activation_bytes": peaks,
        "inter_node_bytes": crossed,
    }


def whole_gradients(
    config: StepConfig, layout: ParallelState, training: Training
) -> dict[str, Tensor]:
    """Join the gradients of all ranks; every rank gets them all."""
    own = list(_pieces(config, layout, training))
    everyone: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    pieces: dict[str, dict[int, Tensor]] = {}
    axes: dict[str, int] = {}
    for name, axis, place, values in (piece for rank in everyone for piece in rank):
        pieces.setdefault(name, {})[place] = values
        axes[name] = axis
    return {
        name: torch.cat([parts[place] for place in sorted(parts)], dim=axes[name])
        for name, parts in pieces.items()
    }


def _pieces(config: StepConfig, layout: ParallelState, training: Training) -> Iterator[Piece]:
    for chunk, module in enumerate(training.modules):
        stage = chunk * layout.degrees.pipeline + layout.pipeline_rank
        first = sum(before.num_layers for before in config.stages[:stage])
        assert isinstance(module, StageModel)
        for name, weight in module.named_parameters():
            if not weight.requires_grad:
                continue
            gradient = weight.grad
            assert isinstance(gradient, DTensor), name
            head, _, rest = name.partition(".")
            if head == "layers":
                layer, _, rest = rest.partition(".")
                name = f"layers.{first + int(layer)}.{rest}"
            yield from _split(config, layout, name, gradient.full_tensor())


def _split(config: StepConfig, layout: ParallelState, name: str, values: Tensor) -> Iterator[Piece]:
    leaf = name.rpartition(".")[2]
    if ".routed." in name:
        yield name, 0, layout.expert_rank, values
    elif leaf == "qkv":
        kv_rows = config.model.num_kv_heads * config.model.head_dim // layout.degrees.tensor
        sizes = [len(values) - 2 * kv_rows, kv_rows, kv_rows]
        for part, rows in zip("qkv", torch.split_with_sizes(values, sizes), strict=True):
            yield f"{name}.{part}", 0, layout.tensor_rank, rows
    elif leaf == "gate_up":
        for part, rows in zip(("gate", "up"), values.chunk(2), strict=True):
            yield f"{name}.{part}", 0, layout.tensor_rank, rows
    elif leaf in ("down", "output"):
        yield name, 1, layout.tensor_rank, values
    else:
        yield name, 0, 0, values


def main(cases: Path, results: Path, metered: Path | None = None) -> None:
    """Run every case on the ranks of this job."""
    torch.set_num_threads(1)
    configs = {
        name: StepConfig.model_validate(fields)
        for name, fields in json.loads(cases.read_text(encoding="utf-8")).items()
    }
    wanted = configs if metered is None else json.loads(metered.read_text(encoding="utf-8"))
    observed = {}
    device = torch.device("cpu")
    layouts: dict[str, ParallelState] = {}
    for name, config in configs.items():
        # Groups take longer to make than a case takes: equal degrees share theirs.
        degrees = config.parallelism.model_dump_json()
        if degrees not in layouts:
            layouts[degrees] = (
                join(config.parallelism, device=device, timeout=timedelta(seconds=patient_s(60)))
                if dist.is_initialized()
                else start(config, device=device)
            )
        observed[name] = observe(config, layouts[degrees], is_metered=name in wanted)
    if dist.get_rank() == 0:
        torch.save(observed, results)
    dist.destroy_process_group()


def fork_ranks(metered: Path, folder: Path, *, ranks: int) -> None:
    """Run the cases of a number of ranks on copies of this process, which has imported torch."""
    files = (folder / f"cases{ranks}.json", folder / f"results{ranks}.pt", metered)
    gc.freeze()  # or every collection would copy the pages that ranks share
    with rendezvous_folder() as met:
        environments = [rank_environment(rank, ranks=ranks, folder=met) for rank in range(ranks)]
        start_processes(  # type: ignore[no-untyped-call]  # of torch
            _forked, (environments, files), nprocs=ranks, start_method="fork"
        )


def _forked(
    rank: int, environments: Sequence[Mapping[str, str]], files: tuple[Path, Path, Path]
) -> None:
    os.environ.update(environments[rank])
    main(*files)


if __name__ == "__main__":
    first, second, *counts = sys.argv[1:]
    for count in map(int, counts):
        fork_ranks(Path(first), Path(second), ranks=count)
    if not counts:
        main(Path(first), Path(second))
