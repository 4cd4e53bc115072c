"""The goal `serve`: an engine, its traffic, and the times that requests may take."""

from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record
from tuner.spec.fields import Count, FilePath, PositiveSeconds
from tuner.spec.serving.traffic import Traffic


class Percentiles(Record):
    """Largest allowed time by share of requests; what is absent is not limited."""

    mean: PositiveSeconds | None = None
    p50: PositiveSeconds | None = None
    p90: PositiveSeconds | None = None
    p99: PositiveSeconds | None = None


class Slo(Record):
    """Targets of latency."""

    ttft: Percentiles = Percentiles()
    """Until the first token."""
    tpot: Percentiles = Percentiles()
    """Per output token after it."""


class Engine(Record):
    """What serves."""

    name: Literal["sglang", "vllm", "trtllm"]
    version: str = ""
    """Empty: the newest release that is described."""


class ServeGoal(Record):
    """A deployment."""

    kind: Literal["serve"]
    engine: Engine
    traffic: Traffic
    slo: Slo = Slo()
    quantization: Literal["bf16", "fp8", "fp8_block", "nvfp4"] = "bf16"
    """Of the weights."""
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    max_model_len: Count | None = None
    """Tokens of one request at most; absent: what the model allows."""
    objective: Literal["goodput", "cost", "devices"] = "goodput"
    modes: tuple[Literal["aggregated", "disaggregated", "attention_expert"], ...] = (
        "aggregated",
        "disaggregated",
        "attention_expert",
    )
    spare_ratio: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Capacity above what the traffic needs, as a share of it."""
    placement: FilePath | None = None
    """Plan of a placement of experts, whose loads are taken."""
