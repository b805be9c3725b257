"""Text for the terminal: tables and short numbers."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned: the first to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def short_number(n: float) -> str:
    """128, 1.5K, 16K: a length as papers print it."""
    return f"{n / 1024:g}K" if n >= 1024 and n % 128 == 0 else f"{n:g}"
