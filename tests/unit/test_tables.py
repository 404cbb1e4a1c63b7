"""How figures are written in tables."""

from scripts.launch.tables import duration, short_number


def test_small_and_large_figures_are_readable():
    durations = {0.0082: "0.0082 s", 59.0: "59.0 s", 90.0: "1.5 min", 5400.0: "1.5 h", 360_000.0: "100.0 h"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
    numbers = {0.0: "0.0", 0.0123: "0.012", 0.96: "0.96", 1.26: "1.3", 1234.56: "1,234.6"}
    assert {number: short_number(number) for number in numbers} == numbers
    assert [short_number(rounding) for rounding in (-3.5e-15, 4.3e-16)] == ["0.0", "0.0"]
