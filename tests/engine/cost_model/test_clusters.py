"""Clusters: the shipped ones load; a mistake in one says where; narrow products are slow; stages
find their link.
"""

import pytest

from isobatch.common.config import preset_names
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.models.clusters import load_cluster
from support.cases import for_each

PROMISED = ["a100_80g", "a100_80g_4gpu", "a100_80g_half_network", "gh200", "h100", "h200"]


def test_the_promised_clusters_are_shipped():
    assert preset_names("clusters") == PROMISED


@for_each("name", PROMISED)
def test_a_shipped_cluster_loads_under_its_name_and_is_no_faster_than_its_data_sheet(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.usable_memory_bytes < cluster.memory_bytes
    assert cluster.memory_bytes_per_s < cluster.hbm_bytes_per_s
    assert cluster.network.bytes_per_s < cluster.nvlink.bytes_per_s < cluster.nvlink_bytes_per_s
    assert cluster.efficiency(1024) < cluster.efficiency(8192) < cluster.product_efficiency


def test_what_surrounds_products_goes_with_peak_over_memory_speed():
    a100 = load_cluster("a100_80g")
    for name in ("h100", "h200", "gh200"):
        other = load_cluster(name)
        ratio = (
            other.peak_flops_per_s
            / other.hbm_bytes_per_s
            * a100.hbm_bytes_per_s
            / a100.peak_flops_per_s
        )
        assert other.half_speed_width == pytest.approx(a100.half_speed_width * ratio, rel=0.03)


def test_a_product_as_wide_as_the_half_speed_width_reaches_half_of_the_best():
    cluster = load_cluster("a100_80g")
    assert cluster.efficiency(cluster.half_speed_width) == cluster.product_efficiency / 2


def test_a_file_of_the_users_may_extend_ours(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "h100"\nnetwork_bytes_per_s = 25e9\n')
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.network_bytes_per_s) == ("mine", 25e9)
    assert cluster.peak_flops_per_s == load_cluster("h100").peak_flops_per_s


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "nvlink_efficiency = 1.5",
            r"cluster preset .*mine.toml: nvlink_efficiency = 1.5: must be at most 1",
        ),
        ("gpus_per_node = 0", r"gpus_per_node = 0: must be greater"),
        ("gpu_per_node = 8", r"unknown key gpu_per_node; known: .*gpus_per_node"),
        ('gpus_per_node = "8"', r"gpus_per_node is '8', but should be int"),
    ],
)
def test_a_mistake_in_a_cluster_is_an_error_that_names_it(tmp_path, line, message):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "h100"\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        load_cluster(str(path))


def test_an_unknown_cluster_is_an_error_that_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"'v100' \(did you mean h100\?\); shipped: a100_80g, "):
        load_cluster("v100")


@pytest.mark.parametrize(
    ("parallel", "inside"),
    [
        (Parallelism(tp=2, pp=4, innermost="stages"), True),
        (
            Parallelism(tp=4, pp=4, innermost="stages"),
            False,
        ),  # two of three borders lie in a node, one does not
        (Parallelism(tp=2, pp=4, dp=4), False),
        (Parallelism(tp=2, pp=2, dp=2), True),
    ],
)
def test_stages_send_over_nvlink_only_where_all_of_them_share_a_node(parallel, inside):
    cluster = load_cluster("a100_80g")
    assert parallel.stage_link(cluster) == (cluster.nvlink if inside else cluster.network)


def test_tensor_parallelism_beyond_a_node_goes_over_the_network():
    cluster = load_cluster("a100_80g_4gpu")
    assert Parallelism(tp=4).tensor_link(cluster) == cluster.nvlink
    assert Parallelism(tp=8).tensor_link(cluster) == cluster.network


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"dp": -1}, {"innermost": "stage"}])
def test_an_impossible_parallelism_is_an_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Parallelism(**wrong)
