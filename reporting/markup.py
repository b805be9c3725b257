"""HTML that cannot forget to escape: whatever is not `Html` already is text."""

import html
import unicodedata
from collections.abc import Iterable

VOID = {"img", "br", "hr"}


class Html(str):
    """A string that is markup. Every other string is escaped when it enters a `tag`."""


def text(value) -> Html:
    """Any value as text: escaped, without what UTF-8 cannot hold or a page cannot show."""
    if isinstance(value, Html):
        return value
    shown = str(value).encode("utf-8", "replace").decode("utf-8")
    shown = "".join(c if unicodedata.category(c) != "Cc" or c in "\n\t" else "�" for c in shown)
    return Html(html.escape(shown))


def join(*children) -> Html:
    """Children side by side; None is nothing, and so is an empty string."""
    return Html("".join(text(child) for child in children if child is not None))


def tag(name: str, *children, **attributes) -> Html:
    """tag("a", "x < y", href=url, class_="n"): a None attribute is left out, True has no value."""
    parts = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(key)
        elif value is not None and value is not False:
            parts.append(f'{key}="{text(value)}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def each(name: str, items: Iterable, **attributes) -> Html:
    """One tag an item: list items, table cells."""
    return join(*(tag(name, item, **attributes) for item in items))
