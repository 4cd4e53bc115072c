"""The output of `moetune estimate` for a serving launch: the values of its text and `--json`."""

from profilers.records import Record
from profilers.steps.config import Count, Size
from tuner.config.serve import Instances
from tuner.estimate.records import LaunchEstimate, Ratio
from tuner.plans.serve import Band, Latency


class ServingMemory(Record):
    """Memory of one device by use, bytes."""

    weight_bytes: Size
    cache_bytes: Size
    """Bytes of KV cache that fit beside the weights."""
    reserve_bytes: Size
    """Bytes of activations, CUDA graphs and communication buffers."""
    device_bytes: Size
    """Bytes of the device's memory."""
    limit_ratio: Ratio
    """Share of memory that the engine takes, by its rule (tuner/catalog/serve_rules/traits.py)."""


class ServingLoad(Record):
    """Latency and throughput under the traffic."""

    devices: Count
    ttft_s: Latency | None
    """Time to the first token; absent for a decode instance, which emits none."""
    tpot_s: Latency | None
    """Time per output token after the first; absent for a prefill instance, and where no token
    follows the first."""
    other_half_s: Ratio = 0.0
    """Seconds that a mean request spends in instances of the other role; 0 where there are none."""
    requests_per_s: Ratio
    """Requests per second that are served in the long run."""
    output_tokens_per_s: Ratio
    """Output tokens per second; 0 for a prefill instance."""
    goodput_per_device: Ratio
    """Requests per second that meet every SLO target, over devices; all requests without one."""
    capacity_per_s: Ratio
    """Most requests per second that the launch can serve."""
    keeps_up: bool
    """Requests are served as fast as they arrive."""
    missed: tuple[str, ...]
    """SLO targets that are missed, e.g. `ttft p90`."""


class ServingChange(Record):
    """One knob at another setting, and the predicted effect."""

    what: str
    lines: tuple[str, ...]
    """Flags to write into the launch."""
    instance: Instances
    load: ServingLoad
    gain_ratio: float
    """Gain in goodput per device, as a share of the launch's; 0 where that has none."""
    ttft_ratio_band: Band | None = None
    """Band of the mean time to the first token over the launch's, where only the degrees differ
    (tuner/costs/serve/bands.py); absent where no published runs compare such launches."""
    tpot_ratio_band: Band | None = None
    beats: bool
    """The changed launch misses fewer SLO targets, has more goodput per device, or has the same
    with shorter requests."""


class ServingHalf(LaunchEstimate):
    """Predicted performance and memory of a serving launch."""

    release: str
    """Engine release whose rules were applied."""
    kernels: str
    """Source of kernel times: `measured`, `imported` or `datasheet`."""
    quantization: str
    kv_cache_dtype: str
    instance: Instances
    """The launch as a plan stores it; its count is the instances that share the traffic."""
    load: ServingLoad | None
    """Predicted latency and throughput; absent where the launch does not fit."""
    has_slo: bool = False
    """The spec states an SLO target that the launch can affect."""
    ttft_s_band: Band | None
    """Lowest and highest mean time to the first token that is expected, seconds; see
    tuner/costs/serve/bands.py."""
    tpot_s_band: Band | None
    is_new_pair: bool = False
    """No calibration row shares the model and the engine: the bands are those of pairs left out."""
    memory: ServingMemory
    kv_tokens: Size
    """Tokens of the KV cache of one instance."""
    longest_tokens: Size
    """Tokens of the longest request that must fit: prompts and outputs at their 99th percentile."""
    logged_kv_tokens: Size = 0
    """Tokens of KV cache of one rank as the engine logs them: for requests of the longest
    length."""
    misfit: str = ""
    """Reason why the launch does not fit; empty where it does."""
    instances_needed: Size
    """Instances like this one that the traffic needs; 0 where it does not fit."""
    smallest_change: ServingChange | None
    """The best single change; absent when none is better."""
    changes: tuple[ServingChange, ...]
    """Every single change that was priced, best first."""
    flags_unpriced: tuple[str, ...]
    """Flags that affect the launch's speed and are not modelled."""
    flags_timeless: tuple[str, ...] = ()
    """Flags that state what is served, where and on which machines: no effect on times."""


class ServingEstimate(ServingHalf):
    """Prediction for a serving launch, or for a file that starts both halves of a deployment."""

    other: ServingHalf | None = None
    """Decode half, where a file starts both and neither was named; each is simulated with the other
    one."""
