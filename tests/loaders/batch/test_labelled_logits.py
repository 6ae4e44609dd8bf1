"""Logits only where there are labels: the loss and gradients of all logits, in every family."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from isobatch import ConfigError, chunked_loss, model_inputs
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.loaders.batch.model_inputs import labelled_logits
from isobatch.loaders.batch.model_inputs.inputs import FAMILIES as KNOWN
from isobatch.tensors import token_loss

transformers = pytest.importorskip("transformers")
from support.models.family_models import (  # noqa: E402
    FAMILIES,
    make_family_batch,
    make_family_model,
)

torch.set_num_threads(1)

TAKE_ALL = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "minicpmv4_6"}
"""Families whose models take no `logits_to_keep` (transformers 5.24)."""
LINEAR = {"qwen3_5", "qwen3_5_moe", "minicpmv4_6"}
"""Can be packed with kernels alone."""
NORMALIZER = 7.0


@pytest.fixture(scope="module")
def qwen():
    return make_family_model("qwen2_5_vl")


def run(model, inputs):
    """(loss, gradients by name, rows of logits that were computed)."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return output.loss.item(), gradients, output.logits[..., 0].numel()


def assert_equal(first, second, what):
    assert first[0] == pytest.approx(second[0], rel=1e-5, abs=1e-9), what
    assert first[1].keys() == second[1].keys(), what
    norm = torch.cat([gradient.flatten() for gradient in second[1].values()]).norm()
    for name, gradient in second[1].items():
        assert (first[1][name] - gradient).norm() <= 1e-5 * norm, f"{what}: {name}"


def batches_of(name):
    """Packed and padded ones, also empty and without labels, each with a phrase."""
    full = make_family_batch(name, (2, 0, 3), 1, NORMALIZER)
    unlabelled = replace(full, labels=torch.full_like(full.labels, -100))
    text = make_family_batch(name, (0, 0), 2, NORMALIZER)
    empty = make_family_batch(name, (), 2, NORMALIZER)
    cases = {"images": full, "no label": unlabelled, "text": text, "empty": empty}
    for what, batch in cases.items():
        if name not in LINEAR or batch.num_samples < 2:
            yield f"{name}, {what}", batch
        yield f"{name}, {what}, padded", replace(batch, is_padded=True)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - TAKE_ALL))
def test_loss_and_gradients_equal_those_of_all_logits(name):
    model = make_family_model(name)
    stock_loss = model.loss_function
    for what, batch in batches_of(name):
        inputs = model_inputs(batch, model, logits="labelled")
        expected = run(model, model_inputs(batch, model))
        labelled = run(model, inputs)
        assert_equal(labelled, expected, what)
        num_labels = int((batch.labels != -100).sum())
        assert labelled[2] == max(1, num_labels) <= expected[2], what
        model.loss_function = chunked_loss
        assert_equal(run(model, inputs), expected, what)
        assert_equal(run(model, model_inputs(batch, model)), expected, what)
        model.loss_function = stock_loss


def test_columns_stand_in_for_a_mask_in_older_versions(qwen, monkeypatch):
    monkeypatch.setattr(labelled_logits, "_takes_masks", lambda: False)
    for what, batch in batches_of("qwen2_5_vl"):
        inputs = model_inputs(batch, qwen, logits="labelled")
        assert inputs["logits_to_keep"].ndim == 1
        assert_equal(run(qwen, inputs), run(qwen, model_inputs(batch, qwen)), what)


def test_losses_with_weights_are_those_of_each_token(qwen):
    plain = make_family_batch("qwen2_5_vl", (2, 0, 1), 1, NORMALIZER)
    per_sample = torch.rand(3)
    weights = per_sample.repeat_interleave(plain.cu_seqlens.diff().long())
    weighted = replace(plain, loss_weights=weights)
    rows = [make_one(plain, number) for number in range(3)]
    qwen.zero_grad()
    for row, weight in zip(rows, per_sample, strict=True):
        (qwen(**model_inputs(row, qwen)).loss * weight).backward()
    expected = {
        name: weight.grad.clone()
        for name, weight in qwen.named_parameters()
        if weight.grad is not None
    }
    for is_padded in (False, True):
        batch = replace(weighted, is_padded=is_padded)
        with pytest.raises(ConfigError, match="chunked_loss"):
            model_inputs(batch, qwen, logits="labelled")
        stock_loss, qwen.loss_function = qwen.loss_function, chunked_loss
        _, gradients, _ = run(qwen, model_inputs(batch, qwen, logits="labelled"))
        empty = make_family_batch("qwen2_5_vl", (), 1, NORMALIZER)
        empty = replace(empty, loss_weights=torch.zeros(0), is_padded=is_padded)
        assert run(qwen, model_inputs(empty, qwen, logits="labelled"))[0] == 0
        qwen.loss_function = stock_loss
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def make_one(batch, number):
    """Sample `number` of a micro-batch of Qwen's, alone."""
    start, end = batch.cu_seqlens[number : number + 2].tolist()
    pictures = batch.extras["pictures"]
    first = sum(len(item) for item in pictures[:number])
    images = slice(first, first + len(pictures[number]))
    rows = batch.pixel_values.split(batch.image_grid_thw.prod(1).tolist())[images]
    return replace(
        batch,
        sample_ids=batch.sample_ids[number : number + 1],
        input_ids=batch.input_ids[start:end],
        labels=batch.labels[start:end],
        position_ids=batch.position_ids[start:end],
        cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
        pixel_values=torch.cat([batch.pixel_values[:0], *rows]),
        patches_per_image=batch.patches_per_image[images],
        image_sizes=batch.image_sizes[images],
        image_grid_thw=batch.image_grid_thw[images],
    )


@pytest.mark.parametrize("name", sorted(TAKE_ALL))
def test_models_that_take_no_positions_compute_all_logits_and_one_line_says_so(name):
    model = make_family_model(name)
    batch = replace(make_family_batch(name, (1,), 0, NORMALIZER), is_padded=name in LINEAR)
    with pytest.warns(RuntimeWarning) as warned:
        inputs = model_inputs(batch, model, logits="labelled")
    (line,) = [str(item.message) for item in warned]
    assert line == (
        f"logits of all tokens are computed: {type(model).__name__} takes no logits_to_keep"
    )
    assert inputs.keys() == model_inputs(batch, model).keys()
    expected = run(model, inputs)
    model.loss_function = chunked_loss
    assert_equal(run(model, inputs), expected, name)


def test_every_known_family_was_looked_at():
    """The rest are other names of the same code, or another module's."""
    others = {"llava", "internvl", "qwen2_vl", "glm4v_moe", "glm46v"}
    assert KNOWN.keys() == FAMILIES.keys() | others
    kinds = ("Llava", "InternVL", "Qwen2VL", "Glm4vMoe", "Glm46V")
    for kind in kinds:
        model = getattr(transformers, f"{kind}ForConditionalGeneration")
        assert "logits_to_keep" in inspect.signature(model.forward).parameters, kind


def test_wrappers_are_looked_through(qwen):
    peft = pytest.importorskip("peft")
    batch = make_family_batch("qwen2_5_vl", (1, 0), 0, NORMALIZER)
    expected = model_inputs(batch, qwen, logits="labelled")
    model = make_family_model("qwen2_5_vl")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for wrapped in (torch.compile(qwen), lora):
        inputs = model_inputs(batch, wrapped, logits="labelled")
        assert torch.equal(inputs["logits_to_keep"], expected["logits_to_keep"])
    assert lora(**inputs).logits.shape[1] == len(expected["logits_to_keep"])
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    tuned = peft.get_peft_model(make_family_model("qwen2_5_vl"), prompts)
    assert "prompt learning" in labelled_logits.why_all_logits(tuned)


def test_wrong_calls_are_one_clear_line(qwen):
    batch = make_family_batch("qwen2_5_vl", (1,), 0, NORMALIZER)
    with pytest.raises(ConfigError, match="'some'; it must be 'all' or 'labelled'"):
        model_inputs(batch, qwen, logits="some")
    with pytest.raises(ConfigError, match="the model and not its config"):
        model_inputs(batch, qwen.config, logits="labelled")
    with pytest.raises(ConfigError, match=r"model\.loss_function"):
        model_inputs(batch, qwen, logits="labelled", with_labels=False)


def test_losses_of_other_signatures_get_all_logits(qwen):
    batch = make_family_batch("qwen2_5_vl", (1,), 0, NORMALIZER)
    stock_loss = qwen.loss_function
    qwen.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    with pytest.warns(RuntimeWarning, match="takes no shift_labels"):
        inputs = model_inputs(batch, qwen, logits="labelled")
    qwen.loss_function = stock_loss
    assert "logits_to_keep" not in inputs


# --- the loss alone ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("divisor", [None, 3, torch.tensor(5.0)])
def test_the_loss_is_that_of_transformers(dtype, is_shifted, divisor, monkeypatch):
    from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415

    monkeypatch.setattr(token_loss, "LOSS_CHUNK", 3 * 50)
    torch.manual_seed(0)
    source = torch.randn(2, 11, 50).to(dtype)
    labels = torch.randint(0, 50, (2, 11)).masked_fill_(torch.rand(2, 11) < 0.6, -100)
    labels[:, -1] = 4
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous() if is_shifted else None
    losses, gradients = [], []
    for loss in (ForCausalLMLoss, chunked_loss):
        logits = source.clone().requires_grad_()
        options = {"num_items_in_batch": divisor, "shift_labels": targets}
        value = loss(logits=logits, labels=labels, vocab_size=50, **options)
        (value * 2).backward()
        assert torch.equal(logits, source)  # may be looked at later
        losses.append(value)
        gradients.append(logits.grad)
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {}
    torch.testing.assert_close(gradients[1], gradients[0], **tolerance)


def test_rows_without_labels_do_not_matter_even_if_they_are_not_numbers():
    logits = torch.randn(4, 9)
    logits[1] = float("nan")
    logits.requires_grad_()
    targets = torch.tensor([3, -100, -100, 2])
    loss = chunked_loss(logits, None, shift_labels=targets)
    loss.backward()
    kept = torch.tensor([0, 3])
    expected = functional.cross_entropy(logits.detach()[kept], targets[kept])
    torch.testing.assert_close(loss.detach(), expected)
    assert not logits.grad[1:3].any()


def test_no_rows_and_wrong_shapes():
    logits = torch.zeros(0, 9, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    loss = chunked_loss(logits, None, num_items_in_batch=2, shift_labels=empty)
    loss.backward()
    assert loss == 0
    assert logits.grad.shape == (0, 9)
    with pytest.raises(ValueError, match="logits of 4 tokens and labels of 3"):
        chunked_loss(torch.zeros(4, 9), None, shift_labels=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="ignore_index is 0"):
        chunked_loss(torch.zeros(4, 9), torch.zeros(1, 4).long(), ignore_index=0)
    with pytest.raises(ValueError, match="need shift_labels"):
        chunked_loss(torch.zeros(4, 9), torch.zeros(1, 4), loss_weights=torch.ones(4))


def test_no_float32_copy_of_the_logits_lives(monkeypatch):
    rows, vocabulary = 400, 3000
    monkeypatch.setattr(token_loss, "LOSS_CHUNK", 10 * vocabulary)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(rows, vocabulary).to(dtype).requires_grad_()
        targets = torch.randint(0, vocabulary, (rows,))
        with LiveBytes() as memory:
            chunked_loss(logits, None, shift_labels=targets).backward()
        gradient = rows * vocabulary * dtype.itemsize
        assert gradient <= memory.peak_bytes < gradient + 4 * 10 * vocabulary * 4 + 200 * rows


def test_accelerates_mixed_precision_takes_positions():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()  # another test may have made it without bf16
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(make_family_model("qwen2_5_vl"))
    model.loss_function = chunked_loss
    batch = make_family_batch("qwen2_5_vl", (1, 0), 0, NORMALIZER)
    labelled = run(model, model_inputs(batch, model, logits="labelled"))
    whole = run(model, model_inputs(batch, model))
    assert labelled[2] < whole[2]
    assert labelled[0] == pytest.approx(whole[0], rel=1e-2)
    accelerate.state.AcceleratorState._reset_state()
