"""Code listings for notebooks: monospace, never wrapped, scrollable, and legible on light and dark pages."""

from collections.abc import Iterator
from html import escape
from itertools import groupby

from pygments import lex
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType

# Plain colors, legible on white and on black: JupyterLab drops the theme's own, `var(--jp-...)`, from the outputs of a
# notebook that wasn't run on this machine.
COLORS = {
    Comment: "#5f7f7f",
    String: "#c2410c",
    Number: "#15803d",
    Keyword: "#15803d",
    Operator.Word: "#15803d",
    Name.Function: "#2f6fdb",
    Name.Class: "#2f6fdb",
    Name.Decorator: "#9333ea",
    Name.Builtin: "#15803d",
    Generic.Inserted: "#15803d",
    Generic.Deleted: "#dc2626",
}
FRAME = "border-left:3px solid #9ca3af;padding-left:0.8em;margin:0.3em 0"
CAPTION = "font-size:0.85em;opacity:0.8;margin-bottom:0.3em"
CODE = (
    "white-space:pre;overflow-x:auto;overflow-wrap:normal;word-break:normal;max-width:100%;margin:0;padding:0;"
    "line-height:1.4;background:transparent;color:inherit;font-family:monospace"
)


class Listing:
    """Code or a diff, with a caption that names its source."""

    def __init__(self, code: str, caption: str, language: str = "python") -> None:
        self.code, self.caption, self.language = code, caption, language

    def _repr_html_(self) -> str:
        """Return the HTML that IPython shows; readers can focus and scroll the listing with the keyboard."""
        caption = escape(self.caption)
        return (
            f'<div style="{FRAME}"><div style="{CAPTION}">{caption}</div>'
            f'<pre style="{CODE}" tabindex="0" aria-label="{caption}">{colored(self.code, self.language)}</pre></div>'
        )

    def __repr__(self) -> str:
        """Return the listing as text, for front ends without HTML."""
        return f"# {self.caption}\n\n{self.code}"


def colored(code: str, language: str) -> str:
    """Return `code` as HTML, with adjacent tokens of the same color in one span."""
    tokens = ((_color(kind), text) for kind, text in lex(code, get_lexer_by_name(language, stripnl=False)))
    return "".join(_parts(tokens)).rstrip("\n")


def _parts(tokens: Iterator[tuple[str | None, str]]) -> Iterator[str]:
    for color, group in groupby(tokens, key=lambda token: token[0]):
        text = escape("".join(text for _, text in group), quote=False)
        yield text if color is None else f'<span style="color:{color}">{text}</span>'


def _color(kind: _TokenType) -> str | None:
    """Return the color of this kind of token, or of the next more general kind that has one."""
    while kind is not None and kind not in COLORS:
        kind = kind.parent
    return COLORS.get(kind)
