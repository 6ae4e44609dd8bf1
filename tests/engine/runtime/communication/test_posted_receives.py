"""Receives as a GPU gets them, over gloo: posted one pass ahead where that is safe, else when they
are needed; gradients are those of one process.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from isobatch.engine.runtime.communication import p2p
from isobatch.engine.runtime.communication.p2p import P2PQueue
from isobatch.engine.runtime.stage_executor import StageExecutor
from support.rank_programs.rank_cases import Case, run_case
from support.ranks import on_ranks

CASES = [
    Case(name="1f1b", pp=2),
    Case(name="gpipe", pp=2, schedule="gpipe", reorder=True),
    Case(name="zero bubble, some recomputed", pp=2, schedule="zero_bubble", recompute="some"),
    Case(name="interleaved", pp=2, schedule="interleaved", stages_per_rank=3),
    Case(name="both", pp=2, schedule="interleaved_zero_bubble", stages_per_rank=2),
]


class Watched:
    """What a rank posts and runs, in order."""

    def __init__(self):
        self.posted, self.ahead = set(), 0

    def patches(self):
        post, compute = P2PQueue._post, StageExecutor._compute

        def noted_post(queue, sender):
            message = queue._inboxes[sender].waiting[0]
            post(queue, sender)
            self.posted.add(message)

        def checked_compute(executor, action, inputs):
            schedule, rank = executor._schedule, executor._groups.rank
            place = schedule.rank_offsets[rank] + schedule.of_rank(rank).index(action)
            routes = executor._p2p
            needed = [m for m, other in routes.incoming.get(place, ()) if other != rank]
            early = [message for message, _ in routes.ahead.get(place, ())]
            assert self.posted >= {*needed, *early}
            later = [m for m, other in routes.incoming.get(place + 1, ()) if other != rank]
            if schedule.num_stages == schedule.num_ranks:
                # one stage per rank: nothing is posted that is not to be
                assert not self.posted & ({*later} - {*early})
            self.ahead += len(early)
            if place == schedule.rank_offsets[rank + 1] - 1:
                self.posted.clear()
            return compute(executor, action, inputs)

        return (
            mock.patch.object(p2p, "is_cuda", return_value=True),
            mock.patch.object(P2PQueue, "_post", noted_post),
            mock.patch.object(StageExecutor, "_compute", checked_compute),
        )


def watch(case):
    watched = Watched()
    on_gpu, post, compute = watched.patches()
    with on_gpu, post, compute:
        run_case(case)
    ahead = torch.tensor(watched.ahead)
    dist.all_reduce(ahead)
    assert ahead > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_receives_are_posted_one_pass_ahead_and_gradients_are_those_of_one_process(tmp_path, case):
    on_ranks(2, str(tmp_path), watch, case)
