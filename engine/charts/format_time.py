"""Times in nanoseconds as text, for charts and tables. Pure."""

from itertools import count

UNITS = ((10**6, "ms"), (10**3, "us"))


def round_step(at_least: float) -> int:
    """The next of 1, 2, 5, 10, 20, ... nanoseconds.

    >>> [round_step(value) for value in (0.2, 1.5, 30, 501)]
    [1, 2, 50, 1000]
    """
    steps = (factor * int(10**power) for power in count() for factor in (1, 2, 5))
    return next(step for step in steps if step >= at_least)


def tick_text(time_ns: int, longest: int) -> str:
    """A time on an axis that ends at `longest`, so all in one unit.

    >>> tick_text(2_500_000_000, 9_000_000_000), tick_text(500, 20_000), tick_text(0, 20_000)
    ('2,500 ms', '0.5 us', '0')
    """
    size, unit = next(((size, unit) for size, unit in UNITS if longest >= 10 * size), (1, "ns"))
    return f"{time_ns / size:,.10g} {unit}" if time_ns else "0"


def time_text(time_ns: float) -> str:
    """A time for people, three digits or a bit more.

    >>> [time_text(value) for value in (0, 999, 1_500, 12_345_678, 1_234_567_890, 12_345_678_901)]
    ['0', '999 ns', '1.5 us', '12.3 ms', '1,235 ms', '12.35 s']
    """
    if time_ns >= 10**10:
        return f"{time_ns / 10**9:,.2f} s"
    for size, unit in UNITS:
        if time_ns >= size:
            value = time_ns / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{float(f'{value:.3g}'):g} {unit}"
    return f"{time_ns:g} ns" if time_ns else "0"


def span_text(start: int, end: int) -> str:
    """Begin, end and duration of something.

    >>> span_text(2_500_000, 4_000_000)
    '2.500 to 4.000 ms (1.5 ms)'
    """
    return f"{start / 1e6:,.3f} to {end / 1e6:,.3f} ms ({time_text(end - start)})"
