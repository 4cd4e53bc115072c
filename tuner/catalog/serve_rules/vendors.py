"""Settings by device vendor for launchers: resources, variables, kernels.

The releases that serve on each are in the engines' `capabilities.py`.

    vendor   engine            container                    KV connectors      all-to-all
    nvidia   as their modules  mainline                     NIXL, Mooncake     DeepEP, all-gather
    amd      vllm 0.33.0       vllm/vllm-openai-rocm        NIXL               all-gather
    amd      sglang 0.5.23     lmsysorg/sglang …-rocm…      Mooncake           all-gather
    huawei   vllm 0.23.0       quay.io/ascend/vllm-ascend   Mooncake (ascend)  chosen by the plugin
    huawei   sglang 0.5.23     quay.io/ascend/sglang        MemFabric          all-gather
    cpu      vllm 0.32.0       public.ecr.aws/…-cpu-…       none               none
    any      trtllm            NVIDIA only

Sources:
- Kubernetes resources: NVIDIA, ROCm and Ascend (MindCluster) device plugins. Visible devices: CUDA,
  HIP and CANN runtimes.

Not covered: the kernels of MORI, MC2 and Ascend's DeepEP, for lack of measurements: all-gather is
planned instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tuner.devices.datasheet import Vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorTraits:
    """Settings of a vendor for launchers, for any engine."""

    resource: str
    """Kubernetes extended resource of one device."""
    visible_devices: str
    """Variable that says which devices a process sees."""
    between_devices: str = ","
    """Separator of the devices in `visible_devices`."""
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
    Vendor.CPU: VendorTraits(
        resource="cpu",
        visible_devices="VLLM_CPU_OMP_THREADS_BIND",
        between_devices="|",
        # nproc counts what OMP_NUM_THREADS says, where that is set.
        count_command="env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc",
        a2a_kernels="no",
    ),
}

PLAIN_EXCHANGES: Final = frozenset({"none", "allgather"})
"""All-to-all planned where a vendor's kernels were not measured."""
