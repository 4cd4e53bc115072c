"""The share of memory that SGLang gives itself, where a launch states none.

    reserve = max(10 GiB, 512 MiB + 1.5 MiB T + 1 GiB N / 8 + graphs) + 2 GiB with DeepEP
    share   = 1 - reserve / V

    V memory of the device
    T tokens of a chunk over all data ranks; of a decode instance its sequences, 2,048 at least
    N devices; the floor holds for devices of more than 60 GiB
    graphs  2 MiB of each captured sequence, 3 MiB of it and each data rank (4.5 beyond 300), and
            8 MiB of each captured prompt length or 1.5 GiB with compressed keys

(0.5.23, `arg_groups/memory_hook.py`). The sum is a share, not what steps take: data ranks with long
chunks leave none, and such launches state one.
"""

from typing import Final

from tuner.config.serve import Role
from tuner.costs.serve.cache_capacity import GIB
from tuner.costs.serve.decoder import AttentionKind
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.reserve import MIB
from tuner.engines.reading.serve_launch import InstanceKnobs

CAPTURED: Final = (256, 512)
"""Sequences of the largest graph of fewer than four devices, and of more (devices of 60 GiB and
more)."""
MANY_DEVICES: Final = 4
LEAST_ACTIVE: Final = 2048
LARGE_BYTES: Final = 60.0 * GIB
LARGE_RESERVE: Final = 10.0 * GIB
MANY_CAPTURED: Final = 300
PROMPT_GRAPHS: Final = 58
"""Prompt lengths that are captured up to 8,192 tokens (`cuda_graph_hook.py`)."""


def own_ratio(
    iteration: Iteration, setting: InstanceKnobs, *, role: Role, memory_bytes: float
) -> float:
    """Return the share of an instance.

    Args:
        iteration: of the instance.
        setting: of the launch.
        role: of the instance.
        memory_bytes: of one device.
    """
    degrees = iteration.degrees
    sequences = setting.running * degrees.attention_data
    usual = CAPTURED[degrees.devices >= MANY_DEVICES]
    captured = usual if setting.graph_sequences is None else setting.graph_sequences
    kinds = {group.attention.kind for group in iteration.decoder.layers}
    return automatic_ratio(
        degrees,
        memory_bytes=memory_bytes,
        active_tokens=sequences * iteration.checked_tokens
        if role is Role.DECODE
        else setting.step_tokens * degrees.attention_data,
        captured=0 if role is Role.PREFILL else min(captured, sequences),
        has_prompts=role is not Role.DECODE,
        has_latent_cache=bool(kinds & {AttentionKind.LATENT, AttentionKind.SPARSE_LATENT}),
        has_deepep=setting.a2a_backend.startswith("deepep"),
    )


def automatic_ratio(
    degrees: InstanceDegrees,
    *,
    memory_bytes: float,
    active_tokens: int,
    captured: int,
    has_prompts: bool,
    has_latent_cache: bool,
    has_deepep: bool,
) -> float:
    """Return the share of what is free; not above 0 where the engine fails.

    Args:
        degrees: of the instance.
        memory_bytes: of one device.
        active_tokens: of a chunk over all data ranks, or of a decode instance's sequences.
        captured: sequences of the largest decode graph, 0 without any.
        has_prompts: prompts are read, so that their lengths are captured too.
        has_latent_cache: keys are compressed.
        has_deepep: experts are reached by DeepEP.
    """
    reserve = 512.0 + 1.5 * max(active_tokens, LEAST_ACTIVE) + 1024.0 * degrees.devices / 8.0
    reserve += 2.0 * captured
    if degrees.attention_data > 1:
        reserve += (4.5 if captured > MANY_CAPTURED else 3.0) * captured * degrees.attention_data
    if has_prompts:
        reserve += 1536.0 if has_latent_cache else 8.0 * PROMPT_GRAPHS
    if memory_bytes > LARGE_BYTES:
        reserve = max(reserve, LARGE_RESERVE / MIB)
    if has_deepep and captured:
        reserve += 2048.0
    return 1.0 - reserve * MIB / memory_bytes
