"""Speed of pricing and searching strategies; run as `python tests/benchmarks/strategy_search.py`.

Three figures, one thread, the machine stated:

1. distinct decisions priced in full per second: every legal execution option of the best rows of a
   search, time and memory, without pruning;
2. the search of the whole space to its certificate: DeepSeek-V3 on 2,048 H800, Qwen3-235B on 512
   H100, and on 128, where memory binds: neither offloading nor graphs of a whole iteration, and
   nearly every strategy needs recomputation to fit;
3. search time by number of configurations.

Both wall and processor seconds are printed; with other load on the machine only the latter are
comparable.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from tests.benchmarks.bars import machine, say, timed
from tests.expect import present
from tuner.costs.train.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.devices.catalogue import find_device
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.search.settings import SearchSettings
from tuner.search.train.candidate_prices import price
from tuner.search.train.candidates import Candidates
from tuner.search.train.finalists import rank_by_simulation
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, to_certificate
from tuner.search.train.space_size import by_facts
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.search import Search as Limits

MODELS = Path(__file__).parents[2] / "examples" / "models"

PLAIN = Limits(
    optimizer_offload=(False,), activation_offload=(False,), cuda_graph=("none", "partial")
)
"""The default search space of `moetune plan`."""

ROWS_PRICED = 12
"""Number of best rows whose every execution option is priced."""


def question_of(model: str, device: str, *, nodes: int, batch: int) -> TrainProblem:
    """A model on nodes of eight devices, by the datasheet, for Megatron-LM."""
    spec, sheet = read_model(MODELS / model), find_device(device)
    pool = Pool(name="pool", device=device, nodes=nodes, devices_per_node=8)
    hardware = hardware_of_pool(sheet, pool, precision=GemmPrecision.BF16)
    return TrainProblem(
        model=spec,
        shape=shape_of_model(spec, mtp_layers=spec.mtp_num_layers),
        hardware=hardware,
        constants=uncalibrated(
            sheet.generation, precision=GemmPrecision.BF16, software=Software.MEGATRON_2026
        ),
        software=Software.MEGATRON_2026,
        memory_constants=MemoryConstants(),
        num_devices=pool.num_devices,
        memory_limit_bytes=pool.usable_memory_ratio * float(hardware.memory_bytes),
        sequence_length=4096,
        global_batch_size=batch,
        capabilities=MEGATRON_0_18,
    )


def searched(problem: TrainProblem) -> tuple[SearchOutcome, dict[str, Any]]:
    """Search a whole space; report the certificate, time and memory."""
    wall_s, used_s = time.perf_counter(), time.process_time()
    result = search(problem, SearchSettings(clock=time.perf_counter))
    ranking = rank_by_simulation(result, time_limit_s=2.0, clock=time.perf_counter)
    objective_s = ranking.objective_s[0] if ranking.objective_s else None
    certificate = to_certificate(result, objective_s=objective_s)
    counts = result.proof.counts
    decisions = counts.priced + counts.bounded + counts.open + counts.illegal
    return result, {
        "model": problem.model.name,
        "devices": problem.num_devices,
        "decisions": decisions,
        "legal": decisions - counts.illegal,
        "priced": counts.priced,
        "rows": result.degrees.num_legal,
        "status": certificate.status,
        "step_s": certificate.objective,
        "gap_ratio": certificate.gap_ratio,
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - used_s,
        "peak_rss_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """Peak memory of this program.

    Not ru_maxrss, which on Linux begins with what the process held that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def pricing_rate(result: SearchOutcome) -> str:
    """Price every legal option of the best rows; decisions per wall and processor second."""
    best = present(result.solutions)
    rows = best.candidates.taken(np.arange(min(ROWS_PRICED, len(best)))).rows
    parts = []
    for facts, chosen in by_facts(rows):
        legal = result.options.legal(facts)
        options = {axis: legal[:, at] for at, axis in enumerate(result.options.choices)}
        parts += [
            Candidates(
                rows={name: np.repeat(column[row], len(legal)) for name, column in rows.items()},
                options=options,
            )
            for row in chosen
        ]
    price(result.problem, result.options, parts[0])
    _, wall_s, used_s = timed(
        lambda: [price(result.problem, result.options, part) for part in parts]
    )
    count = sum(len(part) for part in parts)
    return (
        f"pricing: {count} decisions, {count / wall_s:,.0f}/s, {count / used_s:,.0f}/s of the"
        " processor"
    )


def main() -> None:
    """Print the figures."""
    deepseek, one = searched(question_of("deepseek-v3", "h800-sxm", nodes=256, batch=15360))
    _, two = searched(question_of("qwen3-235b-a22b", "h100-sxm", nodes=64, batch=2048))
    full = question_of("qwen3-235b-a22b", "h100-sxm", nodes=16, batch=1024)
    _, three = searched(replace(full, limits=PLAIN))
    growth = [
        searched(question_of("qwen3-30b-a3b", "h100-sxm", nodes=nodes, batch=32 * nodes))[1]
        for nodes in (2, 8, 32, 128)
    ]
    say(f"{machine()}, one thread", pricing_rate(deepseek))
    for line in (one, two, three, *growth):
        say(
            f"{line['model']} on {line['devices']}: {line['decisions']:.3g} decisions "
            f"({line['legal']:.3g} legal), {line['status']}, gap {line['gap_ratio']:.2%}, "
            f"{line['wall_s']:.2f} s, {line['cpu_s']:.2f} s of the processor, "
            f"{line['peak_rss_bytes'] / 1e9:.2f} GB at most, step {line['step_s']:.3f} s"
        )


if __name__ == "__main__":
    main()
