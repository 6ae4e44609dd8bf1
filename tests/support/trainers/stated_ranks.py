"""What two ranks run for `test_pipeline_families` by a profile that states times: steps are alike
on any machine.
"""

import json
from pathlib import Path

from support.trainers.family_ranks import train

FIXED_NS = 50_000
"""Of a layer, for each micro-batch."""
TOKEN_NS = {"vision": 4_000, "llm": 2_000, "labels": 2_000}
"""Of a layer, for each token: with a vision encoder that is worth encoding ahead."""
BORDERS = "0,5,9"
"""Of InternVL: vision and projector, then the language model."""
TUNED = {"tuned": (), "frozen": ("--freeze=vision", "--encode=any")}


def state_times(measured: Path, stated: Path):
    """A profile with the micro-batches of another one, and times by these alone."""
    values = json.loads(measured.read_text())
    for kind in values["kinds"]:
        tokens = values["loads"][kind["phase"]]["tokens"]
        forward = [FIXED_NS + TOKEN_NS[kind["phase"]] * count for count in tokens]
        kind |= {"forward_ns": forward, "input_grad_ns": forward, "recompute_ns": forward}
        kind |= {"weight_grad_ns": [own // 2 for own in forward], "send_ns": [0] * len(forward)}
    stated.write_text(json.dumps(values))


def tune_by_stated(said, folder, build, profile):
    """`stated-NAME.jsonl` has the figures of each case."""
    for name, more in TUNED.items():
        given = (f"--borders={BORDERS}", "--micro-batches-per-step=3", f"--profile={profile}")
        said[name] = train(
            build,
            "--model=internvl",
            "--tune",
            *given,
            f"--figures={folder}/stated-{name}.jsonl",
            *more,
        )
