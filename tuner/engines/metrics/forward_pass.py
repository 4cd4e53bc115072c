"""Forward-pass metrics, one JSON object a step: Dynamo's, of which SGLang has a copy.

Both publish them as msgpack over ZMQ; what is read here is a message as a JSON object with the
fields' names, as `msgspec.to_builtins` gives it. `wall_time` is a step from its scheduling to its
output in Dynamo's vLLM, and the device's time alone in SGLang. A message without any request is a
heartbeat.

Source: components/src/dynamo/common/forward_pass_metrics.py of Dynamo 1.6.1;
sglang/srt/observability/forward_pass_metrics.py of SGLang 0.5.23, whose `FPM_VERSION` is 1 as well.
"""

from collections.abc import Mapping
from typing import Any, Final

from tuner.engines.metrics.observed import StepRecord

VERSION: Final = 1


def passed_step(values: Mapping[str, Any]) -> StepRecord | None:
    """Return the step of a message; None of a heartbeat.

    Raises:
        ValueError: it is of another version.
    """
    if values.get("version") != VERSION:
        raise ValueError(
            f"forward-pass metrics of version {values.get('version')!r}, which another release"
            f" writes; known is {VERSION}"
        )
    said = values["scheduled_requests"]
    prompts, running = said["num_prefill_requests"], said["num_decode_requests"]
    if not values["wall_time"] or not prompts + running:
        return None
    return StepRecord(
        seconds=values["wall_time"],
        prompts=prompts,
        prompt_tokens=said["sum_prefill_tokens"],
        before_tokens=said["sum_prefill_kv_tokens"],
        running=running,
        past_tokens=float(said["sum_decode_kv_tokens"]),
        number=values["counter_id"],
        rank=f"{values['worker_id']} {values['dp_rank']}",
    )
