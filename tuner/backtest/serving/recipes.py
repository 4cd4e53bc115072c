"""Load and settings of a published launch beyond what its columns state.

InferenceX rows follow its recipes (github.com/SemiAnalysisAI/InferenceX, benchmarks/single_node):
10 C requests, of lengths even in 0.8 to 1 of the nominal; SGLang on Blackwell looks for requests
every 10 steps below 16 requests and every 30 from there on (`--scheduler-recv-interval`);
TensorRT-LLM streams tokens of models with experts ten at a time (`stream_interval: 10`), and for
Llama-70B with 1,024 tokens in and out on fewer than eight devices it waits up to 20 iterations for
more prompts (`batch_wait_timeout_iters: 20`, benchmarks/70b_*_trt_slurm.sh until October 2025).
These scripts are facts of a launch, as its degrees are, and not derived from measured rows.

Other rows come from undocumented drivers. Their load was inferred from the rows:

    prompts of powers of two      outputs of 0.95 to 1 of the nominal length (vLLM, TensorRT-LLM),
                                  of exactly that length with SGLang (Qwen3-32B)
    prompts of round thousands    outputs of 0.95 to 1 of the nominal length

Equal output lengths keep SGLang in lock-step: prompts go first, so all sequences of a burst start
and end at the same step and send the next burst, whose prompts then queue behind each other in
every round. With different lengths a prompt queues only behind those that arrive near it: with
8,000 tokens in and 64 requests of Llama-8B that is 0.85 instead of 4.8 s, and 1.1 s were measured.
Only one pair (model, engine) shows lock-step. A rule derived from one pair is not available to a
prediction of an unseen pair: `is_unseen` predicts without it.

Host work per sequence and step is paid by engines whose scheduler waits for each step: vLLM before
asynchronous scheduling became its default (0.14), and engines that stream every token from the
scheduling process, as under the undocumented driver.
"""

import re
from dataclasses import dataclass
from typing import Final

from tuner.backtest.serving.launches import Harness, PublishedLaunch
from tuner.engines.registry import serve_traits
from tuner.simulate.serving.client import DELAY_S

STREAM_STEPS: Final = 10.0
BALANCE_STEPS: Final = 45.0
"""With attention data parallelism prompts wait until every rank has one, 60 steps at most
(`timeout_iters: 60`): those that begin a wait all of it, those that come meanwhile half."""
GENERATED_EXPERTS: Final = (0, 19)
"""First release of vLLM that runs block-scaled experts with FlashInfer's kernels, Triton's
before."""
TRITON_EXPERTS: Final = "vllm@0.19.0"
"""The table that measured them with Triton."""
SEQUENCE_S: Final = 25e-6
"""Host seconds per running sequence and step where nothing hides them; 20 to 45 us are seen."""
ASYNCHRONOUS: Final = (0, 14)
"""First release of vLLM that schedules the next step while one runs."""
OTHER_LEAST_RATIO: Final = 0.95
"""Shortest length of the undocumented driver where waves break up."""
BATCH_WAIT_STEPS: Final = 15.0
"""TensorRT-LLM's wait for more prompts (`batch_wait_timeout_iters: 20`): those that begin a wait
all of it, those that come meanwhile half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings that the columns do not state."""

    least_ratio: float
    """Shortest length, of the nominal one."""
    delay_s: float = 0.0
    """Mean time from the end of a response to the client's next request."""
    poll_steps: int = 1
    stream_steps: float = 0.0
    """Steps that a token waits to be streamed."""
    client_s: float
    sequence_s: float = 0.0
    step_tokens: int | None = None
    """Token budget of a step; None: the engine's usual one."""
    experts_table: str = ""
    """Table of the measured expert kernels; empty: the engine's newest."""


def find_recipe(launch: PublishedLaunch, *, is_unseen: bool = False) -> Recipe:
    """Look up what is known of a launch.

    Args:
        launch: that was measured.
        is_unseen: ignore what only rows of its model and engine have shown.
    """
    is_known = launch.harness is Harness.INFERENCEX
    has_waves = launch.engine == "sglang" and launch.harness is Harness.OTHER
    return Recipe(
        least_ratio=0.8
        if is_known
        else (1.0 if has_waves and not is_unseen else OTHER_LEAST_RATIO),
        delay_s=DELAY_S,
        poll_steps=_poll_steps(launch) if is_known else 1,
        stream_steps=_stream_steps(launch) if is_known else 0.0,
        client_s=serve_traits()[launch.engine].client_s,
        sequence_s=SEQUENCE_S if _waits(launch) else 0.0,
        step_tokens=_step_tokens(launch) if is_known else None,
        experts_table=_experts_table(launch),
    )


def _poll_steps(launch: PublishedLaunch) -> int:
    is_polled = launch.engine == "sglang" and launch.decoder.name in (
        "deepseek-v3",
        "qwen3.5-397b-a17b",
    )
    if not is_polled or not launch.is_blackwell:
        return 1
    return 10 if launch.concurrency < 16 else 30


def _stream_steps(launch: PublishedLaunch) -> float:
    if launch.engine != "trtllm" or launch.is_disaggregated:
        # The first token comes from the prefill side, which streams it at once.
        return 0.0
    if launch.decoder.experts is None:
        is_short = launch.input_tokens == launch.output_tokens == 1024
        waits = launch.decoder.name == "llama-3.1-70b" and is_short and launch.devices < 8
        return BATCH_WAIT_STEPS if waits else 0.0
    is_balanced = launch.sides[0].degrees.attention_data > 1
    return STREAM_STEPS + (BALANCE_STEPS if is_balanced else 0.0)


def _experts_table(launch: PublishedLaunch) -> str:
    is_old = () < _version(launch.release) < GENERATED_EXPERTS
    is_block_scaled = launch.formats.experts == "fp8_block"
    return TRITON_EXPERTS if launch.engine == "vllm" and is_old and is_block_scaled else ""


def _step_tokens(launch: PublishedLaunch) -> int | None:
    if launch.engine == "sglang" and launch.decoder.name == "deepseek-v3":
        return 16384 if launch.formats.experts == "nvfp4" else 32768
    if launch.engine == "sglang" and launch.decoder.name == "glm-5" and launch.is_blackwell:
        return 32768
    if launch.engine == "trtllm" and launch.decoder.name == "llama-3.1-70b":
        return 16384
    if launch.engine == "vllm" and launch.decoder.name == "minimax-m2" and launch.is_blackwell:
        return 2 * launch.input_tokens
    return None


def _waits(launch: PublishedLaunch) -> bool:
    if launch.engine == "vllm":
        return _version(launch.release) < ASYNCHRONOUS
    return launch.harness is not Harness.INFERENCEX


def _version(release: str) -> tuple[int, ...]:
    """Version numbers of a release; nightly builds count as new, an unstated release as old."""
    if release.startswith("nightly"):
        return (999,)
    return tuple(int(word) for word in re.findall(r"\d+", release)[:2])
