"""The dist ratio of what ranks really receive is the one that the packer's report has predicted."""

import io

import pytest
import torch
from rich.console import Console

from isobatch.loaders import StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from support.builds.raw_data import good_records, options, write_dataset
from support.cases import for_each

SEED = 3
BUILDS = [("tiny", "arrow", 256), ("tiny", "webdataset", 256), ("qwen2_vl", "refs", 1500)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    return write_dataset(folder, good_records(folder, count=120))


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: "-".join(build[:2]))
def build(request, dataset, tmp_path_factory):
    model, format, max_seq_len = request.param
    out = tmp_path_factory.mktemp("packed") / "out"
    config = options(dataset, out, model=model, format=format, max_seq_len=max_seq_len)
    Builder(BuildConfig(**config), StageProgress(Console(file=io.StringIO()))).build()
    return out


@for_each(("dp", "micro_batches"), [(2, 1), (8, 1), (4, 3), (64, 1)])
def test_received_predicted_and_counted_are_equal(build, dp, micro_batches):
    ranks = [
        StreamingLoader(
            build,
            dp_rank=rank,
            dp_world_size=dp,
            micro_batches_per_step=micro_batches,
            seed=SEED,
            pixel_dtype=torch.uint8,
            workers=0,
        )
        for rank in range(dp)
    ]
    rounds = [round for step in zip(*ranks, strict=True) for round in zip(*step, strict=True)]
    predicted = make_report(build, dp=dp, seed=SEED).methods["ours"]
    llm = dist_ratio(rounds, lambda batch: len(batch.input_ids))
    vit = dist_ratio(
        rounds, lambda batch: len(batch.pixel_values)
    )  # patches, all of one size, or ViT tokens
    if micro_batches == 1:  # which the report is for
        assert llm == pytest.approx(predicted.dist_ratio_llm, rel=1e-12)
        assert vit == pytest.approx(predicted.dist_ratio_vit, rel=1e-12)
    assert llm > 0
    assert vit > 0
    for loader in ranks:
        stats = loader.stats()
        assert stats.dist_ratio_llm == pytest.approx(llm, rel=1e-12)
        assert stats.dist_ratio_vit == pytest.approx(vit, rel=1e-12)


def dist_ratio(rounds, load):
    """OmniBal, equation 2: the mean of the ranks' idle share, over rounds in which every rank has
    work if any has.
    """
    complete = [round for round in rounds if all(batch.num_samples for batch in round)] or rounds[
        :1
    ]
    shares = []
    for round in complete:
        loads = [load(batch) for batch in round]
        shares.append(sum(max(loads) - one for one in loads) / max(1, max(loads) * len(loads)))
    return sum(shares) / len(shares)
