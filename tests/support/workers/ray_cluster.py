"""A Ray cluster of this machine, which builds of other processes join."""

import contextlib
import os
import subprocess
import sys

RUN_S = 600
"""For a build at most. Ray takes 10 s here, but minutes next to a few other processes that want the
cores.
"""
CLUSTER = """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
input()
"""


@contextlib.contextmanager
def ray_cluster():
    """Runs until the block ends; joined by every build in it, which so starts in a third of the
    time, and dies at work more often than while Ray starts.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Ray 2.60 asks those who join for a token, which it does not give them
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    starting = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(starting, env=environment, **pipes) as head:
        try:
            os.environ["RAY_ADDRESS"] = head.stdout.readline().strip()
            yield
        finally:
            del os.environ["RAY_ADDRESS"]
            head.communicate("\n", timeout=RUN_S)
