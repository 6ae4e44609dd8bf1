"""Whole numbers in English words, as SmolVLM's text has them. Pure."""

MOST_WORDS = 999
"""Largest number that has words here."""

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_words(number: int) -> str:
    """A number of 0 to 999 in words; a larger one in digits.

    >>> number_words(64), number_words(101), number_words(920)
    ('sixty-four', 'one hundred and one', 'nine hundred and twenty')
    """
    if number > MOST_WORDS:
        return str(number)
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    words = f"{_SMALL[hundreds]} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _below_hundred(number: int) -> str:
    if number < len(_SMALL):
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
