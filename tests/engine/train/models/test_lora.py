"""LoRA in a pipeline: the gradients of peft on the whole model in one process, folders that peft
and transformers load.
"""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.models.weights import names_of, state_dict_of
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.train.models.lora import add_adapters, export_adapters, merge_adapters
from isobatch.engine.train.models.model_weights import LazyWeights
from isobatch.engine.train.models.open_model import PipelineModel
from isobatch.engine.train.options import LoraOptions
from support.models.family_models import make_family_batch, make_family_model, run_family_alone
from support.rank_programs.rank_cases import reduced_gradient
from support.ranks import on_ranks

NAME = "qwen2_5_vl"
TOLERANCE = 1e-5
"""Of gradients relative to the norm of all, as of models of transformers elsewhere."""
IMAGES = [(1, 0), (0,), (2,), (1, 1)]
"""Of each sample of each micro-batch."""
CASES = [
    ("1f1b", 2, None, ("llm",)),
    ("zero_bubble", 2, None, ("vision", "projector", "llm")),
    ("1f1b", 1, TrainingMode(precision="fp32", zero_stage=0), ("vision", "llm")),
    ("zero_bubble", 1, TrainingMode(precision="fp32", zero_stage=1), ("projector", "llm")),
]
"""(schedule, stages, mode, parts) on two ranks."""

torch.set_num_threads(1)


def made(parts, seed=0, **options):
    """A model's layers with adapters, all of whose numbers are random, and the model."""
    whole = make_family_model(NAME)
    weights = LazyWeights(whole, None, 0)
    stack = from_transformers(whole)
    lora = LoraOptions(lora_rank=2, lora_parts=parts, **options)
    add_adapters(dict(enumerate(stack.layers)), parts_of(stack.layers), lora, seed)
    with torch.no_grad():  # B is 0 at first, and the gradient of A too
        for number, layer in enumerate(stack.layers):
            generator = torch.Generator().manual_seed(number)
            for name, weight in layer.named_parameters():
                if "lora_B" in name:
                    weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return PipelineModel(stack=stack, preset=None, whole=whole, weights=weights), lora


def parts_of(layers):
    kinds = [type(layer).__name__ for layer in layers]
    projector = kinds.index("Merger")
    return ["vision"] * projector + ["projector"] + ["llm"] * (len(layers) - projector - 1)


def with_peft(state, parts, lora):
    """The whole model, as a user of peft makes it, with these adapters."""
    target = {name.partition(".lora_")[0] for name in state}
    config = peft.LoraConfig(r=2, lora_alpha=lora.lora_alpha, target_modules=sorted(target))
    model = peft.get_peft_model(make_family_model(NAME), config)
    missing = model.load_state_dict(
        {f"base_model.model.{name}": tensor for name, tensor in state.items()}, strict=False
    )
    assert not missing.unexpected_keys
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"base_model.model.{name}" for name in state}
    return model


def compare():
    """On a rank: every case in the pipeline, and alone."""
    rank = dist.get_rank()
    for schedule, pp, mode, parts in CASES:
        model, lora = made(parts)
        layers = model.stack.layers
        prefixes = names_of(model.whole, layers)
        state = state_dict_of(dict(enumerate(layers)), prefixes)
        state = {name: tensor.clone() for name, tensor in state.items() if ".lora_" in name}
        alone = with_peft(state, parts, lora)
        borders = (0, len(layers)) if pp == 1 else (0, len(layers) // 2, len(layers))
        pipelines = [[0, 1]] if pp == 2 else [[0], [1]]
        options = PipelineOptions(schedule=schedule, mode=mode)
        pipeline = Pipeline(model.stack, borders, [True] * len(layers), pipelines, options)
        batches = [make_family_batch(NAME, own, seed=seed) for seed, own in enumerate(IMAGES)]
        labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
        expected = sum(run_family_alone(NAME, alone, batch, labels) for batch in batches)
        own = batches if pp == 2 else batches[2 * rank : 2 * rank + 2]
        loss = torch.tensor(pipeline.step(own, labels).loss, dtype=torch.float64)
        if pp == 1:
            dist.all_reduce(loss)
        assert abs(float(loss) - expected) <= TOLERANCE * expected, (schedule, parts)
        pipeline.reduce_gradients()
        gradients = {
            name.removeprefix("base_model.model."): weight.grad
            for name, weight in alone.named_parameters()
            if weight.requires_grad
        }
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        for index, layer in pipeline.layers.items():
            for name, weight in layer.named_parameters():
                child, _, rest = name.partition(".")
                found = reduced_gradient(weight)
                wanted = gradients.get(f"{prefixes[index][child]}.{rest}")
                assert (found is None) == (wanted is None) == (".lora_" not in name), name
                if found is not None:
                    assert float((found - wanted).norm()) <= TOLERANCE * float(norm), name


def test_gradients_are_those_of_peft_on_the_whole_model(tmp_path):
    on_ranks(2, str(tmp_path), compare)


def test_an_adapter_begins_the_same_wherever_its_layer_is():
    whole = make_family_model(NAME)
    layers = dict(enumerate(from_transformers(whole).layers))
    parts, lora = parts_of(list(layers.values())), LoraOptions(lora_rank=2)
    before = torch.get_rng_state()
    add_adapters({6: layers[6]}, parts, lora, 3)
    assert torch.equal(torch.get_rng_state(), before)
    other = dict(enumerate(from_transformers(make_family_model(NAME)).layers))
    add_adapters(other, parts, lora, 3)
    adapters = {name: weight for name, weight in layers[6].state_dict().items() if "lora" in name}
    assert adapters
    for name, weight in adapters.items():
        assert torch.equal(weight, other[6].state_dict()[name])


def export(folder):
    """On two ranks: adapters as a folder, then merged."""
    model, lora = made(("vision", "llm"))
    layers = model.stack.layers
    options = PipelineOptions(mode=TrainingMode(precision="fp32", zero_stage=0))
    pipeline = Pipeline(model.stack, (0, 4, len(layers)), [False] * len(layers), [[0, 1]], options)
    batch = make_family_batch(NAME, (1, 0, 2), seed=5)
    loss = torch.tensor(pipeline.evaluate([batch]))
    base = folder / "base"
    if dist.get_rank() == 0:
        make_family_model(NAME).save_pretrained(base)
    assert export_adapters(model, pipeline, folder / "adapters", lora, base) == (
        dist.get_rank() == 0
    )
    merge_adapters(layers)
    assert model.export(pipeline, folder / "merged") == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save(loss, folder / "loss")


def test_what_is_written_has_the_same_loss_in_peft_and_transformers(tmp_path):
    on_ranks(2, str(tmp_path), export, tmp_path)
    loss = float(torch.load(tmp_path / "loss"))
    batch = make_family_batch(NAME, (1, 0, 2), seed=5)
    read = transformers.AutoModelForImageTextToText.from_pretrained
    base, merged = (read(tmp_path / name, dtype=torch.float32) for name in ("base", "merged"))
    without = run_family_alone(NAME, base, batch)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert run_family_alone(NAME, merged, batch) == pytest.approx(loss, rel=TOLERANCE)
    config = adapted.peft_config["default"]
    assert config.base_model_name_or_path == str(tmp_path / "base")
    adapted.set_requires_grad("default")
    assert run_family_alone(NAME, adapted, batch) == pytest.approx(loss, rel=TOLERANCE)
    assert abs(without - loss) > 1e-2


def test_what_no_layer_has_is_said():
    whole = make_family_model(NAME)
    layers = from_transformers(whole).layers
    options = LoraOptions(lora_rank=2, lora_targets=("nothing",))
    with pytest.raises(ConfigError, match=r"--lora-targets nothing: Target modules .*not found"):
        add_adapters(dict(enumerate(layers)), parts_of(layers), options, 0)
    with pytest.raises(ConfigError, match="--lora-alpha is for LoRA: give --lora-rank too"):
        LoraOptions(lora_alpha=32.0)
    with pytest.raises(ConfigError, match="--lora-parts 'lm': give one of vision, projector, llm"):
        LoraOptions(lora_rank=2, lora_parts=("lm",))
