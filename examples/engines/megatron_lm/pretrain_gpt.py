"""Runs Megatron-LM's own pretrain_gpt.py on processors.

    MEGATRON_LM=examples/engines/megatron_lm bash PLAN/launch/megatron-lm/run.sh --mock-data ...

Megatron-LM calls `torch.cuda` whatever the device. Here those calls are answered for processors:
a CUDA device that is asked for is the CPU, streams and events order nothing, because operations of
a processor end before the next one starts, collectives too, and allocated memory is 0. No operation
is left out.
Where there is a CUDA device this program refuses to run.

The checkout is `$MEGATRON_CHECKOUT`, by default Megatron-LM in this environment (setup.sh); its
megatron/ is used only where the package megatron-core is not installed.
"""

import atexit
import contextlib
import copy
import functools
import json
import os
import runpy
import sys
import typing
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    *("arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("zeros", "zeros_like", "as_tensor"),
)
"""Functions of torch that take a device."""


def on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, by any name, and everything else as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def with_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its argument `device` on the CPU."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return called


def moved_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.to` or `Module.to` with CUDA devices, first or named, on the CPU."""
    original = with_cpu(original)

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *map(on_cpu, args[:1]), *args[1:], **kwargs)

    return to


def type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type`, which names the class of tensors on a GPU that Megatron expects."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    return named


class Ordered:
    """A stream or an event: everything before it has ended already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = CPU

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return {"query": lambda: True, "elapsed_time": lambda _: 0.0}.get(
            name, lambda *_, **__: None
        )

    def record_event(self, *_: Any) -> "Ordered":
        """An event after everything so far."""
        return Ordered()

    def __enter__(self) -> "Ordered":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The priorities of streams."""
        return 0, 0


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
    *("broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
)


def ended(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective, ended when it returns.

    Streams order NCCL's collectives and the release of their memory; gloo's run in threads, which
    would read memory that Megatron-FSDP has released.
    """

    @functools.wraps(collective)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        # Inside a coalescing manager there is nothing to wait for yet.
        if kwargs.get("async_op") and isinstance(work, torch.distributed.Work):
            with contextlib.suppress(ValueError):
                work.wait()
        return work

    return called


def coalescing_ended(manager: Callable[..., Any]) -> Callable[..., Any]:
    """Return the manager of coalesced collectives, which have ended when it is left."""

    @contextlib.contextmanager
    def entered(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with manager(*args, **kwargs) as coalesced:
            yield coalesced
        coalesced.wait()

    return entered


def returning(answer: Any) -> Callable[..., Any]:
    """Return a function, another one for every name, that has this answer whatever the question."""
    return lambda *_, **__: answer


ANSWERS = {
    "is_available": True,
    "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "current_device": 0,
    "get_device_capability": (8, 0),
    "get_device_properties": SimpleNamespace(total_memory=0, multi_processor_count=1, major=8),
    "current_stream": Ordered(),
    "default_stream": Ordered(),
    "stream": contextlib.nullcontext(),
    "device": contextlib.nullcontext(),
    "is_current_stream_capturing": False,
    "memory_stats": {},
    **dict.fromkeys(("memory_allocated", "memory_reserved", "device_memory_used"), 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
    **dict.fromkeys(("synchronize", "empty_cache", "set_device", "set_stream"), None),
    "reset_peak_memory_stats": None,
}
"""What functions of `torch.cuda` return."""


def install() -> None:
    """Answer the calls of `torch.cuda`.

    Raises:
        SystemExit: there is a CUDA device.
    """
    if torch.cuda.is_available():
        raise SystemExit("there is a CUDA device: start Megatron-LM's own pretrain_gpt.py")
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda function: function
    for name in FACTORIES:
        setattr(torch, name, with_cpu(getattr(torch, name)))
    for name in COLLECTIVES:
        setattr(torch.distributed, name, ended(getattr(torch.distributed, name)))
    torch.distributed._coalescing_manager = coalescing_ended(torch.distributed._coalescing_manager)
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, with_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.to = moved_to(torch.Tensor.to)
    torch.nn.Module.to = moved_to(torch.nn.Module.to)
    torch.nn.Module.to_empty = with_cpu(torch.nn.Module.to_empty)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.type = type_of(torch.Tensor.type)
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, returning(answer))
    torch.cuda.Stream = torch.cuda.Event = Ordered
    torch.cuda.default_generators = (torch.default_generator,)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.manual_seed(seed)
    # Megatron-LM gives it a function that sets the state of `default_generators`.
    torch.cuda._lazy_call = lambda function, **_: function()
    torch.cuda._lazy_init = returning(None)
    torch.cuda.nvtx.range_push = returning(None)
    torch.cuda.nvtx.range_pop = returning(None)


def let_norms_share_the_sequence() -> None:
    """Let torch's norms work on a part of the sequence, as those of Transformer Engine do.

    Every tensor rank has some of the tokens, so the gradients of the norm's weights are summed over
    them: Megatron-LM does so for parameters that say `sequence_parallel`. It refuses torch's norms
    there, because they do not say it.
    """
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def built(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = built


def write_routing_at_exit(file: Path) -> None:
    """Count the tokens of each expert in every layer, and write them for `goal.routing`."""
    from megatron.core.transformer.moe.router import TopKRouter

    counts: dict[int, torch.Tensor] = {}
    top_k = []

    def count(router: Any, _: Any, chosen: Any) -> None:
        if isinstance(router, TopKRouter):
            of_experts = chosen[1].sum(dim=0)
            counts[router.layer_number] = counts.get(router.layer_number, 0) + of_experts
            top_k.append(router.topk)

    def write() -> None:
        layers = sorted(counts)
        tokens = int(counts[layers[0]].sum()) // top_k[0]
        recording = {
            "model": "pretrain_gpt.py",
            "domain": "its own data",
            "tokens": tokens,
            "top_k": top_k[0],
            "num_logical_experts": len(counts[layers[0]]),
            "layer_ids": [layer - 1 for layer in layers],
            "logical_count": [counts[layer].tolist() for layer in layers],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(recording) + "\n", encoding="utf-8")

    torch.nn.modules.module.register_module_forward_hook(count)
    atexit.register(write)


def use_compiled_helpers() -> None:
    """Take the dataset's helpers that the package brings compiled, without its Makefile."""
    from megatron.core.datasets import helpers_cpp, utils

    assert helpers_cpp.__file__
    utils.compile_helpers = returning(None)


def give_splits_as_arrays() -> None:
    """Give the counts of tokens to all-to-alls as arrays, as they are once moved from a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = moved


def spawn_without_the_program() -> None:
    """Let processes that save checkpoints start without the program, which needs all of this."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        data.pop("init_main_from_path", None)
        return data

    spawn.get_preparation_data = prepared


def resume_as_fused_optimizers_do() -> None:
    """Let PyTorch's Adam read a checkpoint: states before it is read, and a count of steps each."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    described, load = DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict

    def filled(self: Any, model: Any, is_loading: bool = False, *more: Any, **named: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return described(self, model, is_loading, *more, **named)

    def loaded(self: Any, saved: Any) -> None:
        load(self, saved)
        for group in self.optimizer.param_groups:
            for state in map(self.optimizer.state.get, group["params"]):
                if state:
                    # Read, one tensor counts for all parameters, and every one of them adds to it.
                    state["step"] = torch.tensor(float(group["step"]))

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_steps(self: Any, model_param: Any, tensors: Any) -> None:
        # What another layout restores is read without a count of steps.
        own(self, model_param, {"step": torch.tensor(0.0)} | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_steps
    DistributedOptimizer.sharded_state_dict = filled
    DistributedOptimizer.load_state_dict = loaded


def main() -> None:
    """Run the checkout's program."""
    checkout = Path(os.environ.get("MEGATRON_CHECKOUT") or Path(sys.prefix) / "Megatron-LM")
    program = checkout / "pretrain_gpt.py"
    if not program.is_file():
        raise SystemExit(f"{checkout} is no checkout of Megatron-LM; set MEGATRON_CHECKOUT")
    install()
    sys.path.append(str(checkout))
    let_norms_share_the_sequence()
    use_compiled_helpers()
    give_splits_as_arrays()
    spawn_without_the_program()
    resume_as_fused_optimizers_do()
    if routing := os.environ.get("MEGATRON_ROUTING"):
        write_routing_at_exit(Path(routing))
    sys.argv[0] = str(program)
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
