"""BalancedTrainer: what it refuses, its state in the checkpoint, and a worker process."""

import json

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader, model_inputs
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from isobatch.loaders.integrations._trainer_args import check_arguments  # noqa: E402
from isobatch.loaders.integrations.hf_trainer import STATE_KEY, BalancedTrainer  # noqa: E402
from support.models.family_models import (  # noqa: E402
    FAMILIES,
    make_family_batch,
    make_family_model,
)

torch.set_num_threads(1)
PAIRS = {"micro_batches_per_step": 2}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed") / "build"
    write_tabled(root, group_samples(make_samples(40)))
    return root


class TokenModel(torch.nn.Module):
    """The smallest model that a Trainer takes: no image, no attention."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, input_ids, labels, num_items_in_batch=None, **options):
        logits = self.head(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(
            logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
        )
        return {"loss": loss / num_items_in_batch, "logits": logits}


def to_inputs(batch):
    return {"input_ids": batch.input_ids, "labels": batch.labels}


def make_trainer(build, out, micro_batches=2, given=None, **options):
    options = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2, **options}
    args = transformers.TrainingArguments(
        output_dir=str(out),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_only_model=False,
        **options,
    )
    loader = StreamingLoader(
        build, dp_rank=0, dp_world_size=1, micro_batches_per_step=micro_batches
    )
    model = TokenModel(loader.vocab_size)
    given = {"model": model, "to_inputs": to_inputs, "train_dataset": loader, **(given or {})}
    return BalancedTrainer(args=args, **given)


@pytest.fixture
def seen(monkeypatch):
    """Sample ids in the order in which they became inputs."""
    ids = []

    def watched(batch):
        ids.append(batch.sample_ids)
        return {"input_ids": batch.input_ids, "labels": batch.labels}

    monkeypatch.setitem(globals(), "to_inputs", watched)
    return ids


@pytest.mark.parametrize("workers", [0, 1])
def test_a_checkpoint_holds_the_state_behind_its_own_step_even_if_a_worker_is_ahead(
    build, tmp_path, seen, workers
):
    make_trainer(build, tmp_path / "out", dataloader_num_workers=workers).train()
    for step in (2, 4):
        state = json.loads(
            (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text()
        )
        loader = StreamingLoader(build, dp_rank=0, dp_world_size=1, micro_batches_per_step=2)
        for _ in zip(range(step), loader, strict=False):
            pass
        assert state["stateful_callbacks"][STATE_KEY] == loader.state_dict()
    whole = list(seen)
    seen.clear()
    resumed = make_trainer(build, tmp_path / "out", dataloader_num_workers=workers)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert seen == whole[4:]


def test_regrouped_epochs_of_a_worker_end_with_the_schedule(build, tmp_path):
    loader = StreamingLoader(build, **PAIRS, regroup="epoch")
    options = {"max_steps": -1, "num_train_epochs": 2, "lr_scheduler_type": "cosine"}
    trainer = make_trainer(
        build,
        tmp_path,
        given={"train_dataset": loader},
        dataloader_num_workers=1,
        logging_steps=1,
        **options,
    )
    trainer.train()
    assert trainer.state.global_step == 2 * len(loader)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)


def test_arguments_with_which_training_would_be_wrong_are_refused(build, tmp_path):
    with pytest.raises(
        ConfigError, match=r"gradient_accumulation_steps is 2.*micro_batches_per_step 3"
    ):
        make_trainer(build, tmp_path, micro_batches=3)
    for name, value, match in (
        ("per_device_train_batch_size", 4, "one micro-batch at a time"),
        ("auto_find_batch_size", True, "smaller caps"),
        ("train_sampling_strategy", "group_by_length", "its own order"),
        ("dataloader_drop_last", True, "remainder='drop'"),
        ("dataloader_num_workers", 4, "decodes in threads"),
        ("label_smoothing_factor", 0.1, "not computed for packed samples"),
        ("neftune_noise_alpha", 5.0, "one sample as long as the micro-batch"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name} is {value!r}; .*{match}"):
            make_trainer(build, tmp_path, **{name: value})
    accumulated = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    options = {"gradient_accumulation_steps": 1, "accelerator_config": accumulated}
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps is 4.*step 1"):
        make_trainer(build, tmp_path, micro_batches=1, **options)
    for given, match in (
        ({"train_dataset": [{"input_ids": [0]}]}, "the model has no name or folder"),
        ({"formatting_func": str}, "formatting_func is given"),
        ({"train_dataset": evaluation(build)}, "shuffle=False; leave that out"),
        (
            {"train_dataset": StreamingLoader(build, dp_rank=1, dp_world_size=2, **PAIRS)},
            "rank 0 of 1, but the loader's dp_rank is 1 of 2",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            make_trainer(build, tmp_path, given=given)


def test_a_model_that_ignores_the_divisor_is_refused(build, tmp_path, monkeypatch):
    monkeypatch.setattr(TokenModel, "accepts_loss_kwargs", False, raising=False)
    with pytest.raises(ConfigError, match="num_items_in_batch"):
        make_trainer(build, tmp_path)


def test_models_of_all_families_divide_by_it_whatever_they_say(build, tmp_path):
    for name in FAMILIES:
        model, batch = make_family_model(name), make_family_batch(name, (1,))
        given = model_inputs(batch, model.config)
        losses = [
            float(model(**given | {"num_items_in_batch": number}).loss.detach())
            for number in (1, 4)
        ]
        assert losses[0] == pytest.approx(4 * losses[1]), name
        assert make_trainer(build, tmp_path, given={"model": model}), name


def test_a_checkpoint_of_another_trainer_is_refused(build, tmp_path):
    make_trainer(build, tmp_path).train()
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"][STATE_KEY]
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="no loader state"):
        make_trainer(build, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_ranks_whose_gradients_would_be_averaged_are_refused():
    class TwoRanks:
        n_gpu, world_size, average_tokens_across_devices = 1, 2, False

    with pytest.raises(ConfigError, match="average_tokens_across_devices"):
        check_arguments(TwoRanks, has_other_data=False)
    TwoRanks.n_gpu = 8
    with pytest.raises(ConfigError, match="torchrun"):
        check_arguments(TwoRanks, has_other_data=False)


def test_a_resume_within_an_epoch_ends_with_the_same_epochs(build, tmp_path, seen):
    options = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 3}
    length = len(StreamingLoader(build, dp_rank=0, dp_world_size=1, **PAIRS))
    assert length % 3  # the first checkpoint is within an epoch
    trainer = make_trainer(build, tmp_path / "whole", **options)
    trainer.train()
    whole = list(seen)
    assert trainer.state.global_step == 2 * length
    assert sorted(i for ids in whole[: 2 * length] for i in ids) == sorted(
        i for ids in whole[2 * length :] for i in ids
    )
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    seen.clear()
    resumed = make_trainer(build, tmp_path / "resumed", **options | {"save_strategy": "epoch"})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert seen == whole[2 * 3 :]
    saved = sorted(path.name for path in (tmp_path / "resumed").iterdir())
    assert saved == sorted(f"checkpoint-{epoch * length}" for epoch in (1, 2))
    # another number of micro-batches: epochs have other steps, and max_steps says where they end
    options["gradient_accumulation_steps"] = 3
    with pytest.raises(ConfigError, match=r"give max_steps=\d+ \(3 done, 6 to the end") as refused:
        make_trainer(build, tmp_path / "other", 3, **options).train(checkpoint)
    seen.clear()
    options["max_steps"] = int(str(refused.value).split("max_steps=")[1].split()[0])
    make_trainer(build, tmp_path / "other", 3, **options).train(checkpoint)
    assert sorted(i for ids in seen for i in ids) == sorted(i for ids in whole[6:] for i in ids)


def evaluation(build, **options):
    return StreamingLoader(
        build, dp_rank=0, dp_world_size=1, micro_batches_per_step=3, shuffle=False, **options
    )


def mean_loss(model, loader):
    """Mean over all labels, and the number of samples."""
    batches = [batch for step in loader for batch in step]
    with torch.no_grad():
        total = sum(
            float(model(**to_inputs(batch), num_items_in_batch=1)["loss"]) for batch in batches
        )
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    return total / labels, sum(batch.num_samples for batch in batches)


def test_an_evaluation_is_the_mean_over_all_labels_and_leaves_the_training_as_it_is(
    build, tmp_path, seen
):
    loaders = {"all": evaluation(build), "few": evaluation(build, limit=7)}
    trainer = make_trainer(
        build,
        tmp_path / "out",
        given={"eval_dataset": loaders},
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_all_loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert logged[0]["eval_all_loss"] != logged[1]["eval_all_loss"]
    metrics = trainer.evaluate()
    for name, loader in loaders.items():
        expected, num_samples = mean_loss(trainer.model, loader)
        assert metrics[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-5)
        assert num_samples == {"all": 40, "few": 7}[name]
        speed, seconds = (
            metrics[f"eval_{name}_{key}"] for key in ("samples_per_second", "runtime")
        )
        assert speed * seconds == pytest.approx(num_samples, rel=0.02, abs=0.01)
    predicted = trainer.predict(loaders["few"])
    assert predicted.metrics["test_loss"] == metrics["eval_few_loss"]
    assert predicted.predictions is None
    seen.clear()
    torch.manual_seed(0)
    trainer = make_trainer(build, tmp_path / "again")
    trainer.train()
    alone = list(seen)
    seen.clear()
    given = {"eval_dataset": evaluation(build, limit=1)}
    make_trainer(build, tmp_path / "more", given=given, eval_strategy="steps", eval_steps=1).train()
    assert [ids for ids in seen if len(ids) > 1 or ids in alone] == alone


def test_an_evaluation_that_could_not_end_or_would_not_be_made_is_refused(build, tmp_path):
    shuffled = StreamingLoader(build, dp_rank=0, dp_world_size=1)
    with pytest.raises(ConfigError, match="a loader that shuffles; give it shuffle=False"):
        make_trainer(build, tmp_path).evaluate(shuffled)
    given = {"compute_metrics": lambda prediction: {}}
    with pytest.raises(ConfigError, match="compute_metrics needs a row per sample"):
        make_trainer(build, tmp_path, given=given).evaluate(evaluation(build))
    # of what the trainer is given, before it trains
    for each in (evaluation(build), {"docs": evaluation(build)}):
        with pytest.raises(ConfigError, match="compute_metrics needs a row per sample"):
            make_trainer(build, tmp_path, given=given | {"eval_dataset": each})
    with pytest.raises(ConfigError, match="a loader that shuffles; give it shuffle=False"):
        make_trainer(build, tmp_path, given={"eval_dataset": shuffled})
