"""A document of headings, sentences, tables and plots, as one HTML page and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rmsnorm_raw.study.plots import PLOT_STYLE, Plot
from rmsnorm_raw.study.theme import THEME

STYLE = """\
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,'DejaVu Sans',sans-serif}
main{max-width:1120px;margin:0 auto;padding:16px}
h1{font-size:1.6rem;line-height:1.25}h2{margin-top:2.5rem;font-size:1.3rem}h3{font-size:1.08rem}
h1,h2,h3,p,li{overflow-wrap:anywhere}
a{color:var(--link)}
.scroll{overflow-x:auto;margin:0 0 1.25rem;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
.caption{margin:1.25rem 0 .4rem;color:var(--soft);font-size:.9rem}
th,td{padding:4px 10px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{color:var(--soft);vertical-align:bottom;white-space:normal}
th[scope=row],thead th:first-child,.words td,.words th{text-align:left}
th[scope=row]{font-weight:normal;position:sticky;left:0;background:var(--bg)}
.words td{white-space:normal;overflow-wrap:anywhere;min-width:9rem}
tbody tr:nth-child(odd),tbody tr:nth-child(odd) th{background:var(--panel)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:24px}
figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:.95rem;margin-bottom:6px}
figure svg{display:block;width:100%;max-width:520px;height:auto}
@media print{.scroll{overflow:visible}}
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; the first of a page has level 1."""

    level: int
    text: str

    @property
    def anchor(self) -> str:
        """What links name."""
        return re.sub(r"[^a-z0-9]+", "-", self.text.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles.

    Attributes:
        caption: what the rows are.
        titles: of the columns.
        rows: as text; the first column names a row.
        strong: (row, column) of cells that stand out.
        words: sentences in place of numbers.
    """

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()
    words: bool = False


@dataclass(frozen=True, slots=True)
class Plots:
    """Plots that stand side by side where there is room."""

    plots: Sequence[Plot]


Block = Heading | Text | Items | Table | Plots


def html(blocks: Sequence[Block], facts: Sequence[tuple[str, str]]) -> str:
    """One page that asks for nothing: no script, no font, no image, no network.

    Args:
        blocks: of the document; the first is its title.
        facts: (name, content) of meta elements.
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    metas = "".join(f'<meta name="{escape(n)}" content="{escape(c)}">\n' for n, c in facts)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"{metas}<title>{escape(title)}</title>\n<style>\n{THEME}{STYLE}{PLOT_STYLE}</style>\n"
        "</head>\n<body>\n<main>\n"
        + "\n".join(_html(block, blocks) for block in blocks)
        + "\n</main>\n</body>\n</html>\n"
    )


def _html(block: Block, blocks: Sequence[Block]) -> str:
    if isinstance(block, Heading):
        tag = f"h{block.level}"
        line = f'<{tag} id="{block.anchor}">{escape(block.text)}</{tag}>'
        return line + _contents(blocks) if block.level == 1 else line
    if isinstance(block, Text):
        return f"<p>{_rich(block.text)}</p>"
    if isinstance(block, Items):
        return "<ul>" + "".join(f"<li>{_rich(text)}</li>" for text in block.texts) + "</ul>"
    if isinstance(block, Plots):
        figures = (
            f"<figure><figcaption>{escape(plot.title)}</figcaption>\n{plot.inline}\n</figure>"
            for plot in block.plots
        )
        return f'<div class="plots">\n{"".join(figures)}\n</div>'
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in block.titles)
    body = "\n".join(_html_row(block, index) for index in range(len(block.rows)))
    css = ' class="words"' if block.words else ""
    # a box that scrolls can be reached by keyboard, and says what it is
    return (
        f'<p class="caption">{escape(block.caption)}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(block.caption)}">\n'
        f"<table{css}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _html_row(table: Table, index: int) -> str:
    cells = []
    for column, words in enumerate(table.rows[index]):
        text = escape(words)
        if (index, column) in table.strong:
            text = f"<strong>{text}</strong>"
        head = column == 0
        cells.append(f'<th scope="row">{text}</th>' if head else f"<td>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _rich(text: str) -> str:
    """Text whose parts in backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _contents(blocks: Sequence[Block]) -> str:
    links = (
        f'<li><a href="#{block.anchor}">{escape(block.text)}</a></li>'
        for block in blocks
        if isinstance(block, Heading) and block.level == 2
    )
    return f'\n<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def markdown(blocks: Sequence[Block], plots: str) -> str:
    """The same document; plots are links to files in the folder ``plots``."""
    return "\n\n".join(_markdown(block, plots) for block in blocks) + "\n"


def _markdown(block: Block, plots: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Items):
        return "\n".join(f"- {text}" for text in block.texts)
    if isinstance(block, Plots):
        return "\n".join(f"![{it.title}]({plots}/{it.name}.svg)" for it in block.plots)
    left = len(block.titles) if block.words else 1
    lines = [
        block.titles,
        [":--" if column < left else "--:" for column in range(len(block.titles))],
        *(
            [
                f"**{words}**" if (index, column) in block.strong else words
                for column, words in enumerate(row)
            ]
            for index, row in enumerate(block.rows)
        ),
    ]
    rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{block.caption}:\n\n" + "\n".join(rows)
