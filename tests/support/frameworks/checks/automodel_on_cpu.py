"""NeMo Automodel's recipe where there is no GPU.

Nothing of the recipe is replaced but the device that its model goes to.
"""

import sys
import types

import torch
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM

from isobatch.loaders.integrations.automodel import BalancedRecipe

CPU = torch.device("cpu")


class TorchOfCpu(types.ModuleType):
    """torch, with one device."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, *_):
        return CPU


def pretend_gpu():
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.current_device = lambda: CPU
    auto_model.torch = TorchOfCpu("torch")


def main():
    """Run the program of a file, or train by the YAML `--config` with our recipe."""
    pretend_gpu()
    if sys.argv[1].endswith(".py"):
        with open(sys.argv[1]) as program:
            sys.argv = sys.argv[:1]
            exec(program.read(), {"__name__": "__main__"})
        return
    recipe = BalancedRecipe(parse_args_and_load_config(sys.argv[1]))
    assert isinstance(recipe, FinetuneRecipeForVLM)
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
