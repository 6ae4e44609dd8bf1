"""Work ahead: in order whatever finishes first, bounded, errors at their place, and no thread left
behind.
"""

import gc
import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.loaders.prefetch import STEPS_PER_WORKER, Prefetcher, PrefetchTask

WAIT_S = 20.0


def works(steps, num_bytes=1, *, is_quick=False):
    """Steps of callables, numbered."""
    return iter(
        [
            PrefetchTask(subject=number, parts=parts, num_bytes=num_bytes, is_quick=is_quick)
            for number, parts in enumerate(steps)
        ]
    )


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("isobatch-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert not threads()


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 4), max_size=30),
    workers=st.integers(0, 4),
    max_bytes=st.integers(0, 50),
    num_bytes=st.integers(0, 20),
)
def test_all_steps_come_in_order_with_their_results_in_order(counts, workers, max_bytes, num_bytes):
    steps = [
        [lambda value=(step, part): value for part in range(count)]
        for step, count in enumerate(counts)
    ]
    got = list(Prefetcher(works(steps, num_bytes), workers=workers, max_bytes=max_bytes))
    assert got == [
        (step, [(step, part) for part in range(count)]) for step, count in enumerate(counts)
    ]


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30),
    workers=st.integers(0, 4),
    max_bytes=st.integers(0, 5),
)
def test_quick_steps_are_made_by_the_consumer_and_others_by_threads(kinds, workers, max_bytes):
    tasks = [
        PrefetchTask(step, [threading.current_thread] * count, num_bytes=1, is_quick=is_quick)
        for step, (count, is_quick) in enumerate(kinds)
    ]
    got = list(Prefetcher(iter(tasks), workers=workers, max_bytes=max_bytes))
    assert [step for step, _ in got] == [*range(len(kinds))]
    for (_, makers), (count, is_quick) in zip(got, kinds, strict=True):
        own = [maker is threading.current_thread() for maker in makers]
        assert own == [is_quick or not workers] * count


def test_nothing_is_planned_ahead_of_quick_steps():
    planned = []

    def planning():
        for step in range(50):
            planned.append(step)
            yield PrefetchTask(step, [lambda: len(planned)], 1, is_quick=True)

    prefetcher = Prefetcher(planning(), workers=3, max_bytes=99)
    assert list(prefetcher) == [(step, [step + 1]) for step in range(50)]


def test_order_is_kept_when_later_steps_finish_first():
    done = [threading.Event() for _ in range(3)]

    def finish(step):
        if step < 2:
            assert done[step + 1].wait(WAIT_S)
        done[step].set()
        return step

    steps = [[lambda step=step: finish(step)] for step in range(3)]
    assert [results for _, results in Prefetcher(works(steps), workers=3, max_bytes=99)] == [
        [0],
        [1],
        [2],
    ]


def test_parts_of_one_step_run_at_the_same_time():
    barrier = threading.Barrier(2)
    (step,) = Prefetcher(works([[lambda: barrier.wait(WAIT_S)] * 2]), workers=2, max_bytes=0)
    assert sorted(step[1]) == [0, 1]


def test_the_first_step_does_not_wait_for_others():
    given = threading.Event()
    steps = [[lambda: 0], *([lambda: given.wait(WAIT_S)] for _ in range(6))]
    prefetcher = Prefetcher(works(steps), workers=2, max_bytes=99)
    assert next(prefetcher) == (0, [0])
    assert not given.is_set()
    given.set()
    assert [results for _, results in prefetcher] == [[True]] * 6


@pytest.mark.parametrize(
    ("num_bytes", "max_bytes", "most"), [(10, 35, 3), (10, 5, 1), (0, 0, 2 * STEPS_PER_WORKER)]
)
def test_no_more_is_made_ahead_than_allowed_but_always_one_step(num_bytes, max_bytes, most):
    lock, begun, taken, ahead = threading.Lock(), 0, 0, []

    def begin():
        nonlocal begun
        with lock:
            begun += 1
            ahead.append(begun - taken)

    prefetcher = Prefetcher(works([[begin]] * 40, num_bytes), workers=2, max_bytes=max_bytes)
    while True:
        with lock:
            taken += (
                1  # before the step leaves: counted so, what is ahead can only be too small by one
            )
        try:
            next(prefetcher)
        except StopIteration:
            break
    assert begun == 40
    assert max(ahead) <= most


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_where_its_step_was_due_and_ends_the_work(workers, is_quick):
    steps = [[lambda: 1], [lambda: 2, lambda: int("x"), lambda: 1 // 0], [lambda: 3]]
    tasks = works(steps, is_quick=is_quick)
    prefetcher = Prefetcher(tasks, workers=workers, max_bytes=99)
    assert next(prefetcher) == (0, [1])
    with pytest.raises(ValueError, match="'x'"):
        next(prefetcher)
    assert not threads()
    assert list(prefetcher) == []


def test_an_error_does_not_wait_for_the_parts_behind_it():
    woken, waited = threading.Event(), []
    steps = [[lambda: 1 // 0, lambda: waited.append(woken.wait(WAIT_S))]]
    prefetcher = Prefetcher(works(steps), workers=2, max_bytes=99, cancel=woken.set)
    with pytest.raises(ZeroDivisionError):
        next(prefetcher)
    assert waited in ([], [True])  # it was woken, or never begun


def test_of_several_errors_the_first_parts_is_raised_whoever_is_faster():
    failed = threading.Event()

    def second():
        failed.set()
        raise KeyError("second")

    steps = [[lambda: failed.wait(WAIT_S) and int("first"), second]]
    with pytest.raises(ValueError, match="first"):
        next(Prefetcher(works(steps), workers=2, max_bytes=99))


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_planning_comes_behind_the_steps_before_it(workers, is_quick):
    def planning():
        yield PrefetchTask(subject=0, parts=[lambda: 1], num_bytes=1, is_quick=is_quick)
        raise ValueError("no plan")

    prefetcher = Prefetcher(planning(), workers=workers, max_bytes=99)
    assert next(prefetcher) == (0, [1])
    with pytest.raises(ValueError, match="no plan"):
        next(prefetcher)


def test_without_workers_everything_runs_in_the_callers_thread_when_asked_for():
    ran = []
    prefetcher = Prefetcher(
        works([[lambda: ran.append(threading.current_thread())]] * 3), workers=0, max_bytes=99
    )
    assert ran == []
    next(prefetcher)
    assert ran == [threading.current_thread()]


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("how", ["close", "forget", "twice"])
def test_threads_end_while_they_wait_for_room_or_the_consumer(how, is_quick):
    started = threading.Semaphore(0)
    tasks = works([[started.release]] * 99, num_bytes=10, is_quick=is_quick)
    prefetcher = Prefetcher(tasks, workers=3, max_bytes=10)
    if is_quick:
        next(prefetcher)
    assert started.acquire(timeout=WAIT_S)
    assert threads()
    if how != "forget":
        prefetcher.close()
    if how == "twice":
        prefetcher.close()
    del prefetcher
    gc.collect()
    assert not threads()


def test_a_forked_copy_refuses_and_its_parent_goes_on():
    prefetcher = Prefetcher(
        works([[lambda step=step: step] for step in range(5)]), workers=2, max_bytes=99
    )
    assert next(prefetcher) == (0, [0])
    child = os.fork()
    if child == 0:
        try:
            next(prefetcher)
        except RuntimeError:
            prefetcher.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [results for _, results in prefetcher] == [[1], [2], [3], [4]]


def test_closing_wakes_a_part_that_asks_only_after_the_first_call_of_cancel():
    begun, asked, woken = threading.Event(), threading.Event(), threading.Event()

    def part():
        begun.set()
        assert asked.wait(60)
        woken.clear()  # a request of its own, which an earlier cancelling does not reach
        assert woken.wait(60)

    def cancel():
        woken.set()
        asked.set()

    tasks = iter([PrefetchTask(0, [part], 1)])
    prefetcher = Prefetcher(tasks, workers=1, max_bytes=99, cancel=cancel)
    assert begun.wait(60)
    started = time.monotonic()
    prefetcher.close()
    assert time.monotonic() - started < 50
