"""What `moetune estimate` answers of a serving launch: the values behind its text and `--json`."""

from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record
from profilers.steps.config import Count, Size
from tuner.serve_plan import Band, Instances, Latency

SCHEMA_VERSION = 1
# 1: first release.

Ratio = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class ServingMemory(Record):
    """Bytes of one device."""

    weight_bytes: Size
    cache_bytes: Size
    """Keys and values that there is room for beside the weights."""
    reserve_bytes: Size
    """Activations, CUDA graphs, communication buffers."""
    device_bytes: Size
    """What there is."""
    limit_ratio: Ratio
    """The engine's share, of what its rule says (tuner/costs/serving/memory_rules.py)."""


class ServingLoad(Record):
    """What the traffic meets, and what that takes."""

    devices: Count
    ttft_s: Latency | None
    """Absent of a decode instance, which gives no first token."""
    tpot_s: Latency | None
    """Absent of a prefill instance."""
    requests_per_s: Ratio
    """Served in the long run."""
    output_tokens_per_s: Ratio
    """0 of a prefill instance."""
    goodput_per_device: Ratio
    """Requests a second that meet every target, over devices."""
    capacity_per_s: Ratio
    """Requests a second that the launch can serve at most."""
    keeps_up: bool
    """Requests are served as fast as they come."""
    missed: tuple[str, ...]
    """Targets that do not hold, e.g. `ttft p90`."""


class ServingChange(Record):
    """One thing at another setting, and what that is predicted to bring."""

    what: str
    lines: tuple[str, ...]
    """Flags to write into the launch."""
    instance: Instances
    load: ServingLoad
    gain_ratio: float
    """More goodput per device, as a share of the launch's; 0 where that has none."""
    ttft_ratio_band: Band | None = None
    """Of its mean over the launch's, where the degrees alone differ (tuner/costs/serving/bands.py);
    absent where nothing published compares such launches."""
    tpot_ratio_band: Band | None = None
    beats: bool
    """It misses fewer targets, has more goodput per device, or as much with shorter requests."""


class ServingEstimate(Record):
    """What a serving launch will do."""

    schema_version: Literal[1] = 1
    source: str
    """File or command."""
    engine: str
    release: str
    """Whose rules were applied."""
    model: str
    device: str
    """Name of the datasheet."""
    kernels: str
    """`measured`, `imported` or `datasheet`: where their times are from."""
    quantization: str
    kv_cache_dtype: str
    instance: Instances
    """The launch in the words of a plan; its count is the instances that share the traffic."""
    load: ServingLoad | None
    """Absent where the launch does not fit."""
    ttft_s_band: Band | None
    """Of the mean; see tuner/costs/serving/bands.py."""
    tpot_s_band: Band | None
    is_new_pair: bool = False
    """No calibration row shares the model and the engine: the bands are those of pairs left out."""
    memory: ServingMemory
    kv_tokens: Size
    """That one instance holds."""
    longest_tokens: Size
    """Of the longest request but one in a hundred."""
    logged_kv_tokens: Size = 0
    """Of one rank, as the engine's log counts them: for requests of the longest length."""
    fits: bool
    """There is room for the weights, for steps and for the longest request."""
    misfit: str = ""
    """Why it does not fit; empty where it does."""
    instances_needed: Size
    """Instances like this one that the traffic takes; 0 where none fits."""
    smallest_change: ServingChange | None
    """The best change of one thing; absent when nothing in reach is better."""
    changes: tuple[ServingChange, ...]
    """Every one that was priced, best first."""
    least_gain_ratio: Ratio
    num_tried: Size
    flags_understood: tuple[str, ...]
    flags_ignored: tuple[str, ...]
    """Change nothing in the prediction."""
    flags_unpriced: tuple[str, ...]
    """Change the launch's speed, and are not part of the prediction."""
    flags_timeless: tuple[str, ...] = ()
    """Say what is served, where and by which machines: without effect on times."""
    refused_by: tuple[str, ...]
    """What the release's manifest says against the launch as it stands."""
    notes: tuple[str, ...]
