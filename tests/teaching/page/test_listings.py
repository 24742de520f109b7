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


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", sorted(set(COLORS.values())))
def test_colors_are_legible_on_white_and_on_a_dark_page(color):
    on_white, on_dark = 1.05 / (luminance(color) + 0.05), (luminance(color) + 0.05) / (luminance("#111111") + 0.05)
    assert min(on_white, on_dark) > 3.5  # 3 is what WCAG asks of large text; the plain code has the page's own color
