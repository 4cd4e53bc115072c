"""Adapters of the reference step against the same model in plain autograd.

Over layouts: test_layouts.py.

The plain model multiplies by W + (alpha / r) B A in fp64 and is written out below from the formulas
alone; the step computes in fp32.

Letters: B sequences, S tokens, H hidden, A heads, G key-value heads, D head size, E experts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional

from profilers.devices import count_accelerators, pick_device
from profilers.steps.config import StepConfig
from profilers.steps.experts import RANK_BLOCK, ExpertAdapters, expert_ffn
from profilers.steps.layout import join
from profilers.steps.model import StageModel
from profilers.steps.run import start
from profilers.steps.training import Training
from tests.patience import patient_s
from tests.rows import each_row

Fields = dict[str, Any]
Weights = Mapping[str, Tensor]

EVERYTHING = [
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "experts"),
]
UNROUTED: Fields = {"mode": "learned", "balancing": "none"}
TARGETS: Mapping[str, list[str]] = {
    "everything": EVERYTHING,
    "queries and experts": ["q_proj", "experts"],
    "output alone": ["o_proj"],
    "experts alone": ["experts"],
    "networks": ["down_proj", "up_proj"],
}
STAGES: Mapping[str, Fields] = {
    "kept": {},
    "experts again": {"recompute": "selective", "chunks": 2},
    "layers again": {"recompute": "full"},
    "layers and chunks again": {"recompute": "full", "chunks": 4},
}


def adapters(targets: list[str]) -> Fields:
    return {"rank": 4, "alpha": 12.0, "targets": targets}


def merged(weights: Weights, name: str, parts: list[tuple[str, int]], scale: float) -> Tensor:
    """Return W + s B A of a fused matrix with the adapters of its parts."""
    whole, start = weights[name], 0
    rows = []
    for part, outputs in parts:
        one = whole[start : start + outputs]
        key = f"{name}_adapters.{part}"
        if f"{key}.a" in weights:
            one = one + scale * weights[f"{key}.b"] @ weights[f"{key}.a"]
        rows.append(one)
        start += outputs
    return torch.cat(rows)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def turned(x_BSAD: Tensor, theta: float) -> Tensor:
    size = x_BSAD.shape[-1]
    angle = torch.outer(
        torch.arange(x_BSAD.shape[1], dtype=torch.float64),
        theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size),
    )
    both = torch.cat((angle, angle), -1).unsqueeze(1)
    first, second = x_BSAD.chunk(2, -1)
    return x_BSAD * both.cos() + torch.cat((-second, first), -1) * both.sin()


def network(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (functional.silu(gate) * up) @ down.t()


def plain_loss(config: StepConfig, weights: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the whole batch."""
    model, own = config.model, config.adapters
    assert own is not None
    width, scale = model.head_dim, own.alpha / own.rank
    x = weights["embedding"][tokens]
    for layer, kind in enumerate(model.layers):
        here = {
            name.removeprefix(f"layers.{layer}."): one
            for name, one in weights.items()
            if name.startswith(f"layers.{layer}.")
        }

        def of(name: str, *parts: tuple[str, int], here: Weights = here) -> Tensor:
            return merged(here, name, list(parts), scale)

        queries, keys = model.num_heads * width, model.num_kv_heads * width
        y = norm(x, here["attention_norm.weight"], model.norm_epsilon)
        fused = of("attention.qkv", ("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        heads_BSAD = (y @ fused.t()).view(*tokens.shape, -1, width)
        kept = model.num_kv_heads
        q, k, v = torch.split_with_sizes(heads_BSAD, (model.num_heads, kept, kept), dim=2)
        mixed = functional.scaled_dot_product_attention(
            turned(q, model.rope_theta).transpose(1, 2),
            turned(k, model.rope_theta).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        output = of("attention.output", ("o_proj", model.hidden_size))
        x = x + mixed.transpose(1, 2).flatten(2) @ output.t()
        y = norm(x, here["ffn_norm.weight"], model.norm_epsilon)
        prefix = "ffn." if kind == "dense" else "ffn.shared."
        ffn = model.dense_ffn_size if kind == "dense" else model.shared_ffn_size
        added = network(
            y,
            of(f"{prefix}gate_up", ("gate_proj", ffn), ("up_proj", ffn)),
            of(f"{prefix}down", ("down_proj", model.hidden_size)),
        )
        if kind == "moe":
            best, chosen = (y @ here["ffn.router.weight"].t()).softmax(-1).topk(model.top_k, -1)
            best = best / best.sum(-1, keepdim=True)
            for expert in range(model.num_experts):
                matrices = []
                for name in ("gate_up", "down"):
                    one = here[f"ffn.routed.{name}"][expert]
                    key = f"ffn.routed.{name}_adapter"
                    if f"{key}.a" in here:
                        one = one + scale * here[f"{key}.b"][expert] @ here[f"{key}.a"][expert]
                    matrices.append(one)
                share_here = (best * (chosen == expert)).sum(-1, keepdim=True)
                added = added + share_here * network(y, *matrices)
        x = x + added
    logits = norm(x, weights["norm.weight"], model.norm_epsilon) @ weights["head"].t()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole(weight: Tensor) -> Tensor:
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full.detach().double().clone()


@pytest.fixture(scope="module", autouse=True)
def _ends_its_group() -> Iterator[None]:
    """End the job that a test started in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_three_steps(config: StepConfig) -> None:
    """Two updates, then the gradients of a third step against the plain ones."""
    device = torch.device("cpu")
    layout = (
        join(config.parallelism, device=device, timeout=timedelta(seconds=patient_s(60)))
        if dist.is_initialized()
        else start(config, device=device)
    )
    training = Training(config, layout)
    (module,) = training.modules
    assert isinstance(module, StageModel)
    first = {name: whole(one) for name, one in module.named_parameters()}
    for step in range(2):
        training.prepare(step)
        training.compute_gradients()
        training.update()
    training.prepare(2)
    loss = training.compute_gradients()
    weights = {name: whole(one) for name, one in module.named_parameters()}
    trained = {name for name in weights if name.endswith((".a", ".b"))}
    for name, before in first.items():
        assert torch.equal(before, weights[name]) == (name not in trained), name
    for name in trained:
        weights[name].requires_grad_()
    expected = plain_loss(config, weights, training._tokens, training._targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    names = sorted(trained)
    gradients = torch.autograd.grad(expected, [weights[name] for name in names])
    found = dict(module.named_parameters())
    assert all(one.grad is None for name, one in found.items() if name not in trained)
    for name, wanted in zip(names, gradients, strict=True):
        gradient = found[name].grad
        assert gradient is not None, name
        error = torch.linalg.vector_norm(whole(gradient) - wanted)
        assert error <= 2e-5 * torch.linalg.vector_norm(wanted), name


@each_row(
    ("targets", "stage"),
    [
        *(("everything", stage) for stage in STAGES),
        *((targets, "layers and chunks again") for targets in TARGETS if targets != "everything"),
    ],
)
def test_gradients_are_those_of_the_merged_weights_in_plain_autograd(
    tiny_config: Callable[..., Fields], targets: str, stage: str
) -> None:
    fields = tiny_config(
        routing=UNROUTED, adapters=adapters(TARGETS[targets]), stage=STAGES[stage], zero=0
    )
    run_three_steps(StepConfig.model_validate(fields))


@each_row("degrees", ({"tensor": 2}, {"pipeline": 2}))
def test_adapters_are_refused_beside_tensor_and_pipeline_parallelism(
    tiny_config: Callable[..., Fields], degrees: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="adapters need tensor 1 and pipeline 1"):
        StepConfig.model_validate(tiny_config(adapters=adapters(["q_proj"]), **degrees))


def check_experts_in_bf16(counts: tuple[int, ...], *, rank: int, device: torch.device) -> None:
    """Compare outputs' gradients with those of the merged network in fp64."""
    torch.manual_seed(0)
    drawn = [
        torch.randn(*shape, dtype=torch.float64) * 0.1
        for shape in (
            (sum(counts), 32),
            *((4, 48, 32), (4, 32, 24)),
            *((4, rank, 32), (4, 48, rank), (4, rank, 24), (4, 32, rank)),
        )
    ]
    x, gate_up, down, a, b, a_down, b_down = (one.clone().requires_grad_() for one in drawn)
    merged_up, merged_down = gate_up + 3.0 * b @ a, down + 3.0 * b_down @ a_down
    parts = [
        network(rows, merged_up[expert], merged_down[expert])
        for expert, rows in enumerate(torch.split_with_sizes(x, counts))
    ]
    weight = torch.randn(sum(counts), 32, dtype=torch.float64)
    wanted = torch.autograd.grad((torch.cat(parts) * weight).sum(), (x, a, b, a_down, b_down))
    half = [one.to(device, torch.bfloat16) for one in drawn]
    own = [half[0], *half[3:]]
    for one in own:
        one.requires_grad_()
    adapters_of_experts = ExpertAdapters(
        gate_up=(half[3], half[4]), down=(half[5], half[6]), scale=3.0
    )
    y = expert_ffn(half[0], counts, half[1], half[2], adapters_of_experts)
    found = torch.autograd.grad((y * weight.to(device)).sum(), own)
    for mine, other in zip(found, wanted, strict=True):
        error = torch.linalg.vector_norm(mine.double().cpu() - other)
        assert error <= 2e-2 * torch.linalg.vector_norm(other), rank


@each_row("counts", [(0, 5, 33, 16), (64, 0, 0, 7), (1, 1, 1, 1)])
def test_experts_in_blocks_of_rows_give_the_same_in_bf16(counts: tuple[int, ...]) -> None:
    # Blocks write beyond an expert's rows, which must neither count twice nor be left.
    check_experts_in_bf16(counts, rank=8, device=torch.device("cpu"))


def test_adapters_of_any_rank_are_padded_for_the_grouped_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The processor has one, too, for experts that all have tokens.
    monkeypatch.setattr("profilers.steps.experts._has_grouped_kernel", lambda _x: True)
    for rank in (1, 8, 12):
        check_experts_in_bf16((3, 5, 33, 16), rank=rank, device=torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
@each_row("rank", (1, 4, 8, 12, 16))
def test_experts_have_adapters_of_every_rank_on_an_accelerator(rank: int) -> None:
    check_experts_in_bf16((0, 5, 33, 16), rank=rank, device=pick_device("cuda", local_rank=0))


@each_row("rank", range(1, 33))
def test_the_grouped_gemm_takes_ranks_of_whole_blocks_alone(rank: Any) -> None:
    # torch's own check of strides, on tensors without data or device.
    with FakeTensorMode():
        u_Mr = torch.empty(38, rank, device="cuda", dtype=torch.bfloat16)
        b_EOr = torch.empty(4, 48, rank, device="cuda", dtype=torch.bfloat16)
        offsets = torch.empty(4, device="cuda", dtype=torch.int32)
        is_whole = rank % RANK_BLOCK == 0
        with nullcontext() if is_whole else pytest.raises(RuntimeError, match="16 bytes"):
            functional.grouped_mm(u_Mr, b_EOr.transpose(1, 2), offs=offsets)
