"""TRL's SFTTrainer with BalancedMixin, full and LoRA: losses, a killed run, evaluation, misuse."""

from itertools import islice

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader, model_inputs
from support import TESTS
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples

pytest.importorskip("trl", reason="needs TRL: pip install trl")
peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")

from datasets import Dataset  # noqa: E402
from tiny_internvl import make_internvl  # noqa: E402
from transformers import PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from isobatch.loaders.integrations.hf_trainer import BalancedMixin  # noqa: E402

torch.set_num_threads(1)

RATE, STEPS, SAVED, KILLED = 0.1, 6, 2, 3
"""The killed run loses the step after its last save, so that it is trained on again."""


class PackedSFT(BalancedMixin, SFTTrainer):
    pass


class Killed(BaseException):
    """Passes every handler that a trainer may have."""


class KillIn(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == KILLED:
            raise Killed


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed") / "build"
    return write_tabled(root, group_samples(make_samples(40)))


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL then asks for no server


def load(build, **options):
    options = {"dp_rank": 0, "dp_world_size": 1, "micro_batches_per_step": 2, **options}
    return StreamingLoader(build, **options)


def make_trainer(build, out, *, lora=False, options=None, **given):
    args = SFTConfig(
        output_dir=str(out),
        **{
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "save_steps": SAVED,
            "logging_steps": 1,
            "optim": "sgd",
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            **(options or {}),
        },
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TESTS / "data/tokenizers/byte_level")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # within the tiny vocabulary
    loader = load(build)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    given = {"train_dataset": loader, "peft_config": adapters if lora else None, **given}
    model = make_internvl(loader)
    if "eval_dataset" in given:
        model.resize_token_embeddings(len(tokenizer))  # TRL's own samples have its words
    return PackedSFT(model=model, args=args, processing_class=tokenizer, **given)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_a_plain_loop(build):
    """Mean loss per label of each step, and tokens of all."""
    loader, found, num_tokens = load(build), [], 0
    model = make_internvl(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = (step for _ in range(2) for step in loader)
    for step in islice(steps, STEPS):
        total = 0.0
        for batch in step:
            loss = model(**model_inputs(batch, model.config)).loss
            loss.backward()
            total += float(loss.detach()) * batch.loss_normalizer / batch.num_loss_tokens
            num_tokens += len(batch.input_ids)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, num_tokens


def test_sft_trains_as_a_plain_loop_and_a_killed_run_as_one_that_was_not(build, tmp_path):
    whole = make_trainer(build, tmp_path / "full")
    whole.train()
    expected, num_tokens = losses_of_a_plain_loop(build)
    assert losses(whole) == pytest.approx(expected, rel=1e-5)
    counted = [entry["num_tokens"] for entry in whole.state.log_history if "num_tokens" in entry]
    assert counted[-1] == num_tokens
    for name, lora in (("full", False), ("lora", True)):
        if lora:
            whole = make_trainer(build, tmp_path / name, lora=True)
            whole.train()
            trained = {key for key, each in whole.model.named_parameters() if each.requires_grad}
            assert trained
            assert all("lora" in key for key in trained)
            assert (tmp_path / name / f"checkpoint-{STEPS}" / "adapter_config.json").exists()
        killed = make_trainer(build, tmp_path / "killed" / name, lora=lora, callbacks=[KillIn()])
        with pytest.raises(Killed):
            killed.train()
        resumed = make_trainer(build, tmp_path / "killed" / name, lora=lora)
        resumed.train(resume_from_checkpoint=True)
        assert losses(resumed) == losses(whole), name  # log_history is saved, too
        assert losses(resumed)[:KILLED] == losses(killed) + losses(whole)[KILLED - 1 : KILLED], name
        weights = dict(resumed.model.named_parameters())
        for key, weight in whole.model.named_parameters():
            assert torch.equal(weight, weights[key]), (name, key)


def test_an_evaluation_is_trls_and_loaders_are_evaluated_beside_it(build, tmp_path):
    rows = Dataset.from_list([{"text": "a pump and its valve"}, {"text": "a valve"}])
    given = {"rows": rows, "loader": load(build, shuffle=False)}
    trainer = make_trainer(build, tmp_path, eval_dataset=given, options={"max_length": 64})
    both = trainer.evaluate()
    assert trainer.evaluate(given["loader"])["eval_loss"] == both["eval_loader_loss"]
    plain = make_trainer(build, tmp_path, options={"max_length": 64}, eval_dataset=rows)
    assert SFTTrainer.evaluate(plain, rows)["eval_loss"] == both["eval_rows_loss"]


def test_options_of_trl_that_packed_samples_contradict_are_refused(build, tmp_path):
    for name, value, match in (
        ("packing", True, "samples are packed already"),
        ("padding_free", True, "without padding"),
        ("completion_only_loss", False, "labels"),
        ("assistant_only_loss", True, "labels are the answers' already"),
        ("chat_template_path", "template.jinja", "give the loader or build chat_template"),
        ("max_length", 512, "no sample is truncated"),
    ):
        with pytest.raises(ConfigError, match=rf"^{name} is {value!r}; .*{match}"):
            make_trainer(build, tmp_path, options={name: value})
