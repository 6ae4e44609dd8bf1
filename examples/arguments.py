"""The command line that the training examples share."""

import argparse
import os


def parse(description, argv=None):
    """Arguments BUILD, OUT and options; `description` is an example's docstring."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("out", nargs="?", help="where to save, and to resume from if it exists")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--micro-batches-per-step", type=int, default=2)
    args = parser.parse_args(argv)
    is_folder = "://" not in args.build
    if is_folder and not os.path.isfile(os.path.join(args.build, "manifest.json")):
        parser.error(f"no finished build in {args.build}; give the output of `packer build`")
    return args
