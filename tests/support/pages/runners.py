"""Which tests run which blocks of README and docs."""

RUN_BY_MARK = {
    "as in README.md": "tests/docs/test_blocks.py",
    "demo": ".ci/run",
    "tests": ".ci/run",
    "file": "tests/support/pages/tutorial.py",
    "status": "tests/support/pages/tutorial.py",
    "loop": "tests/loaders/integrations/test_user_loops.py",
    "runs in": "tests/loaders/integrations/test_other_trainers.py",
    "program: references": "tests/loaders/rebalancing/test_page.py",
    "program: encoder": "tests/loaders/rebalancing/test_page.py",
    "program: rollouts": "tests/loaders/rebalancing/test_page.py",
    "program: energon": "tests/support/frameworks/checks/energon_checks.py",
    "program: torchtitan": "tests/support/frameworks/checks/torchtitan_checks.py",
    "program: automodel": "tests/support/frameworks/checks/automodel_checks.py",
    "program: veomni": "tests/support/frameworks/veomni/ranks.py",
    "program: deepspeed": "tests/support/frameworks/deepspeed_ranks.py",
    "program: megatron_bridge": "tests/loaders/trainers/test_megatron_bridge.py",
    "settings: fine-tuning": "tests/engine/train/test_fine_tuning.py",
    "machines": "tests/engine/train/test_machines.py",
    "settings: automodel": "tests/support/frameworks/checks/automodel_checks.py",
}
"""Mark above a block -> what runs it."""
RUN_BY_PAGE = {
    "docs/load/trainers/deepspeed.md": "tests/support/frameworks/deepspeed_ranks.py",
    "docs/load/trainers/veomni.md": "tests/support/frameworks/veomni/checks.py",
    "docs/many_machines.md": "tests/packer/partitions/test_page.py",
    "docs/tutorials/coming_from.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/from_a_bucket.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/pack.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/pipeline.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/three_lines.md": "tests/docs/test_tutorials.py",
}
"""Page whose blocks without a mark are run -> what runs them."""
PAGE_COMMANDS = (
    ("README.md", "packer build --dataset annotations.json"),
    ("docs/pack.md", "packer build --dataset annotations.json"),
    ("docs/is_it_for_you.md", "packer build --dataset annotations.json"),
    ("docs/changing.md", "packer add"),
    ("docs/pack.md", "packer report packed/ --gpu"),
    ("docs/install.md", "packer build"),
    ("docs/plan.md", "python -m engine plan packed/"),
    ("docs/plan.md", "python -m engine plan --model internvit_6b_yi_34b --images"),
)
"""Page, how its block begins; in the order in which one folder serves them all."""
PAGE_PROGRAMS = (
    ("docs/load/without_a_build.md", "from datasets"),
    ("docs/load/quick_start.md", "from isobatch import BalancedLoader"),
    ("docs/load/quick_start.md", "from isobatch import StreamingLoader"),
    ("docs/load/models.md", "from isobatch"),
    ("docs/load/loss.md", "from isobatch import chunked_loss"),
    ("docs/load/options.md", "loader ="),
    ("docs/load/options.md", "def augment"),
    ("docs/load/evaluation_and_mixing.md", "train ="),
    ("docs/load/evaluation_and_mixing.md", "loader ="),
    ("docs/load/packed.md", "from isobatch import BalancedLoader"),
    ("docs/load/packed.md", "from isobatch.balance"),
)
"""The same of Python, in one namespace."""
PAGE_FRAGMENTS = (
    ("docs/load/loss.md", "from isobatch import shift_labels"),
    ("docs/load/metrics.md", "loader ="),
    ("docs/load/metrics.md", "for step in loader"),
    ("docs/load/own_samples.md", "from isobatch"),
    ("docs/load/own_samples.md", "loader ="),
    ("docs/load/packed.md", "from isobatch.loaders.batch.context_shards"),
    ("docs/load/packed.md", "from isobatch.loaders.batch.context_images"),
    ("docs/load/trainers/hf_trainer.md", "from isobatch"),
    ("docs/load/trainers/hf_trainer.md", "BalancedTrainer("),
    (
        "docs/load/without_a_build.md",
        "BalancedTrainer(\n    model=model, args=args, train_dataset=dataset, ",
    ),
    (
        "docs/load/without_a_build.md",
        "BalancedTrainer(\n    model=model,\n",
    ),
    ("docs/load/trainers/trl.md", "from isobatch"),
    ("docs/load/trainers/lightning.md", "steps ="),
    ("docs/load/trainers/dataloader.md", "from isobatch"),
    ("docs/load/evaluation_and_mixing.md", "documents ="),
    ("docs/load/options.md", "weights ="),
    ("docs/plan.md", "from isobatch.engine import read_plan"),
    ("docs/train.md", "model = AutoModel"),
    ("docs/pack.md", "def function"),
)
"""Parts of programs: `tests/docs/test_fragments.py` says what stands for their names."""
PAGE_FILES = (
    ("docs/pack.md", "# mix.toml"),
    ("docs/reference/input_formats.md", "[[datasets]]"),
)
"""Descriptions of datasets, which `tests/docs/test_fragments.py` packs."""
BUCKET_FRAGMENTS = (
    ("docs/load/from_a_bucket.md", "loader ="),
    ("docs/load/evaluation_and_mixing.md", "urls ="),
)
"""Parts of programs that read a bucket."""
MEASURED = "tests/engine/train/test_measure.py"
RUN_ON_TWO = "torchrun --nproc-per-node 2 -m engine"
OTHERS = {
    ("docs/load/quick_start.md", "packer build"): ".ci/run",
    ("docs/plan.md", "torchrun --nproc-per-node 2 -m engine measure"): MEASURED,
    (
        "docs/train.md",
        f"{RUN_ON_TWO} train packed --plan plan/plan.json \\\n    --recompute",
    ): MEASURED,
    ("docs/train.md", f"{RUN_ON_TWO} train packed --plan measured/plan.json"): MEASURED,
    ("docs/pack.md", "# mix.yaml"): "tests/packer/sources/trainers/test_metadataset.py",
}
"""Page, how its block begins -> what runs it."""
