"""Listings: the same code as HTML and as plain text, unwrapped, in colors that every page keeps."""

import html
import re

import pytest
from pygments.token import Comment, Keyword, Name, Number, String

from fsdp_helpers.teaching.page.listings import COLORS, Listing

CODE = 'def sum_of(values):  # <b> & "quoted"\n    """Adds."""\n\n    return sum(values) if values else 0\n'


def shown_text(page: str) -> str:
    (code,) = re.findall(r"<pre[^>]*>(.*)</pre>", page, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", code))


@pytest.mark.parametrize("language, code", [("python", CODE), ("diff", "...\n-    one\n+    two\n same")])
def test_html_holds_the_code_and_nothing_else(language, code):
    assert shown_text(Listing(code, "a.py, line 1", language)._repr_html_()) == code.rstrip("\n")


def test_plain_text_for_whatever_shows_no_html():
    assert repr(Listing("x = 1\n", "a.py, line 1")) == "# a.py, line 1\n\nx = 1\n"


def test_lines_are_not_wrapped_and_scroll_by_themselves():
    (style,) = re.findall(r'<pre style="([^"]*)"', Listing(CODE, "a.py")._repr_html_())
    assert {"white-space:pre", "overflow-x:auto", "word-break:normal"} <= set(style.split(";"))


def test_colors_need_no_theme():
    """JupyterLab's sanitizer keeps a plain color and drops `var(--...)` where the notebook was not run here."""
    page = Listing(CODE, "a.py")._repr_html_()
    used = re.findall(r'<span style="color:([^"]*)"', page)
    assert set(used) == {COLORS[kind] for kind in (Keyword, Name.Function, Comment, String, Name.Builtin, Number)}
    assert all(re.fullmatch(r"#[0-9a-f]{6}", color) for color in used)
    assert "var(" not in page
