"""Every described release of every serving engine, the newest first.

A release with a plugin stands behind those without: nobody gets it who does not name it.
"""

from collections.abc import Mapping
from typing import Final

from tuner.errors import UnknownTargetError
from tuner.spec.serving.goal import Engine
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.sglang import SGLANG_0_5_23
from tuner.spec.serving.manifests.trtllm import TRTLLM_1_3
from tuner.spec.serving.manifests.vllm import VLLM_0_33
from tuner.spec.serving.manifests.vllm_afd import VLLM_0_30_AFD

ENGINES: Final[Mapping[str, tuple[ServingCapabilities, ...]]] = {
    "sglang": (SGLANG_0_5_23,),
    "vllm": (VLLM_0_33, VLLM_0_30_AFD),
    "trtllm": (TRTLLM_1_3,),
}
"""By the name users type; `goal.engine.version` names one."""


def manifest_of(engine: Engine) -> ServingCapabilities:
    """Return the release that is named, or the newest where none is.

    Raises:
        UnknownTargetError: the release is not described.
    """
    described = ENGINES[engine.name]
    if not engine.version:
        return described[0]
    for manifest in described:
        if manifest.release == engine.version:
            return manifest
    raise UnknownTargetError(
        f"goal.engine.version: no {engine.name} {engine.version!r} is described; there is"
        f" {', '.join(manifest.release for manifest in described)}"
    )
