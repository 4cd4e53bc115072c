"""DeepSeek-V3 over many H100 against published throughput: `serving_wide.py [TABLES]`.

SGLang published 52,300 input tokens a second and machine of eight H100 on 4 machines (EP 32), and
22,300 output tokens on 9 machines (EP 72, 256 sequences a rank), prompts of 2,000 tokens, with
DeepEP, balanced experts and two-batch overlap (lmsys.org/blog/2025-05-05-large-scale-ep). Nothing
here was fitted to them. Experts were balanced as well as EPLB could, which lies between the two
printed loads: even ones, and the power law of unplaced random prompts.

Exit code 1: the published figure differs by more than a factor of 1.3 from even loads in halves.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from tests.tuner.decoders import DEEPSEEK_V3
from tuner.backtest.serving.tables import build_machines
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.whole_step import step_s, through_s

PER_MACHINE: Final = 8
PREFILL_PER_S: Final = 52_300.0
DECODE_PER_S: Final = 22_300.0
PROMPT_TOKENS: Final = 2000.0
STEP_TOKENS: Final = 16_000.0
"""Of a rank: eight prompts."""
SEQUENCES: Final = 256.0
WITHIN: Final = 1.3
FORMATS: Final = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="bf16"
)
EVEN: Final = ExpertLoads(share_LE=np.full((1, 256), 1.0 / 256), top_k=8)
EVEN_72: Final = ExpertLoads(share_LE=np.full((1, 288), 1.0 / 288), top_k=8)
"""288 slots on 72 ranks, with replicas counted as experts."""


def main(arguments: Sequence[str]) -> int:
    """Print both phases and return 1 if either is further off than stated."""
    machines, origins = build_machines(["h100_sxm"], [Path(name) for name in arguments])
    sys.stdout.write(f"kernels from {origins['h100_sxm']}\n")
    prefill = Iteration(
        decoder=DEEPSEEK_V3,
        formats=FORMATS,
        degrees=InstanceDegrees(attention_data=32, expert=32),
        engine="sglang",
        machine=machines["h100_sxm"],
        a2a_backend=A2aBackend.NORMAL,
    )
    decode = replace(
        prefill,
        degrees=InstanceDegrees(attention_data=72, expert=72),
        a2a_backend=A2aBackend.LOW_LATENCY,
    )
    missed = False
    for name, own, loads, published in (
        ("prompts", prefill, EVEN, PREFILL_PER_S),
        ("answers", decode, EVEN_72, DECODE_PER_S),
    ):
        for label, changed in (
            ("power law", own),
            ("even loads", replace(own, loads=loads)),
            ("even loads, halves", replace(own, loads=loads, two_batch_overlap=True)),
        ):
            result = _prompts_per_s(changed) if own is prefill else _answers_per_s(changed)
            sys.stdout.write(
                f"{name}, {label}: {result:,.0f} tokens a second and machine, published"
                f" {published:,.0f}\n"
            )
        missed |= not 1.0 / WITHIN <= result / published <= WITHIN
    return int(missed)


def _prompts_per_s(iteration: Iteration) -> float:
    """Of one machine, its ranks full of prompts."""
    tokens = np.array([STEP_TOKENS])
    prompts = STEP_TOKENS / PROMPT_TOKENS
    attention_s = prompts * iteration.prompt_s(np.array([PROMPT_TOKENS]))
    return float(PER_MACHINE * STEP_TOKENS / through_s(iteration, tokens, attention_s)[0])


def _answers_per_s(iteration: Iteration) -> float:
    sequences = np.array([SEQUENCES])
    seconds = step_s(iteration, sequences, np.array([PROMPT_TOKENS]))
    return float(PER_MACHINE * SEQUENCES / seconds[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
