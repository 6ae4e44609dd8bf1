"""Code of Megatron-Bridge that needs no GPU on our batches; `test_megatron_bridge.py` runs it.

    python bridge_checks.py FILE

FILE has pairs of batches, as rows and as one padded row, with the multiple of the padding. The
package's `__init__` needs Transformer Engine, so files and one function are run by themselves.
"""

import ast
import importlib.util
import logging
import sys
from importlib.metadata import files
from pathlib import Path

import torch
from megatron.core.packed_seq_params import PackedSeqParams

ROW = "input_ids", "labels", "loss_mask", "position_ids"


def place(name):
    (found,) = (file for file in files("megatron-bridge") if str(file).endswith(name))
    return Path(found.locate())


def module(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, place(name))
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def function(name, wanted):
    tree = ast.parse(place(name).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == wanted]
    scope = {"torch": torch, "logger": logging.getLogger(wanted)}
    exec(compile(tree, name, "exec"), scope)
    return scope[wanted]


def same(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def main(file):
    pack = function("training/vlm_step.py", "pack_batch_sequences")
    params_of = module("training/utils/packed_seq_utils.py").get_packed_seq_params
    visual = module("training/utils/visual_inputs.py").Qwen2_5_VLVisualInputs
    for rows, row, multiple in torch.load(file):
        values = [rows[name] for name in (*ROW[:3], "attention_mask", "position_ids")]
        *packed, mask, positions, borders, longest = pack(*values, pad_to_multiple_of=multiple)
        assert mask is None
        for name, value in zip(ROW, (*packed, positions), strict=True):
            same(row[name], value)
        same(row["cu_seqlens_q_padded"], borders)
        same(row["max_seqlen_q"], longest)
        legacy = {"cu_seqlens": borders, "cu_seqlens_argmin": torch.tensor(len(borders))}
        legacy["cu_seqlens_unpadded"] = row["cu_seqlens_q"]
        legacy["cu_seqlens_unpadded_argmin"] = torch.tensor(len(borders))
        theirs = params_of(legacy | {"max_seqlen": longest})
        names = [name for name in row if name.startswith(("cu_seqlens", "max_seqlen"))]
        ours = PackedSeqParams(qkv_format="thd", **{name: row[name] for name in names})
        assert len(names) == 6
        for name in names:
            same(getattr(ours, name), getattr(theirs, name))
        for given in (rows["visual_inputs"], row["visual_inputs"]):
            arguments = visual(**given).normalized_for_model()
            assert arguments.keys() == given.keys()
            for name, value in given.items():
                same(arguments[name], value)


if __name__ == "__main__":
    main(sys.argv[1])
