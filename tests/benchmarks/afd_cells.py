"""Decode step of attention-FFN disaggregation as vLLM's plugin runs it, beside aggregated devices.

For the same devices and requests: the plugin with one batch and with two-batch overlap
(tuner/costs/serve/remote_ffn.py), and an aggregated instance on as many devices. Kernels are the
datasheet's, so the figures are reproducible:

    python tests/benchmarks/afd_cells.py
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.machine import ServingMachine
from tuner.costs.serve.whole_step import step_s
from tuner.devices.catalogue import find_device
from tuner.search.serve.afd_options import remote_ffn_step
from tuner.search.serve.options import ServingPool
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[2] / "examples" / "models"
FORMATS = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="bf16"
)
CASES = (
    ("deepseek-v3", 8, 8),
    ("deepseek-v3", 16, 8),
    ("deepseek-v3", 32, 16),
    ("qwen3-235b-a22b", 4, 4),
    ("qwen3-235b-a22b", 8, 4),
    ("qwen3-235b-a22b", 16, 8),
)
"""Model, attention devices, expert devices."""
REQUESTS = (16.0, 64.0, 256.0)
"""Of an attention device."""
PAST = 2000.0


def serving_pool() -> ServingPool:
    """Return machines of eight H200 with a NIC of 400 Gbit/s each."""
    sheet = find_device("h200-sxm")
    pool = Pool(name="h200", device="h200-sxm", nodes=8, devices_per_node=8, nic=50e9)
    return ServingPool(
        pool=pool,
        machine=ServingMachine(sheet=sheet, tables=None),
        memory_bytes=float(sheet.memory_bytes),
        source="datasheet",
    )


def rows() -> Iterator[tuple[str, int, int, float, list[float]]]:
    """Yield model, devices, requests, and milliseconds: one batch, halves, together."""
    here = serving_pool()
    for name, attention, experts in CASES:
        decoder = decoder_of(read_model(MODELS / name))
        ffn = Iteration(
            decoder=decoder,
            formats=FORMATS,
            degrees=InstanceDegrees(attention_data=experts, expert=experts),
            engine="vllm",
            machine=here.machine,
            a2a_backend=A2aBackend.ALLGATHER,
        )
        degrees = InstanceDegrees(attention_data=attention)
        n = np.array(REQUESTS)
        past = np.full_like(n, PAST)
        plugin = [
            step_s(remote_ffn_step(ffn, degrees, here, halves=halves), n, past)
            for halves in (False, True)
        ]
        every = attention + experts
        num = decoder.experts.num if decoder.experts else 1
        ranks = max(size for size in range(1, every + 1) if num % size == 0)
        together = replace(ffn, degrees=InstanceDegrees(attention_data=ranks, expert=ranks))
        aggregated_s = step_s(together, n * attention / ranks, past)
        for at, requests in enumerate(REQUESTS):
            result = (*plugin, aggregated_s)
            yield name, attention, experts, requests, [1e3 * float(one[at]) for one in result]


def table() -> Iterator[str]:
    """Yield the lines to print, in milliseconds a step."""
    yield f"{'model':16} {'A + F':7} {'n':>4} {'one':>9} {'halves':>9} {'together':>9}"
    for name, attention, experts, requests, result in rows():
        times = " ".join(f"{value:9.1f}" for value in result)
        yield f"{name:16} {attention:2} + {experts:2} {requests:4.0f} {times}"


def main() -> None:
    """Print the table."""
    for line in table():
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
