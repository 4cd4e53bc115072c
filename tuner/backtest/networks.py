"""Network bandwidth between servers, where a source states another than the datasheet's.

A datasheet's `scale_out_bytes_per_s` is the usual NIC of one device. A stated bandwidth overrides
it: in the source's notes ("1600 Gbps node-node
interconnect"), or in its documentation, listed here.
"""

import re
from collections.abc import Mapping
from typing import Final

from tuner.backtest.rows import Row
from tuner.devices.datasheet import Datasheet

STATED_GBIT_PER_S: Final[Mapping[str, float]] = {
    # `inter_node_bandwidth` in the vTrain repository's configurations (config/*/*.json).
    "vtrain-single": 800.0,
    "vtrain-multi": 800.0,
}
"""Of one server of 8 devices, by source."""
_IN_NOTES: Final = re.compile(r"(\d{2,5}) ?Gbps node-node")
_GBIT_BYTES: Final = 1e9 / 8.0


def scale_out_bandwidth(row: Row, device: Datasheet) -> float:
    """Return the network bandwidth of one device, in bytes per second and direction."""
    match = _IN_NOTES.search(row.text("notes"))
    gbit_per_s = float(match.group(1)) if match else STATED_GBIT_PER_S.get(row.source)
    if gbit_per_s is None:
        return device.scale_out_bytes_per_s
    return gbit_per_s * _GBIT_BYTES / device.devices_per_node
