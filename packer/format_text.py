"""Sizes, times, shares and numbers of things as text."""


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit that they fill.

    >>> size_text(512), size_text(20_480), size_text(3_500_000)
    ('512 B', '20.0 KiB', '3.3 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes} B"


def seconds_text(seconds: float) -> str:
    """A time in its two largest units.

    >>> seconds_text(0.34), seconds_text(75), seconds_text(7325)
    ('0.3 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def share_text(value: float) -> str:
    """A share with as many digits as say something.

    >>> share_text(0), share_text(0.0056), share_text(0.503)
    ('0%', '0.56%', '50.3%')
    """
    if value == 0:
        return "0%"
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2%}"


def counted(number: int, plural: str) -> str:
    """A number of things, of which one has its own form.

    >>> counted(1, "image patches"), counted(1, "steps"), counted(2_000, "steps")
    ('1 image patch', '1 step', '2,000 steps')
    """
    one = plural.removesuffix("es" if plural.endswith("ches") else "s")
    return f"{number:,} {one if number == 1 else plural}"


def capitalised(text: str) -> str:
    """The text with its first letter in upper case, the rest as it is.

    >>> capitalised("as ViT tokens")
    'As ViT tokens'
    """
    return text[:1].upper() + text[1:]
