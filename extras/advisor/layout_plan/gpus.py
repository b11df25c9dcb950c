"""What GPUs can do: memory, products per second, and how fast bytes move. From data sheets. Pure.

Sources: NVIDIA's data sheets of V100 (SXM2), A100 (SXM4), H100 (SXM5), H200 (SXM), L40S and DGX B200, and AMD's of Instinct
MI300X. Links count one direction: half of what the sheets give for NVLink (300, 600, 900 and 1,800 GB/s) and for
Infinity Fabric (seven links of 128 GB/s). The network is what the vendor's node of eight has for each: DGX-1 four adapters of
100 Gb/s, DGX A100 eight of 200, DGX H100, H200 and B200 and AMD's MI300X platform eight of 400. L40S has no NVLink: PCIe 4.0
x16; its network is taken as 100 Gb/s. V100 and A100 have no float8 products. "cpu" is a nominal core (3 GHz, two AVX2 products per cycle), to be measured or given.

`reach` is what the best shape of a matrix product was measured at, of the peak (github.com/stas00/ml-engineering, "Maximum
Achievable Matmul FLOPS": A100 SXM 271.2 of 312 TFLOPS, H100 SXM 794.5 of 989, MI300X 668.4 of 1,307); of others that of the H100.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from flashckpt.errors import ConfigError
from flashckpt.trainer.flops import peak_tflops

SHARE = 0.75
"""Of what the best product reaches, the share that those of training reach: fitted to published runs (test_trainer_plan_runs.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device and its links.

    Attributes:
        name: As `--gpu` has it.
        device: A name as its driver reports it; "" for a processor.
        memory: Bytes.
        flops: Of dense bfloat16 (V100: float16) products, per second.
        float8_flops: Of dense float8 products, per second; 0: it has none.
        memory_rate: Bytes per second of its memory.
        node_link: Bytes per second to others of its node, in one direction.
        network: Bytes per second to other nodes, in one direction.
        reach: Share of `flops` that the best product was measured at.
    """

    name: str
    device: str
    memory: int
    flops: float
    memory_rate: float
    node_link: float
    network: float
    float8_flops: float = 0.0
    reach: float = 0.803

    @property
    def efficiency(self) -> float:
        """Share of the peak that products of training reach, unless one is given or measured."""
        return round(self.reach * SHARE, 2)

    def is_named(self, device: str) -> bool:
        """Return whether a driver's name is that of this kind of device."""
        kind = re.sub(r"-.*", "", self.name)
        return bool(device) and re.search(rf"\b{kind}\b", device, re.IGNORECASE) is not None


def _gpu(name: str, device: str, gigabytes: int, *rates: float, reach: float = 0.803) -> Gpu:
    memory_rate, node_link, network, *float8 = rates  # GB/s, and TFLOPS in float8
    return Gpu(
        name=name, device=device, memory=gigabytes * 10**9, flops=peak_tflops(device) * 1e12, memory_rate=memory_rate * 1e9,
        node_link=node_link * 1e9, network=network * 1e9, float8_flops=sum(float8) * 1e12, reach=reach,
    )  # fmt: skip


_CPU = Gpu(
    name="cpu", device="", memory=4 * 10**9, flops=96e9, memory_rate=10e9, node_link=5e9, network=1.25e9, reach=1.0
)
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100", "Tesla V100-SXM2-32GB", 32, 900, 150, 6.25),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 40, 1555, 300, 25, reach=0.869),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", 80, 2039, 300, 25, reach=0.869),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 80, 3350, 450, 50, 1979),
        _gpu("h200", "NVIDIA H200", 141, 4800, 450, 50, 1979),
        _gpu("b200", "NVIDIA B200", 180, 8000, 900, 50, 4500),
        _gpu("l40s", "NVIDIA L40S", 48, 864, 32, 12.5, 733),
        _gpu("mi300x", "AMD Instinct MI300X", 192, 5300, 448, 50, 2615, reach=0.511),
        _CPU,
    )
}
ALIASES = {"a100": "a100-80"}


def find_gpu(name: str, **given: float) -> Gpu:
    """Return a GPU by name, with figures that were `given` (fields of Gpu) in place of the table's.

    Raises:
        ConfigError: The table has no such name; the nearest is given.
    """
    known = ALIASES.get(name.lower(), name.lower())
    if known not in GPUS:
        nearest = difflib.get_close_matches(known, [*GPUS, *ALIASES], n=1)
        raise ConfigError(
            f"unknown GPU {name!r}",
            found=name,
            expected=f"{nearest[0]} (the nearest name)" if nearest else " | ".join(GPUS),
            state="Nothing was computed.",
            remedy=f"choose one of {', '.join(GPUS)}, and override its figures where yours differs",
        )
    changes = {field: int(value) if field == "memory" else value for field, value in given.items()}
    return replace(GPUS[known], **changes)  # type: ignore[arg-type]  # names of fields, as documented


def gpu_of_device(device: str) -> Gpu | None:
    """Return the GPU that a driver names, "" for a processor; None where the table has none."""
    if not device:
        return _CPU
    named = [gpu for gpu in GPUS.values() if gpu.is_named(device)]
    return next((gpu for gpu in named if gpu.device == device), named[-1] if named else None)
