"""A program of its own: goes to a folder, sets variables, and runs a script or a module there.

in_folder.py FOLDER VARIABLES-AS-JSON SCRIPT-OR-MODULE [ARGUMENTS]
"""

import json
import os
import runpy
import sys

if __name__ == "__main__":  # not in a worker process, which loads this file too
    _, folder, variables, name, *_ = sys.argv
    os.chdir(folder)
    os.environ |= json.loads(variables)
    sys.argv = sys.argv[3:]
    if name.endswith(".py"):
        sys.path.insert(0, folder)
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
