"""The loops of README and docs, word for word: alone, in DDP, in FSDP2 and with Accelerate they
train as one process does, sample by sample.
"""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_internvl import make_internvl

from isobatch import BalancedLoader, StreamingLoader, model_inputs
from isobatch.common.errors import ConfigError
from isobatch.loaders.batch import joined_gradients
from support import ROOT
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.frameworks.user_loops import joined, run_loop, train_alone
from support.pages.readme_folder import readme_folder
from support.ranks import on_ranks, process

PAGES = sorted((ROOT / "docs" / "load" / "trainers").glob("*.md"))
DOCS = "\n".join(page.read_text("utf-8") for page in PAGES)
LOOPS = dict(re.findall(r"<!-- loop: (\w+) -->\n```python\n(.*?)```", DOCS, flags=re.DOTALL))
README = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def of_build(build):
    loader = StreamingLoader(build, micro_batches_per_step=2)
    model = make_internvl(loader)
    return {"loader": loader, "model": model, "optimizer": optimizer_of(model)}


def of_readme(_):
    torch.manual_seed(0)
    model = model_of_readme()
    return {"model": model, "optimizer": optimizer_of(model)}


def model_of_readme():
    from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: PLC0415

    config = AutoConfig.from_pretrained("Qwen/Qwen3-VL-2B-Instruct")
    return AutoModelForImageTextToText.from_config(config)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    folder, samples = tmp_path_factory.mktemp("builds"), make_samples(60)
    packed = write_tabled(folder / "packed", group_samples(samples))
    single = write_build(folder / "single", [[sample] for sample in samples])
    loader = StreamingLoader(single, dp_rank=0, dp_world_size=1)
    return packed, {batch.sample_ids[0]: batch for (batch,) in loader}


def run(num_ranks, tmp_path, code, make, place):
    if num_ranks == 1:
        alone = process(run_loop, code, make, tmp_path, place)
        alone.start()
        alone.join()
        assert alone.exitcode == 0
    else:
        on_ranks(num_ranks, tmp_path, run_loop, code, make, tmp_path, place)
    return joined(tmp_path, num_ranks)


def check_equal(weights, expected):
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("alone", 1), ("ddp", 2), ("fsdp", 2), ("accelerate", 1), ("accelerate", 2)],
)
def test_the_loops_of_the_docs_train_as_one_process_does(builds, tmp_path, name, num_ranks):
    packed, single = builds
    weights, steps = run(num_ranks, tmp_path, LOOPS[name], of_build, packed)
    assert [len(ids) > num_ranks for ids, _ in steps] == [True] * 3
    made = of_build(packed)
    before = {key: each.clone() for key, each in made["model"].state_dict().items()}
    expected = train_alone(made["model"], made["optimizer"], steps, single)
    check_equal(weights, expected)
    moved = max((before[key] - each).abs().max().item() for key, each in expected.items())
    assert moved > 1e-3  # by far more than what may differ


@pytest.mark.parametrize(("wrap", "num_ranks"), [("", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_readmes_loop_trains_as_one_process_does(tmp_path, monkeypatch, wrap, num_ranks):
    readme_folder(tmp_path)
    wraps = {
        "": "",
        "ddp": "model = torch.nn.parallel.DistributedDataParallel(model)\n",
        "fsdp": "torch.distributed.fsdp.fully_shard(model)\noptimizer = make_optimizer(model)\n",
    }
    code = README.replace("for step in loader:", wraps[wrap] + "for step in loader:")
    weights, steps = run(num_ranks, tmp_path, code, of_readme_with_optimizer, None)
    monkeypatch.chdir(tmp_path)
    made = of_readme(None)
    names = {}
    exec(README.partition("loader =")[0], names)
    options = {"model": "Qwen/Qwen3-VL-2B-Instruct", "max_tokens": 16_384, "shuffle": False}
    single = {}
    for row in range(len(names["dataset"])):
        ((batch,),) = BalancedLoader(names["dataset"].select([row]), **options)
        single[batch.sample_ids[0]] = batch
    check_equal(weights, train_alone(made["model"], made["optimizer"], steps, single))


def of_readme_with_optimizer(place):
    return of_readme(place) | {"make_optimizer": optimizer_of}


def test_whether_gradients_are_averaged_is_found_or_asked(builds, monkeypatch):
    packed, _ = builds
    options = {"dp_rank": 0, "dp_world_size": 4}
    (batch,) = next(iter(StreamingLoader(packed, **options)))
    (mean,) = next(iter(StreamingLoader(packed, gradients="mean", **options)))
    order = {"shuffle": False, "loss_normalizer": "step", "remainder": "pad"}
    (own,) = next(iter(StreamingLoader(packed, **order, **options)))
    assert mean.loss_divisor * 4 == batch.loss_normalizer == mean.loss_normalizer
    with pytest.raises(ConfigError, match="gradients is 'max'; it must be one of mean, sum"):
        StreamingLoader(packed, gradients="max")
    monkeypatch.setattr(joined_gradients, "_wrapper", lambda: "")
    assert batch.loss_divisor == batch.loss_normalizer  # torch.distributed does not run here
    monkeypatch.setattr(joined_gradients.dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"4 ranks train, and no module .* gradients='sum'"):
        batch.loss_divisor  # noqa: B018
    assert replace(batch, gradients="sum").loss_divisor == batch.loss_normalizer
    monkeypatch.setattr(joined_gradients, "_wrapper", lambda: "DistributedDataParallel")
    assert batch.loss_divisor == mean.loss_divisor
    with pytest.raises(ConfigError, match="gradients='sum', but DistributedDataParallel takes"):
        replace(batch, gradients="sum").loss_divisor  # noqa: B018
    assert own.loss_divisor == own.loss_normalizer  # an evaluation's losses are summed


def test_the_config_is_found_in_an_engine_with_one_of_its_own(builds):
    loader = StreamingLoader(builds[0])
    (batch,) = next(iter(loader))
    engine = torch.nn.Module()  # as DeepSpeed's
    engine.module, engine.config = make_internvl(loader), {"train_batch_size": 1}
    inputs, expected = (model_inputs(batch, model) for model in (engine, engine.module))
    assert inputs.keys() == expected.keys()
    assert torch.equal(inputs["input_ids"], expected["input_ids"])


def test_a_models_mean_loss_is_refused(builds):
    packed, _ = builds
    loader = StreamingLoader(packed)
    (batch,) = next(iter(loader))
    loss = make_internvl(loader)(**model_inputs(batch, make_internvl(loader))).loss
    with pytest.raises(ValueError, match=r"divided already: call model\(\*\*model_inputs"):
        batch.reduce_loss(loss)
    with pytest.raises(ValueError, match="give the loss of each token"):
        batch.reduce_loss(torch.zeros(3))
    with pytest.raises(ConfigError, match="Linear is no model of transformers"):
        model_inputs(batch, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("factor", "said"),
    [(4, "multiplied by 4, the number of ranks"), (0.5, "divided by 2"), (1, "")],
)
def test_a_loss_that_is_scaled_once_more_is_said(builds, monkeypatch, factor, said):
    packed, _ = builds
    monkeypatch.setattr(joined_gradients, "_num_watched", 0)
    options = {"dp_rank": 0, "dp_world_size": 4, "micro_batches_per_step": 2, "gradients": "mean"}
    batch = next(iter(StreamingLoader(packed, **options)))[0]
    losses = torch.ones(len(batch.labels), requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (batch.reduce_loss(losses) * factor).backward()
    assert [said in str(each.message) for each in caught] == [True] * bool(said)
