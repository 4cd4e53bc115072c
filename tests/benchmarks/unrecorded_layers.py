"""What to take for MoE layers that a recording lacks: the nearest recorded layer, or the mean.

    python tests/benchmarks/unrecorded_layers.py [ROUTING ...]

ROUTING: folders of recordings, by default `examples/routing`. Of each recording one layer after the
other is left out, and the imbalance of its expert-parallel ranks is predicted from the others, for
every EP of 4 and more that divides the experts: by the nearest layer that is left (the earlier on
ties), and by the mean of all that are left. The error is |ln(predicted / recorded)|.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tuner.errors import SpecError
from tuner.spec.routing import RoutingRecord, read_routing

OWN: Final = Path(__file__).parents[2] / "examples" / "routing"
LEAST_DEGREE: Final = 4
LEAST_LAYERS: Final = 3


def main() -> int:
    """Print a line a recording, and the medians over recordings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("routing", nargs="*", type=Path, default=[OWN])
    by_recording = []
    folders = parser.parse_args().routing
    for path in (file for folder in folders for file in sorted(folder.iterdir())):
        try:
            pairs = list(errors(read_routing(path)))
        except SpecError:
            continue  # a README beside recordings
        if pairs:
            nearest, mean = (statistics.fmean(each) for each in zip(*pairs, strict=True))
            by_recording.append((nearest, mean))
            line = f"{path.stem:<28} {len(pairs):>4} nearest {nearest:.1%} mean {mean:.1%}"
            sys.stdout.write(f"{line}\n")
    nearest, mean = (statistics.median(each) for each in zip(*by_recording, strict=True))
    better = sum(second < first for first, second in by_recording)
    sys.stdout.write(
        f"median of {len(by_recording)} recordings: nearest {nearest:.1%}, mean {mean:.1%};"
        f" the mean is nearer in {better}\n"
    )
    return 0


def errors(record: RoutingRecord) -> Iterator[tuple[float, float]]:
    """Yield the error of the nearest layer and of the mean, for every layer left out and EP."""
    share_PLE = np.array(record.passes or (record.load_ratios,))
    layer_L = np.array(record.layer_ids)
    if len(layer_L) < LEAST_LAYERS:
        return
    for degree in range(LEAST_DEGREE, record.num_experts + 1):
        if record.num_experts % degree:
            continue
        load_PLR = share_PLE.reshape(*share_PLE.shape[:2], degree, -1).sum(axis=3)
        imbalance_L = degree * load_PLR.max(axis=2).mean(axis=0)
        for left_out in range(len(layer_L)):
            kept = np.delete(np.arange(len(layer_L)), left_out)
            nearest = kept[np.abs(layer_L[kept] - layer_L[left_out]).argmin()]
            own = imbalance_L[left_out]
            yield (
                abs(math.log(imbalance_L[nearest] / own)),
                abs(math.log(imbalance_L[kept].mean() / own)),
            )


if __name__ == "__main__":
    sys.exit(main())
