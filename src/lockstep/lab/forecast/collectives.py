"""Seconds of collectives under the α–β model, on one level (a node) or two (nodes joined by a network). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.arithmetic import ceil_div
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Level:
    """The links between devices of one level.

    ``alpha_s``: seconds for a message to its neighbour, however short: (fast, middle, slow). ``bandwidth``: bytes a
    second that rings reach: (slow, middle, fast); of a node: each device's; of a network: a node's, or each device's
    when ``per_device``. ``source``: where the figures come from.
    """

    name: str
    alpha_s: tuple[float, float, float]
    bandwidth: tuple[float, float, float]
    source: str
    per_device: bool = False


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``per_node`` devices; ``launch_s``: seconds of every collective before its first message.

    ``alpha_index``, ``beta_index``: index of the figure that counts: 0 good, 1 middle, 2 bad.
    """

    per_node: int
    node: Level
    network: Level
    launch_s: tuple[float, float, float] = (6.6e-6, 8.4e-6, 14e-6)
    alpha_index: int = 1
    beta_index: int = 1

    def nodes(self, devices: int) -> int:
        return ceil_div(devices, self.per_node)

    def bandwidth(self, devices: int) -> float:
        """Return bytes a second that each device can send in a ring over all: those of the slowest link, unshared."""
        index = 2 - self.beta_index
        if self.nodes(devices) == 1:
            return self.node.bandwidth[index]
        # The last node may have fewer devices.
        lines = (devices - 1) % self.per_node + 1 if self.network.per_device else 1
        return min(self.node.bandwidth[index], self.network.bandwidth[index] * lines)

    def latency(self, hops: int, network_hops: int) -> float:
        index = self.alpha_index
        return self.launch_s[index] + hops * self.node.alpha_s[index] + network_hops * self.network.alpha_s[index]


def all_reduce(size: float, devices: int, cluster: Cluster) -> float:
    """Predict seconds of a ring through all devices or a double binary tree over nodes, whichever is faster, as NCCL.

    A ring (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002) sends 2(n-1)/n of the bytes in 2(n-1)
    steps, of which 2(nodes-1) cross the network. A tree (Sanders, Speck, Träff 2009,
    https://doi.org/10.1016/j.parco.2009.09.001) moves the message up and down once, pipelined: 2·bytes/β, through a
    chain in each node and log2(nodes) hops between nodes.
    """
    if devices == 1:
        return 0.0
    nodes = cluster.nodes(devices)
    bandwidth = cluster.bandwidth(devices)
    ring = 2 * (devices - 1) / devices * size / bandwidth + cluster.latency(2 * (devices - nodes), 2 * (nodes - 1))
    depth = 2 * math.ceil(math.log2(nodes))
    tree = 2 * size / bandwidth + cluster.latency(2 * (min(devices, cluster.per_node) - 1), depth)
    return min(ring, tree)


def all_gather(size: float, devices: int, cluster: Cluster) -> float:
    """Predict seconds of a ring; ``size``: bytes of the whole result. A reduce-scatter of such an input is alike."""
    if devices == 1:
        return 0.0
    nodes = cluster.nodes(devices)
    bandwidth = cluster.bandwidth(devices)
    return (devices - 1) / devices * size / bandwidth + cluster.latency(devices - nodes, nodes - 1)


#: Latencies: of the order of the constants in NCCL's model (src/graph/tuning.cc). Bandwidths: the share of the line
#: rate that rings reach in public nccl-tests runs, from cautious to good.
LEVELS = {
    "nvlink": Level(
        "NVLink", (0.6e-6, 1.9e-6, 3.4e-6), (230e9, 360e9, 430e9), "NVLink 3 to 4 with NVSwitch, 300 to 450 GB/s a way"
    ),
    "pcie": Level("PCIe", (1e-6, 2.5e-6, 5.7e-6), (9e9, 18e9, 24e9), "PCIe 3 to 4 x16, 16 to 32 GB/s a way"),
    "25gbe": Level(
        "25 Gb/s Ethernet", (8e-6, 20e-6, 40e-6), (1.9e9, 2.6e9, 2.9e9), "one port a node, 3.125 GB/s line rate"
    ),
    "ib400": Level(
        "InfiniBand 400 Gb/s", (2.7e-6, 4e-6, 14e-6), (35e9, 42e9, 48e9), "one port a GPU, 50 GB/s line rate", True
    ),
}
_IN_NODE = ("nvlink", "pcie")


def cluster_of(names: str, per_node: int) -> Cluster:
    """Parse ``nvlink``, ``25gbe``, or one of each: ``pcie,25gbe``. Default: NVLink inside nodes, InfiniBand between."""
    if per_node < 1:
        raise UsageError(f"{per_node} GPUs a node make no cluster", fix="take --gpus-per-node 8, or any number from 1")
    links = [name.strip().lower() for name in names.split(",") if name.strip()]
    unknown = [name for name in links if name not in LEVELS]
    inside = [name for name in links if name in _IN_NODE]
    between = [name for name in links if name not in _IN_NODE]
    if unknown or not links or len(inside) > 1 or len(between) > 1:
        raise UsageError(
            f"--interconnect {names!r} is not one link inside nodes and one between them",
            why=f"inside: {', '.join(_IN_NODE)}; between: {', '.join(n for n in LEVELS if n not in _IN_NODE)}",
            fix="write for example --interconnect nvlink,ib400 or --interconnect 25gbe",
        )
    return Cluster(per_node, LEVELS[(inside or ["nvlink"])[0]], LEVELS[(between or ["ib400"])[0]])
