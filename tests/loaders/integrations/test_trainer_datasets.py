"""Trainers on datasets of records, which a BalancedLoader packs: epochs, a killed run, misuse."""

from collections import Counter

import pytest
import torch

from isobatch.common.errors import ConfigError
from support.loading.evaluations import loss_of_each
from support.loading.online_data import OPTIONS, records

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from datasets import Dataset  # noqa: E402
from tiny_internvl import make_internvl  # noqa: E402

from isobatch.loaders import BalancedLoader  # noqa: E402
from isobatch.loaders.integrations import hf_trainer  # noqa: E402
from isobatch.loaders.integrations._trainer_args import evaluation_of  # noqa: E402
from isobatch.loaders.integrations.hf_trainer import STATE_KEY, BalancedTrainer  # noqa: E402

torch.set_num_threads(1)


class Killed(BaseException):
    """Passes every handler that a trainer may have."""


class KillIn(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    return records(folder, 60), {**OPTIONS, "data_root": str(folder), "max_tokens": 300}


@pytest.fixture
def seen(monkeypatch):
    """Sample ids in the order in which they became inputs."""
    found, original = [], hf_trainer.model_inputs

    def watched(batch, model, **options):
        found.append(batch.sample_ids)
        return original(batch, model, **options)

    monkeypatch.setattr(hf_trainer, "model_inputs", watched)
    return found


def make_trainer(rows, out, given=None, **options):
    rows, packing = rows
    args = transformers.TrainingArguments(
        output_dir=str(out),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "save_steps": 4,
            "learning_rate": 1e-3,
            **options,
        },
    )
    model = make_internvl(BalancedLoader(rows, **packing))
    given = {"train_dataset": rows, "loader_options": packing, **(given or {})}
    return BalancedTrainer(model=model, args=args, **given)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_epochs_of_a_dataset_give_every_sample_and_a_killed_run_resumes(rows, tmp_path, seen):
    whole = make_trainer(rows, tmp_path / "whole")
    whole.train()
    ids = Counter(i for each in seen for i in each)
    assert len(ids) == len(rows[0])
    assert set(ids.values()) == {2}
    steps = whole.state.global_step
    figures = whole.state.log_history[-1]
    trained = figures["train_samples_per_second"] * figures["train_runtime"]
    assert trained == pytest.approx(2 * len(rows[0]), rel=0.01)
    assert (tmp_path / "whole" / f"checkpoint-{steps}").exists()
    with pytest.raises(Killed):
        make_trainer(rows, tmp_path / "killed", {"callbacks": [KillIn(6)]}).train()
    seen.clear()
    # a column has one type
    images = [row.get("image", []) for row in rows[0]]
    images = [[each] if isinstance(each, str) else each for each in images]
    same = [row | {"image": each} for row, each in zip(rows[0], images, strict=True)]
    as_dataset = {"train_dataset": Dataset.from_list(same)}
    resumed = make_trainer(rows, tmp_path / "killed", as_dataset)
    resumed.train(resume_from_checkpoint=True)
    assert len(seen) == 2 * (steps - 4)
    assert losses(resumed) == losses(whole)
    for key, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[key]), key
    # after the last step nothing is left
    seen.clear()
    again = make_trainer(rows, tmp_path / "whole")
    again.train(resume_from_checkpoint=True)
    assert (seen, again.state.global_step) == ([], steps)
    # on other ranks a state continues, and max_steps says for how long
    other = make_trainer(rows, tmp_path / "killed", gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match=r"4 micro-batches .* had 2 .* give max_steps=\d+"):
        other.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    seen.clear()
    options = {"gradient_accumulation_steps": 4, "max_steps": 6}
    other = make_trainer(rows, tmp_path / "other", **options)
    other.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    assert len(seen) == 2 * 4
    assert hf_trainer.saved_states(other.state)[STATE_KEY] == other.loader.state_dict()


def test_padded_micro_batches_train_and_resume(rows, tmp_path, monkeypatch):
    """A row per sample, for a model whose attention knows no borders of samples."""
    shapes, original = [], hf_trainer.model_inputs

    def watched(batch, model, **options):
        inputs = original(batch, model, **options)
        assert batch.is_padded
        assert "cu_seq_lens_q" not in inputs
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape
        shapes.append((batch.num_samples, inputs["input_ids"].shape[0]))
        return inputs

    monkeypatch.setattr(hf_trainer, "model_inputs", watched)
    padded = rows[0], {**rows[1], "packing": False}

    def train(out, *, resume=False, given=None):
        options = {"num_train_epochs": 1, "save_steps": 3}
        trainer = make_trainer(padded, tmp_path / out, given, **options)
        trainer.model.set_attn_implementation("eager")
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole")
    assert sum(samples for samples, _ in shapes) == len(rows[0])
    assert all(given == max(1, samples) for samples, given in shapes)
    assert max(shapes)[0] > 1
    with pytest.raises(Killed):
        train("killed", given={"callbacks": [KillIn(4)]})
    resumed = train("killed", resume=True)
    assert losses(resumed) == losses(whole)
    for key, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[key]), key


def test_datasets_that_cannot_be_packed_are_refused(rows, tmp_path):
    loader = BalancedLoader(rows[0], **rows[1], micro_batches_per_step=2)
    for given, match in (
        ({"loader_options": [400]}, r"loader_options is \[400\]; give a dict"),
        ({"train_dataset": None}, "train_dataset is None; give a loader, or a dataset"),
        ({"loader_options": {"max_tokens": 400}}, "no name or folder"),
        ({"loader_options": {"model": "tiny", "max_token": 400}}, "max_tokens"),
        ({"train_dataset": loader}, "train_dataset is a loader; give them to the loader"),
        ({"loader_options": rows[1] | {"micro_batches_per_step": 3}}, "steps is 2, .* 3"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_trainer(rows, tmp_path, given)
    loader = BalancedLoader(rows[0], **rows[1], micro_batches_per_step=2, epochs=1)
    given = {"train_dataset": loader, "loader_options": None}
    with pytest.raises(ConfigError, match="leave out its `epochs`"):
        make_trainer(rows, tmp_path, given, max_steps=1000).train()


def test_a_dataset_is_evaluated_in_order_and_its_loss_is_the_mean_over_all_labels(
    rows, tmp_path, seen
):
    records, packing = rows
    few = [records[number] for number in (3, 1, 2)]
    training = {"image_transform": spoil, "remainder": "drop", "measure": "own"}
    trainer = make_trainer(
        rows,
        tmp_path / "out",
        {
            "eval_dataset": {"all": records, "few": Dataset.from_list(without_images(few))},
            "loader_options": packing | training,
        },
        eval_strategy="steps",
        eval_steps=3,
        max_steps=4,
    )
    trainer.train()
    seen.clear()
    first, second = trainer.evaluate(), trainer.evaluate()
    ids = [name for each in seen for name in each]
    whole = [row["id"] for row in records] + [row["id"] for row in few]
    assert ids == 2 * whole
    # one sample at a time, in one process
    for name, given in (("all", records), ("few", without_images(few))):
        expected = loss_of_each(trainer.model, given, packing)
        assert first[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-6)
        assert second[f"eval_{name}_loss"] == first[f"eval_{name}_loss"]
    # rows of tokens are the trainer's own, and so is what it cannot index
    tokens = [{"input_ids": [1, 2], "labels": [1, 2]}]
    other = make_trainer(rows, tmp_path / "tokens", {"eval_dataset": tokens})
    assert other.eval_dataset is tokens
    stream = Stream()
    assert make_trainer(rows, tmp_path / "a", {"eval_dataset": stream}).eval_dataset is stream


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield {"input_ids": [1, 2], "labels": [1, 2]}


def test_ranks_evaluate_equally_many_micro_batches_where_no_group_can_be_split(rows, tmp_path):
    """FSDP would wait for a rank without one."""
    records, packing = rows
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    lengths = []
    for rank in range(2):
        options = packing | {"dp_rank": rank, "dp_world_size": 2}
        loader = evaluation_of(records[:1], records, args, None, options)
        lengths.append([len(step) for step in loader])
    assert lengths == [[1], [1]]


def test_the_best_weights_are_loaded_and_a_second_training_goes_on(rows, tmp_path):
    trainer = make_trainer(
        rows,
        tmp_path / "out",
        {"eval_dataset": rows[0][:5]},
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    steps, epoch = trainer.state.global_step, trainer.loader.epoch + trainer.loader.is_at_end
    # the loss falls, so that the first evaluation's is the largest
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert (evaluated[0]["step"], epoch) == (4, 1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[0]["eval_loss"], rel=1e-6)
    trainer.train()
    assert abs(trainer.state.global_step - steps) < steps / 2
    assert trainer.loader.epoch + trainer.loader.is_at_end == 2


def without_images(given):
    """Texts alone, whose columns have one type."""
    texts = [
        [turn["value"].replace("<image>", "") for turn in row["conversations"]] for row in given
    ]
    return [
        {
            "id": row["id"],
            "conversations": [
                {"from": name, "value": text}
                for name, text in zip(("human", "gpt"), own, strict=True)
            ],
        }
        for row, own in zip(given, texts, strict=True)
    ]


def spoil(image, rng):
    """A change for the training alone."""
    return image * 0
