"""GPUs and what connects them: `Cluster`, read from the TOML files of `configs/clusters` or from
one of the user's.

Reading a preset is all the I/O of this file. How fast a GPU really is stands beside what its data
sheet says, and each preset names its sources: give your own measurements in a file that `extends`
one of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from balance.config import build_config, read_preset
from balance.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_US = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a GPU sends over: `latency_ns`, and then so many bytes per second in each direction."""

    bytes_per_s: float
    latency_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal GPUs in equal nodes; every number is positive, shares and efficiencies are at most
    1.
    """

    name: str
    description: str
    gpus_per_node: int
    peak_flops_per_s: float
    """Dense, bf16."""
    memory_bytes: int
    usable_memory_share: float
    """The rest is the driver's, communication buffers and what the allocator cannot put to use."""
    hbm_bytes_per_s: float
    hbm_efficiency: float
    nvlink_bytes_per_s: float
    """Per GPU and direction, as `network_bytes_per_s`."""
    nvlink_efficiency: float
    nvlink_latency_us: float
    network_bytes_per_s: float
    network_efficiency: float
    network_latency_us: float
    launch_us: float
    """Between two kernels of a GPU."""
    product_efficiency: float
    """Share of the peak that the best matrix product reaches."""
    half_speed_width: int
    """A matrix product that is only so wide comes to half of that; see `efficiency`."""
    attention_forward_efficiency: float
    """Share of the peak that attention reaches, counting the products of scores that a causal mask
    leaves.
    """
    attention_backward_efficiency: float

    def __post_init__(self) -> None:
        numbers = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if not isinstance(getattr(self, f.name), str)
        }
        wrong = [f"{name} = {value}" for name, value in numbers.items() if value <= 0]
        shares = [name for name in numbers if name.endswith(("_share", "_efficiency"))]
        wrong += [f"{name} = {numbers[name]}" for name in shares if numbers[name] > 1]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be greater than 0, and a share at most 1")

    @property
    def usable_memory_bytes(self) -> int:
        """Of one GPU, for weights, optimizer and activations."""
        return int(self.memory_bytes * self.usable_memory_share)

    @property
    def memory_bytes_per_s(self) -> float:
        """What kernels that stream through memory reach."""
        return self.hbm_bytes_per_s * self.hbm_efficiency

    @property
    def nvlink(self) -> Link:
        """Between GPUs of a node."""
        rate = self.nvlink_bytes_per_s * self.nvlink_efficiency
        return Link(bytes_per_s=rate, latency_ns=self.nvlink_latency_us * NS_PER_US)

    @property
    def network(self) -> Link:
        """Between GPUs of different nodes."""
        rate = self.network_bytes_per_s * self.network_efficiency
        return Link(bytes_per_s=rate, latency_ns=self.network_latency_us * NS_PER_US)

    def efficiency(self, width: int) -> float:
        """Share of the peak that a matrix product in a training step reaches, by the width of its
        weights.

        The lesser of rows and columns, of the part that one GPU holds. What surrounds a product
        (casts, copies, bias, gaps between kernels) grows with its width, the product with the
        square: so the share is best x width / (width + half_speed_width). Narrow layers are slow in
        OmniBal's figures too: in Figure 2 a layer of InternViT-6B, 3,200 wide, takes 1.05 to 1.07
        times as long as one of InternLM2-20B, 6,144 wide, on .70 of its FLOPs.

        What surrounds a product is limited by memory, so from one kind of GPU to another
        `half_speed_width` goes with peak_flops_per_s / hbm_bytes_per_s.
        """
        return self.product_efficiency * width / (width + self.half_speed_width)


def load_cluster(name: str) -> Cluster:
    """Cluster preset by name, or from a TOML file of the user's (anything that ends in `.toml`)."""
    return build_config(Cluster, read_preset("clusters", name), where=f"cluster preset {name}")
