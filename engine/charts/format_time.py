"""Times in nanoseconds as text, for tables. Pure."""

UNITS = ((10**6, "ms"), (10**3, "us"))


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
