"""Starts examples/engines/megatron_lm/pretrain_gpt.py and meters what autograd keeps.

Every rank ends with a line `peak of saved activations: BYTES`. Run by megatron_activation.py, with
the checkout in PYTHONPATH.
"""

import atexit
import importlib.util
import sys
from pathlib import Path

import torch

from profilers.steps.memory import ActivationMeter

CHECKOUT = Path(__file__).parents[3]
PROGRAM = CHECKOUT / "examples" / "engines" / "megatron_lm" / "pretrain_gpt.py"


def main() -> None:
    """Run the program under the meter."""
    loaded = importlib.util.spec_from_file_location("megatron_on_processors", PROGRAM)
    assert loaded is not None
    assert loaded.loader is not None
    program = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(program)
    parameters: list[torch.Tensor] = []

    def note(_module: object, _name: str, parameter: torch.Tensor | None) -> None:
        if parameter is not None:
            parameters.append(parameter)

    torch.nn.modules.module.register_module_parameter_registration_hook(note)
    meter = ActivationMeter(parameters=lambda: parameters, gradient_bytes=lambda: 0)
    atexit.register(lambda: sys.stdout.write(f"peak of saved activations: {meter.peak_bytes}\n"))
    with meter.recording():
        program.main()


if __name__ == "__main__":
    main()
