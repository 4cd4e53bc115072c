"""SM partitioning between prefill and decode on one GPU: SGLang's PD-Multiplexing options file.

    manual_divisions   [multiprocessors of prefill, of decode, least requests for this division]
    sm_group_num       3: all for prefill, that division, all for decode

Green contexts on Hopper hold multiples of 8 multiprocessors, 8 at least (get_arch_constraints,
sglang 0.5.23, srt/multiplex/pdmux_context.py), which suits older devices, too. A phase that runs
without the other has the whole device.
"""

from pathlib import PurePosixPath
from typing import Final

import yaml

from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.shape import GroupShape
from tuner.engines.serving.statement import brief_statement
from tuner.plans.serve import VerifiedServing

_GRAIN: Final = 8
"""Multiprocessors."""


def shares_name(shape: GroupShape) -> str:
    """Return the name of a group's file."""
    return f"{shape.name}.pdmux.yaml"


def division(*, compute_units: int, prefill_share_ratio: float) -> tuple[int, int]:
    """Return the multiprocessors of prefill and of decode nearest to the share."""
    max_grains = (compute_units - _GRAIN) // _GRAIN
    grains = min(max(round(prefill_share_ratio * compute_units / _GRAIN), 1), max_grains)
    return grains * _GRAIN, compute_units - grains * _GRAIN


def shares_file(verified: VerifiedServing, shape: GroupShape) -> EmittedFile:
    """Return the file of a group that multiplexes prefill and decode."""
    share = shape.group.prefill_share_ratio
    assert share is not None
    pools = verified.plan.cluster.pools
    pool = next(pool for pool in pools if pool.name == shape.group.pool)
    # `unlaunchable` of the registry refuses pools whose device is not named.
    units = pool.sheet.compute_units
    prefill, decode = division(compute_units=units, prefill_share_ratio=share)
    options = {"sm_group_num": 3, "manual_divisions": [[prefill, decode, 1]]}
    lines = (*brief_statement(verified), f"Of {units} multiprocessors prefill has {prefill}.")
    text = comment(lines) + yaml.safe_dump(options, sort_keys=False, default_flow_style=None)
    return EmittedFile(path=PurePosixPath(shares_name(shape)), text=text)
