"""Imported last by the process that ranks are forked from: what each would do again by itself."""

import gc

from isobatch.engine.simulator.program import make_program
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.engine.simulator.simulate import simulate
from support import compile_once
from support.costs.random_steps import constant_stages

compile_once.install()

# every pipeline simulates a step; a process takes half a second to load what numba compiled
simulate(make_program(make_schedule("1f1b", 2, 2), constant_stages(2, 2)))
# steps that run out of memory collect garbage: half a second each time, of all these modules
gc.collect()
gc.freeze()
