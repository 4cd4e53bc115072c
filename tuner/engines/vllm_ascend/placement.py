"""Emits vLLM-Ascend's expert map and a `run.sh` that names it in `--additional-config`.

`layer_id` counts MoE layers from 0, `device_expert` lists logical experts in slot order, and the
engine infers the redundant experts. A read-only map needs no environment variable. Read from
vllm-project/vllm-ascend, vllm_ascend/eplb; model runner V1.
"""

import json
import shlex
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Final

from tuner.config.place import PlaceDecision
from tuner.engines.files import EmittedFile
from tuner.engines.placement.launch_script import run_script
from tuner.engines.vllm.placement import parallel_flags, whole_model
from tuner.plans.place import VerifiedPlacement

_MAP: Final = "expert_map.json"


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the map and the script."""
    # A relative path keeps characters of the folder's name out of the JSON.
    config = json.dumps({"eplb_config": {"expert_map_path": _MAP}})
    return (
        EmittedFile(path=PurePosixPath(_MAP), text=json.dumps(_map(verified.decision)) + "\n"),
        run_script(
            verified,
            usage=(
                "Usage: ./run.sh MODEL [more flags of the engine]; MODEL as a name or an absolute"
                " path",
                whole_model(verified.decision),
            ),
            command=(
                'env --chdir="$here" vllm serve "$@"',
                *parallel_flags(verified),
                f"--additional-config {shlex.quote(config)}",
            ),
        ),
    )


def _map(decision: PlaceDecision) -> dict[str, object]:
    bounds = list(accumulate(decision.slots_per_rank))
    spans = list(zip([0, *bounds], bounds, strict=False))
    return {
        "moe_layer_count": len(decision.layer_ids),
        "layer_list": [
            {
                "layer_id": place,
                "device_count": decision.ranks,
                "device_list": [
                    {"device_id": rank, "device_expert": list(row[first:end])}
                    for rank, (first, end) in enumerate(spans)
                ],
            }
            for place, row in enumerate(decision.physical_to_logical)
        ],
    }
