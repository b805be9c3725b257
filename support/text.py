"""Formats tables and short numbers for the terminal."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *numbers)))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def short_number(n: float) -> str:
    """Write a length as papers print it: 128, 1.5K, 16K."""
    return f"{n / 1024:g}K" if n >= 1024 and n % 128 == 0 else f"{n:g}"
