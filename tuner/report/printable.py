"""Text without characters that control a terminal (escapes, tabs, direction marks)."""


def printable(text: str) -> str:
    """Escape every character that controls a terminal, newlines included."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
