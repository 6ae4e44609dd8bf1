"""`python -m engine`, called as people call it."""

import json
import re
import sys

import pytest

from isobatch.engine.cli import main
from isobatch.engine.planning.plan import read_plan
from support import ROOT
from support.cases import for_each

EQUAL = (
    "--model",
    "internvl_1_5",
    "--images",
    "9",
    "--seq-len",
    "4096",
    "--tp",
    "4",
    "--cluster",
    "a100_80g",
)


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command; -> (exit status, output, errors)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["engine", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as left:
            status = left.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_a_build_is_planned_and_its_files_are_written(call, demo_build, tmp_path):
    out = tmp_path / "out"
    status, shown, errors = call(
        "plan", demo_build, "--pp", 2, "--micro-batches", 4, "--steps", 2, "--out", out
    )
    assert (status, errors) == (0, "")
    assert sorted(path.name for path in out.iterdir()) == ["plan.json", "trace.json"]
    plan = read_plan(out / "plan.json")
    assert (plan.model.name, plan.num_steps, plan.num_micro_batches) == ("tiny", 2, 4)
    for words in (
        "tiny on h100: 2 GPUs = tp 1 x pp 2 x dp 1",
        "random samples",
        "the plan",
        "waiting",
        "critical path",
    ):
        assert words in shown
    stages = [line for line in shown.splitlines() if re.match(r"\d +\w", line)]
    assert len(stages) == 2


def test_logits_are_planned_where_there_are_labels(call, demo_build, tmp_path):
    plans = {}
    for choice in ("labelled", "all"):
        out = tmp_path / choice
        arguments = ("--pp", 2, "--micro-batches", 4, "--steps", 2, "--logits", choice)
        status, shown, _ = call("plan", demo_build, *arguments, "--out", out)
        assert status == 0
        (line,) = (line for line in shown.splitlines() if line.startswith("logits are planned"))
        plans[choice] = read_plan(out / "plan.json")
        labels, tokens = plans[choice].loads.labels.tokens, plans[choice].loads.llm.tokens
        assert f"{labels.sum() / tokens.sum():.1%} of the tokens" in line
        assert ("as if each had a label" in line) == (choice == "all")
    labels = {name: plan.loads.labels.tokens.sum() for name, plan in plans.items()}
    assert 0 < labels["labelled"] < labels["all"] / 2
    labelled, whole = (plan.predicted.full_peak_bytes[-1] for plan in plans.values())
    assert labelled < whole


def test_simulating_a_plan_again_says_the_same(call, demo_build, tmp_path):
    call(
        "plan",
        demo_build,
        "--pp",
        2,
        "--dp",
        2,
        "--micro-batches",
        4,
        "--steps",
        2,
        "--out",
        tmp_path,
    )
    status, shown, _ = call(
        "simulate", tmp_path / "plan.json", "--json", "--out", tmp_path / "again"
    )
    assert status == 0
    assert json.loads(shown)["plan"] == json.loads((tmp_path / "plan.json").read_text())
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["trace.json"]
    status, shown, _ = call("simulate", tmp_path / "plan.json")
    assert status == 0
    assert re.search(r"a step takes ([\d.]+) ms; planned for \1 ms", shown)


def test_the_help_of_simulate_has_the_plans_values_for_defaults(call):
    _, shown, _ = call("simulate", "--help")
    assert "best" not in shown
    assert shown.count("plan's") == 4
    assert not re.search("Default: (1f1b|16|h100)", " ".join(shown.split()))


def test_other_schedules_and_micro_batches_can_be_tried(call, tmp_path):
    call("plan", *EQUAL, "--micro-batches", 16, "--out", tmp_path)
    times = {}
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        status, shown, _ = call(
            "simulate", tmp_path / "plan.json", "--schedule", schedule, "--json"
        )
        assert status == 0
        times[schedule] = json.loads(shown)["run"]["step_ns"]
    assert times["zero_bubble"] < times["1f1b"]
    status, shown, _ = call("simulate", tmp_path / "plan.json", "--micro-batches", 8, "--json")
    halves = json.loads(shown)["plan"]
    assert halves["predicted"]["step_ns"] < times["1f1b"]
    assert len(halves["inputs"]["loads"]["llm"]["tokens"]) == 16  # two steps of them
    status, _, errors = call("simulate", tmp_path / "plan.json", "--micro-batches", 17)
    assert (status, errors.strip()) == (
        2,
        "error: the plan has 16 micro-batches per replica, not 17; plan with more --steps",
    )
    status, shown, _ = call("simulate", tmp_path / "plan.json", "--memory-gib", 10)
    assert status == 0
    assert "does not fit: rank " in shown
    status, shown, _ = call("simulate", tmp_path / "plan.json", "--micro-batches", 8)
    assert re.match(
        r"a step takes [\d.,]+ ms; planned for [\d.,]+ ms with 16 micro-batches instead of 8\n",
        shown,
    )
    status, _, errors = call("simulate", tmp_path / "plan.json", "--memory-gib", "nan")
    assert (status, errors.count("\n")) == (2, 1)


def test_json_holds_the_plan_and_what_it_is_compared_with(call):
    status, shown, _ = call("plan", *EQUAL, "--json")
    assert status == 0
    values = json.loads(shown)
    assert [run["step_ns"] for run in values["runs"]][-1] == values["plan"]["predicted"]["step_ns"]
    assert len(values["runs"]) == 3  # no data, so no random samples
    assert 0 <= values["plan"]["gap"] < 0.1


def test_without_time_the_best_start_is_printed_with_its_gap(call, tmp_path):
    status, shown, errors = call("plan", *EQUAL, "--time-limit", 0, "--out", tmp_path)
    assert (status, errors) == (0, "")
    gap = read_plan(tmp_path / "plan.json").gap
    assert 0 < gap < 0.5
    assert "note: tp 4 does not divide the 25 heads of the vision encoder" in shown
    found = f"another one may be faster for the searched step, by at most {gap:.2%}"
    assert found in shown


def test_a_file_gives_what_options_do_not(call, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        'model = "internvl_1_5"\nimages = 9\nseq_len = 4096\ntp = 4\ncluster = "a100_80g"\n'
        'frozen = ["llm"]\npp = 4\n'
    )
    _, shown, _ = call("plan", "--config", file, "--pp", 2, "--json")
    inputs = json.loads(shown)["plan"]["inputs"]
    assert (inputs["parallel"]["pp"], inputs["parallel"]["tp"]) == (2, 4)
    assert inputs["training"]["llm"] is False
    file.write_text("speed = 3\n")
    status, _, errors = call("plan", "--config", file)
    assert status == 2
    assert "unknown key speed; known: " in errors
    file.write_text("speed = \n")
    assert call("plan", "--config", file)[0] == 2


def test_a_models_folder_is_planned_like_the_preset_of_its_sizes(call, tmp_path):
    """LLaVA-1.5's own files say little: transformers' defaults are its sizes."""
    files = {
        "config.json": {"model_type": "llava", "text_config": {"max_position_embeddings": 4096}},
        "preprocessor_config.json": {"size": 336, "crop_size": 336},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    made_up = ("--images", "2", "--seq-len", "2048", "--json")
    found, shown, errors = call("plan", "--model", tmp_path, *made_up)
    assert (found, errors) == (0, "")
    plan = json.loads(shown)["plan"]
    # 24 layers of the encoder, of which the preset leaves out the last, that nothing looks at
    assert plan["borders"][-1] == 24 + 32 + 4
    (tmp_path / "preprocessor_config.json").write_text('{"crop_pct": 1}')
    found, shown, errors = call("plan", "--model", tmp_path, *made_up)
    assert (found, shown) == (2, "")
    assert "crop_pct" in errors


@for_each(
    ("arguments", "status", "message"),
    [
        (("plan",), 2, "give a packed build, or --model with --images and --seq-len"),
        (
            ("plan", "nowhere"),
            1,
            "nowhere: no such folder; give the output folder of `packer build`",
        ),
        (
            ("plan", "nowhere", "--out", __file__),
            2,
            "this is a file; give a folder",
        ),
        (
            ("plan", "nowhere", "--model", "tiny"),
            2,
            "a build has its own model; leave that out",
        ),
        (
            ("plan", *EQUAL, "--schedule", "2f2b"),
            2,
            "schedule is '2f2b'; use one of 1f1b, gpipe, zero_bubble, interleaved, "
            "interleaved_zero_bubble",
        ),
        (
            ("plan", *EQUAL, "--cluster", "abacus"),
            2,
            "no cluster preset 'abacus'; shipped: a100_80g",
        ),
        (("plan", *EQUAL, "--memory-gib", "1"), 1, "GiB too little"),
        (
            ("plan", *EQUAL, "--frozen", "wheels"),
            2,
            "frozen names wheels; parts are audio, vision, projector, llm",
        ),
        (
            ("plan", *EQUAL, "--frozen", "vision", "--frozen", "projector", "--frozen", "llm"),
            2,
            "everything is frozen: there is nothing to train",
        ),
        (
            ("plan", *EQUAL, "--stages-per-rank", "2"),
            2,
            "1f1b runs one stage per rank, not 2; use schedule 'interleaved'",
        ),
        (("plan", *EQUAL, "--pp", "98"), 2, "98 stages of 97 layers; give 1 to 97"),
        (("plan", *EQUAL, "--speed", "3"), 2, "No such option: --speed"),
        (
            ("simulate", "nothing.json"),
            1,
            "nothing.json: No such file or directory; give the plan.json",
        ),
        (
            ("plan", "--model", "qwen2_vl", "--images", "1", "--seq-len", "9"),
            2,
            "takes images of any size",
        ),
        (
            ("plan", *EQUAL, "--memory-gib", "nan"),
            2,
            "memory_gib is nan; give more than 0 and at most 1,048,576",
        ),
        (("plan", *EQUAL, "--time-limit", "nan"), 2, "--time-limit"),
        (("plan", *EQUAL, "--memory-gib", "inf"), 2, "memory_gib is inf; give more than 0"),
        (("plan", *EQUAL, "--memory-gib", "-1"), 2, "memory_gib is -1.0; give more than 0"),
        (
            ("plan", *EQUAL, "--images", "17"),
            2,
            "17 image patches are 4,352 LLM tokens, --seq-len is 4,096; give fewer",
        ),
        (("plan", *EQUAL, "--images", str(10**22)), 2, "give at most 100,000,000"),
        (("plan", *EQUAL, "--seq-len", str(10**11)), 2, "give at most 100,000,000"),
        (("plan", *EQUAL, "--samples", "4097"), 2, "4097 samples cannot share 4096 tokens"),
        (("plan", *EQUAL, "--batch-size", "3"), 2, "batch_size is of random samples of a build"),
        (
            ("plan", *EQUAL, "--tp", "3"),
            2,
            "tp is 3, but a node of a100_80g has 8 GPUs: give a divisor or a multiple of 8",
        ),
        (
            ("plan", *EQUAL, "--tp", "32"),
            2,
            "the LLM of internvl_1_5 has 48 query and 8 key heads, and no trainer splits a head",
        ),
        (
            ("plan", "nowhere", "--samples", "2"),
            2,
            "a build has its own samples; leave that out",
        ),
        (
            ("plan", "s3://bucket/packed"),
            2,
            "s3://bucket/packed: planning reads a folder; copy the build's manifest",
        ),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    call, arguments, status, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    found, shown, errors = call(*arguments)
    assert (found, shown) == (status, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


def test_help_teaches(call):
    status, shown, _ = call()
    assert status == 0
    assert "Try it: python -m engine plan" in shown
    _, shown, _ = call("plan", "--help")
    assert "Folder of a build" in shown
    assert "packer models" in shown


def test_the_memory_of_llava_is_that_of_the_docs_which_is_by_hand(call):
    """Rank 0: patch embedding, 23 vision layers, projector, token embedding, 15 LLM layers."""
    shape = ("--images", 2, "--seq-len", 2048, "--pp", 2, "--dp", 8)
    status, shown, _ = call("plan", "--model", "llava_1_5", *shape)
    assert status == 0
    vision = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
    llm = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    projector = 1024 * 4096 + 4096**2 + 1024
    params = 588 * 1024 + 23 * vision + projector + 32_000 * 4096 + 15 * llm
    held = 2 * 588 * 1152 + 23 * 40 * 1024 * 1154 + (4 * 1024 + 4 * 4096) * 1152
    held += 15 * (24 * 4096 + 8 * 11008) * 2048
    # two micro-batches in flight, the last layer's turn, an output and a gradient on their way
    activations = 2 * held + (4 * 4096 + 4 * 11008) * 2048 + 2 * 2048 * 4096 * 2
    terms = [size / 2**30 for size in (2 * params, 4 * params, 12 * params / 8, activations)]
    expected = (
        "memory of rank 0 if all are full: weights {:.2f} + gradients {:.2f} + optimizer {:.2f}"
        " + activations {:.2f} = {:.2f} GiB"
    ).format(*terms, sum(terms))
    assert expected in shown
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    assert expected in " ".join(page.split())


def test_the_best_schedule_is_the_fastest_of_the_plans_for_each(call, demo_build):
    options = "--pp", 2, "--micro-batches", 6, "--steps", 2, "--json"
    status, shown, _ = call("plan", demo_build, *options, "--schedule", "best")
    assert status == 0
    report = json.loads(shown)
    found = {
        (each["schedule"], each["stages_per_rank"]): each["step_ns"] for each in report["schedules"]
    }
    assert {name for name, _ in found} == {
        "1f1b",
        "zero_bubble",
        "interleaved",
        "interleaved_zero_bubble",
    }
    assert report["runs"][-1]["step_ns"] == min(found.values())
    for (name, per_rank), step_ns in found.items():
        _, shown, _ = call(
            "plan", demo_build, *options, "--schedule", name, "--stages-per-rank", per_rank
        )
        assert json.loads(shown)["runs"][-1]["step_ns"] == step_ns, name
    shown = call("plan", demo_build, *options, "--schedule", "interleaved")[1]
    assert json.loads(shown)["runs"][-1]["step_ns"] == found["interleaved", 2]
    shown = call("plan", demo_build, *options[:-1], "--schedule", "best")[1]
    assert "stages per rank" in shown
    status, _, error = call("plan", demo_build, "--schedule", "best", "--stages-per-rank", 2)
    assert status == 2
    assert "leave that out" in error
    tight = call("plan", *EQUAL, "--pp", 2, "--schedule", "best", "--memory-gib", 1)
    assert tight[0] == 1
    assert len(tight[2].splitlines()) == 1


def test_the_page_shows_what_a_plan_for_a_trainer_prints(call, tmp_path):
    page = (ROOT / "docs" / "plan.md").read_text("utf-8").partition("## For another trainer\n")[2]
    command = re.search(r"```bash\npython -m engine (.*?)```", page, re.DOTALL)[1]
    expected = re.search(
        r"```\n(.*?)```", page.partition("```bash")[2].partition("```")[2], re.DOTALL
    )[1]
    words = command.replace("\\\n", " ").replace("plan/", str(tmp_path)).split()
    status, shown, errors = call(*words)
    assert (status, errors) == (0, "")
    restriction, settings = expected.split("\n\n")
    assert " ".join(restriction.split()) in " ".join(shown.split())
    assert shown.endswith(settings)
    assert (tmp_path / "megatron.sh").read_text() == settings
    plan = read_plan(tmp_path / "plan.json")
    assert plan.borders[1] > plan.layer_names.index("token_embedding")
    status, shown, _ = call(*words, "--json")
    report = json.loads(shown)
    assert report["settings"] == settings
    assert report["free"]["step_ns"] < report["runs"][-1]["step_ns"]
    assert report["plan"]["borders"] == list(plan.borders)


def test_what_a_trainer_lacks_is_an_error_of_one_line(call, tmp_path):
    (tmp_path / "plan.toml").write_text('trainer = "deepspeed"\n')
    cases = {
        ("--for", "deepspeed"): "is not one of 'megatron', 'torchtitan', 'automodel'",
        ("--config", tmp_path / "plan.toml"): "should be one of megatron, torchtitan, automodel",
        ("--for", "megatron", "--schedule", "zero_bubble"): "1f1b, interleaved, not zero_bubble",
        ("--for", "torchtitan"): "TorchTitan 0.3.0 has no pipeline for internvl_1_5",
    }
    for options, words in cases.items():
        status, shown, errors = call("plan", *EQUAL, *options)
        assert (status, shown, errors.count("\n")) == (2, "", 1)
        assert words in errors
