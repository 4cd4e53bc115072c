"""Primus' YAML: a module that trains, with Primus' own defaults below its overrides.

Defaults of primus/configs/modules/megatron (`trainer_base.yaml`, `pre_trainer.yaml`) and of the
language models in primus/configs/models/megatron (`language_model.yaml`, `llama_base.yaml` and the
bases of models with experts) of github.com/AMD-AGI/Primus; those that all language models share.
`use_turbo_deepep` replaces the dispatcher (backends/megatron/patches/turbo), as does
`turbo_sync_free_moe_stage` from 2 on (patches/args/rocm_arg_validation.py).

Not covered: modules of other frameworks, adapters, sizes of the named model (the spec has them).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from tuner.errors import SpecError
from tuner.spec.files import shown_value

DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "bf16": (),
    "use-distributed-optimizer": (),
    "sequence-parallel": (),
    "hidden-dropout": ("0.0",),
    "attention-dropout": ("0.0",),
    "moe-token-dispatcher-type": ("alltoall",),
    "moe-grouped-gemm": (),
    "moe-permute-fusion": (),
    "micro-batch-size": ("2",),
    "global-batch-size": ("16",),
    "seq-length": ("1024",),
}
TORCHTITAN: Final[Mapping[str, Any]] = {
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "activation_checkpoint.mode": "none",
    "compile.enable": True,
}
"""Defaults of primus/configs/modules/torchtitan/pre_trainer.yaml (v0.5.0 to v26.5.1) that differ
from torchtitan's own."""
COMMAND: Final = re.compile(
    r"\bprimus-cli\b|\bprimus/cli/main\.py\b|\bexamples/run_(\w+_)?pretrain\.sh\b"
)
"""Commands that start Primus with flags over its file, which `--config` or the scripts' `EXP`
name."""
FLAGS: Final = frozenset({"enable-primus-turbo", "use-turbo-deepep", "turbo-sync-free-moe-stage"})
"""Flags of Primus alone that a price depends on."""
_TRAINERS: Final = ("pre_trainer", "post_trainer")
_SYNC_FREE: Final = "turbo-sync-free-moe-stage"


def overrides(
    raw: Mapping[str, Any], *, source: str, framework: str = "megatron"
) -> Mapping[str, Any] | None:
    """Return the overrides of the module that trains; None where the file is none of Primus'.

    Raises:
        SpecError: another framework trains, or adapters are trained.
    """
    modules = raw.get("modules")
    if not isinstance(modules, dict):
        return None
    name = next((name for name in _TRAINERS if isinstance(modules.get(name), dict)), None)
    if name is None:
        return None
    named = modules[name].get("framework")
    if named != framework:
        raise SpecError(
            f"{source}: modules.{name}.framework {shown_value(named)}: of Primus' frameworks"
            " only megatron and torchtitan are read; name the launch file that the framework reads"
        )
    settings = modules[name].get("overrides") or {}
    if (
        isinstance(settings, dict)
        and isinstance(settings.get("lora"), dict)
        and settings["lora"].get("enabled")
    ):
        raise SpecError(
            f"{source}: modules.{name}.overrides.lora: adapters of Primus are not read; leave them"
            " out to price full training, or state goal.tune in a spec and run moetune plan"
        )
    return settings if isinstance(settings, dict) else {}


def with_defaults(values: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return what the engine gets: flags over Primus' defaults, its own switches applied."""
    given = {**DEFAULTS, **values}
    stage = given.get(_SYNC_FREE, ("0",))
    is_sync_free = stage[0].isdecimal() and int(stage[0][:3]) > 1
    is_turbo = given.get("enable-primus-turbo") != ("false",)
    if is_turbo and (is_sync_free or given.get("use-turbo-deepep") == ("true",)):
        given["moe-token-dispatcher-type"] = ("flex",)
        given["moe-flex-dispatcher-backend"] = ("deepep",)
    return given
