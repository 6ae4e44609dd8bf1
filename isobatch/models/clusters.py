"""GPUs and their links: `Cluster`, from a preset or a user's TOML file.

Presets give data sheet figures and the efficiency reached in practice, with sources; put your own
measurements into a file that `extends` one.
"""

from dataclasses import dataclass, fields

from isobatch.common.config import build_config, check_positive, read_preset
from isobatch.common.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_US = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A GPU's connection: latency, then bytes per second in each direction."""

    bytes_per_s: float
    latency_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal GPUs in equal nodes; numbers are positive, shares and efficiencies at most 1."""

    name: str
    description: str
    gpus_per_node: int
    peak_flops_per_s: float
    """Peak of dense products in bf16."""
    memory_bytes: int
    usable_memory_share: float
    """The rest: driver, communication buffers, fragmentation."""
    hbm_bytes_per_s: float
    hbm_efficiency: float
    nvlink_bytes_per_s: float
    """Bandwidth of a GPU in each direction, as `network_bytes_per_s`."""
    nvlink_efficiency: float
    nvlink_latency_us: float
    network_bytes_per_s: float
    network_efficiency: float
    network_latency_us: float
    launch_us: float
    """Gap between two kernels of a GPU."""
    product_efficiency: float
    """Share of the peak that the best matrix product reaches."""
    half_speed_width: int
    """Width of a matrix product that reaches half of `product_efficiency`; see `efficiency`."""
    attention_forward_efficiency: float
    """Share of the peak that attention reaches; scores that a causal mask drops do not count."""
    attention_backward_efficiency: float

    def __post_init__(self) -> None:
        check_positive(self)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        shares = {k: v for k, v in values.items() if k.endswith(("_share", "_efficiency"))}
        wrong = [f"{name} = {share}" for name, share in shares.items() if share > 1]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be at most 1")

    @property
    def usable_memory_bytes(self) -> int:
        """Memory of one GPU for weights, optimizer and activations."""
        return int(self.memory_bytes * self.usable_memory_share)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth that memory-bound kernels reach."""
        return self.hbm_bytes_per_s * self.hbm_efficiency

    @property
    def nvlink(self) -> Link:
        """The link between GPUs of a node."""
        rate = self.nvlink_bytes_per_s * self.nvlink_efficiency
        return Link(bytes_per_s=rate, latency_ns=self.nvlink_latency_us * NS_PER_US)

    @property
    def network(self) -> Link:
        """The link between GPUs of different nodes."""
        rate = self.network_bytes_per_s * self.network_efficiency
        return Link(bytes_per_s=rate, latency_ns=self.network_latency_us * NS_PER_US)

    def efficiency(self, width: int) -> float:
        """Share of the peak that a matrix product reaches, by the width of its weights.

        Width: the lesser of rows and columns on one GPU. The overhead of a product (casts, copies,
        bias, gaps) grows with its width, the product with the square. OmniBal's Figure 2 agrees: a
        layer of InternViT-6B (3,200 wide) takes 1.05 to 1.07 times as long as one of InternLM2-20B
        (6,144 wide) on .70 of its FLOPs. That overhead is limited by memory, so `half_speed_width`
        of another GPU scales with peak_flops_per_s / hbm_bytes_per_s.
        """
        return self.product_efficiency * width / (width + self.half_speed_width)


def load_cluster(name: str) -> Cluster:
    """A cluster preset by name, or from a user's TOML file (a name that ends in `.toml`)."""
    return build_config(Cluster, read_preset("clusters", name), where=f"cluster preset {name}")
