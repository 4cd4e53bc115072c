"""Emits the expert permutation that applies a placement to Megatron, and a script to apply it.

Megatron has no expert table: local expert i of rank r is expert r * E / EP + i. A placement is
therefore applied by renumbering the checkpoint: expert p of the new one is expert
`permutation[layer][p]` of the old one, in the experts' weights and in the router's rows, so that
the model computes the same. Read from Megatron Core d98e8a6.
"""

import json
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.placement.statement import brief_statement, statement
from tuner.plans.place import VerifiedPlacement

_PERMUTATION: Final = "expert_permutation.json"


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the permutation, the script and a note."""
    decision = verified.decision
    record = {
        "num_experts": decision.num_experts,
        "layer_ids": list(decision.layer_ids),
        "permutation": [list(row) for row in decision.physical_to_logical],
    }
    note = (
        *statement(verified),
        "",
        "Expert p of the new checkpoint is expert permutation[layer][p] of the old one.",
        "Renumber a folder of safetensors, Hugging Face or Megatron names:",
        "    python apply.py CHECKPOINT NEW_CHECKPOINT",
        "then train or convert NEW_CHECKPOINT with"
        f" --expert-model-parallel-size {decision.num_devices}.",
    )
    return (
        EmittedFile(path=PurePosixPath(_PERMUTATION), text=json.dumps(record) + "\n"),
        EmittedFile(
            path=PurePosixPath("apply.py"), text=comment(brief_statement(verified)) + _APPLY
        ),
        EmittedFile(path=PurePosixPath("README.txt"), text=comment(note, prefix="")),
    )


_APPLY: Final = f'''\
"""Renumbers the experts of a checkpoint: python apply.py CHECKPOINT NEW_CHECKPOINT."""

import sys
from pathlib import Path

from tuner.api import permute_checkpoint, read_permutation
from tuner.errors import TunerError

if len(sys.argv) != 3:
    sys.exit(__doc__)
try:
    permutation = read_permutation(Path(__file__).with_name("{_PERMUTATION}"))
    permute_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), permutation=permutation)
except TunerError as error:
    sys.exit(str(error))
'''
