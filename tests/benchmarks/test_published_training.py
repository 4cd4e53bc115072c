"""Published training rows: what their pages and recipes say beside the columns."""

from tests.benchmarks.published_training import cells_of, documented
from tests.rows import each_row
from tuner.backtest.columns import PublishedRun, build_run
from tuner.backtest.rows import Row, parse_row
from tuner.prices.train.constants import Software

DENSE = '{"ffn":14336,"glu":true,"heads":32,"hidden":4096,"kv_heads":8,"layers":32,"vocab":128256}'
MOE = (
    '{"experts":128,"glu":true,"head_dim":128,"heads":32,"hidden":2048,"kv_heads":4,"layers":48,'
    '"moe_ffn":768,"topk":8,"vocab":151936}'
)
PLAIN = {
    "source": "torchtitan",
    "model": "Small",
    "arch_json": DENSE,
    "gpu": "DGX-H100",
    "num_gpus": "8",
    "gbs": "128",
    "mbs": "1",
    "seq": "8192",
    "precision": "bf16",
    "tokens_per_sec_per_gpu": "9000",
}


def row_of(**cells: str) -> Row:
    merged = {**PLAIN, **cells}
    return documented(parse_row(list(merged), list(merged.values()), number=1))


def run_of(**cells: str) -> PublishedRun:
    return build_run(row_of(**cells))


def test_a_documented_row_is_written_and_read_without_loss() -> None:
    row = row_of(source="vtrain-single", notes="w/ MTP", precision="fp8")
    cells = cells_of(row)
    assert parse_row(list(cells), list(cells.values()), number=1) == row


def test_times_put_together_from_a_trace_are_not_taken_for_runs_on_several_nodes() -> None:
    one, several = (run_of(source=source) for source in ("vtrain-single", "vtrain-multi"))
    assert one.software is several.software is Software.MEGATRON_2021
    assert (one.family, several.family) == ("vtrain", "megatron-deepspeed")
    assert one.strategy.gradient_bytes == 2.0
    # 800 Gbit/s for a server of eight.
    assert one.hardware.scale_out_bytes_per_s == 12.5e9


def test_releases_stand_in_notes_and_addresses() -> None:
    assert run_of(source="nemo-longctx", notes="NeMo 25.04.rc2 best").release == "25.04"
    page = "https://github.com/pytorch/torchtitan/benchmarks/llama3_h100_202412_torchtitan.md"
    assert run_of(url=page).release == "2024.12"
    assert run_of(source="megascale-paper", notes="MegaScale").family == "megascale"
    assert run_of(source="megascale-paper").family == "megatron-2023"


def test_pages_that_print_four_devices_for_each_are_corrected() -> None:
    run = run_of(source="nemo-longctx", num_gpus="16", tp="4", cp="1", dp="1")
    assert (run.strategy.data, run.strategy.world) == (1.0, 4.0)


def test_torchtitan_of_2024_cut_a_batch_into_as_many_micro_batches_as_ranks() -> None:
    def cut(month: str, local: int, notes: str) -> tuple[float, ...]:
        at = run_of(
            **{"url": f"llama3_h100_{month}_torchtitan.md", "notes": notes, "pp": "4", "dp": "2"},
            **{"mbs": str(local), "gbs": str(2 * local)},
        ).strategy
        return float(at.micro_batch), float(at.num_microbatches), float(at.virtual_pipeline)

    assert cut("202412", 16, "1F1B") == (4.0, 4.0, 1.0)
    assert cut("202412", 16, "Interleaved 1F1B") == (4.0, 4.0, 2.0)
    assert cut("202412", 6, "1F1B") == (1.0, 6.0, 1.0)
    assert cut("202506", 16, "Interleaved 1F1B") == (1.0, 16.0, 2.0)


def test_pages_that_start_torchrun_themselves_leave_the_allocator_as_it_is() -> None:
    def family(page: str) -> str:
        return run_of(notes="torch.compile", url=page).memory_family

    plain = "llama3-8b_h200_202506_trainy-whitefiber.md"
    assert family(plain) == "torchtitan-2025-compiled-segments"
    assert family("asyncTP_llama3_h100_2025-06_torchtitan.md") == "torchtitan-2025-compiled"
    assert run_of(notes="eager").software is Software.TORCH_EAGER
    assert run_of(notes="async TP", tp="2").strategy.overlap_tensor == 1.0


def test_unknown_recipes_of_megatron_bridge_follow_the_majority() -> None:
    bridge = {"source": "megatron-bridge", "arch_json": MOE, "release": "nemo-26.04"}
    run = run_of(**bridge, gpu="DGX-GB200")
    assert (run.strategy.is_hybridep, run.strategy.partial_graph) == (1.0, 1.0)
    assert {"dispatcher", "cuda_graph", "recompute"} <= set(run.assumed)
    later = run_of(**{**bridge, "release": "nemo-26.06"}, gpu="DGX-GB200").strategy
    assert (later.full_graph, later.a2a_overlap) == (1.0, 1.0)
    hopper = run_of(**bridge).strategy
    assert (hopper.is_deepep, hopper.partial_graph) == (1.0, 0.0)
    known = run_of(**bridge, recipe_match="exact", dispatcher="alltoall", a2a_overlap="false")
    assert known.knows_recompute
    assert known.strategy.is_deepep == 0.0


@each_row(
    ("model", "notes", "layers"),
    [
        ("DeepSeekV3", "", 1.0),
        ("DeepSeekV3", "w/o MTP", 0.0),
        ("Nemotron_3_Super", "", 2.0),
        ("Nemotron_3_Nano", "", 0.0),
        ("Small", "w/ MTP", 1.0),
    ],
)
def test_multi_token_prediction_is_what_the_publisher_trains(
    model: str, notes: str, layers: float
) -> None:
    is_shipped = model.startswith("Nemotron")
    cells = {"source": "megatron-bridge", "arch_json": "" if is_shipped else MOE}
    assert float(run_of(**cells, model=model, notes=notes).shape.mtp_layers) == layers


def test_super_keeps_its_last_layers_in_bf16_beside_nvfp4() -> None:
    cells = {"source": "megatron-bridge", "arch_json": "", "model": "Nemotron_3_Super"}
    peaks = [
        run_of(**cells, gpu="DGX-GB200", precision=precision).hardware.matmul_flop_per_s
        for precision in ("bf16", "NVFP4")
    ]
    assert peaks[0] < peaks[1] < 0.9 * run_of(gpu="DGX-GB200").device.flop_per_s["fp4"]


def test_a_page_that_states_memory_alone_names_its_device() -> None:
    gpu = "unstated (memory percentages imply a 178 GiB device)"
    assert run_of(gpu=gpu).device.name == "b200-sxm"


def test_automodel_keeps_activations_where_its_benchmarks_say_so() -> None:
    def recomputed(**cells: str) -> float:
        return float(run_of(source="nemo-automodel", **cells).strategy.recompute_full)

    assert recomputed() == 1.0
    assert recomputed(model="GPT-OSS 20B", arch_json="") == 0.0
    assert recomputed(workload="lora") == 1.0
    assert recomputed(workload="lora", num_gpus="1") == 0.0
    assert run_of(source="nemo-automodel", workload="lora").strategy.adapts_up == 1.0
    bridge = run_of(source="megatron-bridge", workload="lora").strategy
    assert (bridge.fused_qkv_adapters, bridge.adapts_up) == (1.0, 0.0)
