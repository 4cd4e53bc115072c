"""Settings by device vendor: engine releases, containers, resources, variables.

    vendor   engine            container                    KV connectors      all-to-all
    nvidia   as their modules  mainline                     NIXL, Mooncake     DeepEP, all-gather
    amd      vllm 0.33.0       vllm/vllm-openai-rocm        NIXL               all-gather
    amd      sglang 0.5.23     lmsysorg/sglang …-rocm…      Mooncake           all-gather
    huawei   vllm 0.23.0       quay.io/ascend/vllm-ascend   Mooncake (ascend)  chosen by the plugin
    huawei   sglang 0.5.23     quay.io/ascend/sglang        MemFabric          all-gather
    any      trtllm            NVIDIA only

Sources:
- vllm 0.33.0: platforms/rocm.py (device_type "cuda", so that the NIXL connector takes "cuda" and
  "cpu" buffers; supported_quantization; `_get_backend_priorities`, which does not use ROCM_ATTN
  with KV connectors; is_fp8_fnuz), config/parallel.py (All2AllBackend has `mori_high_throughput`
  and `mori_low_latency` for AMD). Container names: docs.vllm.ai, installation on ROCm.
- vllm-ascend, branch releases/v0.23.0: community/versioning_policy.md (plugin 0.23.0 needs vllm
  0.23.0, so Ascend runs an older release), vllm_ascend/platform.py (device_type "npu",
  supported_quantization, ASCEND_RT_VISIBLE_DEVICES), utils.py (refresh_block_size: 128 tokens),
  ascend_forward_context.py (select_moe_comm_method chooses among all-gather, MC2 and all-to-all
  itself), distributed/kv_transfer/__init__.py and kv_p2p/mooncake_connector.py (MooncakeConnectorV1
  over the transport "ascend", degrees of both sides in its extra configuration). It implements no
  `get_nixl_supported_devices`, without which vllm 0.23.0's NIXL connector refuses "npu"
  (kv_connector/v1/nixl/utils.py).
- sglang 0.5.23: arg_groups/choices.py (transfer backends mooncake, nixl, ascend, mori),
  disaggregation/ascend/transfer_engine.py (ASCEND_MF_STORE_URL), hardware_backend/npu/utils.py
  (attention backend "ascend", pages of 128 tokens). Container names: its documents for AMD GPUs and
  for Ascend NPUs.
- Kubernetes resources: NVIDIA, ROCm and Ascend (MindCluster) device plugins. Visible devices: CUDA,
  HIP and CANN runtimes.

Not covered: the kernels of MORI, MC2 and Ascend's DeepEP, for lack of measurements: all-gather is
planned instead. W8A8 checkpoints and redundant experts on Ascend, whose EPLB is that of the plugin.
vllm-ascend after 0.23.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.devices.datasheet import Vendor
from tuner.engines.sglang.capabilities import SGLANG_0_5_23
from tuner.engines.vllm.capabilities import VLLM_0_33


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorTraits:
    """Settings of a vendor for launchers, for any engine."""

    resource: str
    """Kubernetes extended resource of one device."""
    visible_devices: str
    """Variable that says which devices a process sees."""
    count_command: str
    """Bash that prints how many devices a machine has."""
    a2a_kernels: str
    """The vendor's all-to-all kernels."""


TRAITS: Final[Mapping[Vendor, VendorTraits]] = {
    Vendor.NVIDIA: VendorTraits(
        resource="nvidia.com/gpu",
        visible_devices="CUDA_VISIBLE_DEVICES",
        count_command="nvidia-smi --list-gpus | wc -l",
        a2a_kernels="DeepEP",
    ),
    Vendor.AMD: VendorTraits(
        resource="amd.com/gpu",
        visible_devices="HIP_VISIBLE_DEVICES",
        count_command="ls -d /sys/class/drm/renderD* | wc -l",
        a2a_kernels="MORI",
    ),
    Vendor.HUAWEI: VendorTraits(
        resource="huawei.com/Ascend910",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        count_command="ls -d /dev/davinci[0-9]* | wc -l",
        a2a_kernels="MC2",
    ),
}

PLAIN_EXCHANGES: Final = frozenset({"none", "allgather"})
"""All-to-all planned where a vendor's kernels were not measured."""

VLLM_0_33_ROCM: Final = replace(
    VLLM_0_33,
    vendor=Vendor.AMD,
    source="vllm 0.33.0 (wheel): platforms/rocm.py",
    image="vllm/vllm-openai-rocm:v0.33.0",
    image_note="its NIXL is ROCm's build (RIXL): check that the container has it",
    quantization={"bf16": "", "fp8": "fp8", "fp8_block": "", "mxfp4": ""},
    connectors={"nixl": "NixlConnector"},
    a2a_backends=PLAIN_EXCHANGES,
    overlap_backends=frozenset(),
)

SGLANG_0_5_23_ROCM: Final = replace(
    SGLANG_0_5_23,
    vendor=Vendor.AMD,
    source="sglang 0.5.23 (wheel), docs.sglang.io (AMD GPUs)",
    image="lmsysorg/sglang:v0.5.23-rocm720-mi30x",
    image_note="the tag follows those of v0.5.16 and v0.5.18: check that it exists",
    quantization={"bf16": "", "fp8": "fp8", "fp8_block": "", "mxfp4": ""},
    connectors={"mooncake": "mooncake"},
    a2a_backends=PLAIN_EXCHANGES,
    overlap_backends=frozenset(),
    modes=frozenset({"aggregated", "disaggregated"}),
    shared_device_architectures=frozenset(),
)

VLLM_ASCEND_0_23: Final = replace(
    VLLM_0_33,
    vendor=Vendor.HUAWEI,
    release="0.23.0",
    plugin="vllm-ascend 0.23.0",
    source="github.com/vllm-project/vllm-ascend releases/v0.23.0, vllm 0.23.0 (wheel)",
    image="quay.io/ascend/vllm-ascend:v0.23.0",
    options=VLLM_0_33.options - {"--disable-chunked-prefill"} | {"--no-enable-chunked-prefill"},
    whole_prompts_option="--no-enable-chunked-prefill",
    environment=frozenset(),
    quantization={"bf16": ""},
    weight_only_fallback=False,
    kv_cache_dtype={"bf16": ""},
    connectors={"ascend": "MooncakeConnectorV1"},
    host_path=False,
    a2a_backends=PLAIN_EXCHANGES,
    has_a2a_option=False,
    redundant_architectures=frozenset(),
    overlap_backends=frozenset(),
    portable_backends={},
)

SGLANG_0_5_23_CANN: Final = replace(
    SGLANG_0_5_23,
    vendor=Vendor.HUAWEI,
    source="sglang 0.5.23 (wheel), docs.sglang.io (Ascend NPUs)",
    image="quay.io/ascend/sglang:cann9.0.0-910b-v0.5.23",
    image_note="the tag follows that of v0.5.16: check that it exists",
    environment=frozenset({"ASCEND_MF_STORE_URL", "ASCEND_MF_TRANSFER_PROTOCOL"}),
    quantization={"bf16": ""},
    weight_only_fallback=False,
    kv_cache_dtype={"bf16": ""},
    connectors={"ascend": "ascend"},
    a2a_backends=PLAIN_EXCHANGES,
    redundant_architectures=frozenset(),
    overlap_backends=frozenset(),
    modes=frozenset({"aggregated", "disaggregated"}),
    shared_device_architectures=frozenset(),
)
