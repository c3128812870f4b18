"""The page that a report is, whatever it says: its two forms, its plots, and in a browser."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from test_report import RESULTS, SWEEP, some_rows, tables_of, write_run

from rmsnorm_raw.study import page, plots, report, theme
from rmsnorm_raw.study.runs import Cell

# ---- the two forms -------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tables of an HTML page, and the tags that it should not have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.append(value)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data


def test_markdown_has_the_pages_tables_and_plots() -> None:
    made = report.make([RESULTS])
    html = Page(made.files["report.html"])
    assert html.tables == list(tables_of(made).values())
    drawn = {name for name in html.ids if name.startswith("plot-")}
    linked = re.findall(r"\]\((report_plots/.+?\.svg)\)", made.files["report.md"])
    assert {f"plot-{Path(name).stem}" for name in linked} == drawn
    assert set(linked) == {name for name in made.files if name.endswith(".svg")}


def test_a_page_asks_for_nothing_and_its_links_lead_somewhere() -> None:
    text = report.make([RESULTS]).files["report.html"]
    html = Page(text)
    assert html.tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert len(html.ids) == len(set(html.ids))
    assert {link.removeprefix("#") for link in html.links} <= set(html.ids)
    assert all(link.startswith("#") for link in html.links)
    assert "@media (prefers-color-scheme: dark)" in text
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_names_in_files_are_text_and_no_markup(tmp_path: Path) -> None:
    def rename(facts: dict[str, Any]) -> None:
        facts["device"]["name"] = "<script>alert(1)</script> & co"

    rows = [row | {"config": "<b>|</b>"} for row in some_rows("ours")]
    folders = [write_run(tmp_path / name, rows, change=rename) for name in ("a", "b")]
    made = report.make(folders)
    html = Page(made.files["comparison.html"])
    assert html.tags.isdisjoint({"script", "b"})
    assert any("<b>|</b>" in cell for table in html.tables for row in table for cell in row)
    for name, text in made.files.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(text)


def test_every_plot_is_an_image_with_a_title_and_numbers() -> None:
    made = report.make([RESULTS])
    files = [text for name, text in made.files.items() if name.endswith(".svg")]
    assert len(files) > 10
    svg = "{http://www.w3.org/2000/svg}"
    for text in files:
        root = ElementTree.fromstring(text)
        title = root[0]
        assert root.get("role") == "img"
        assert title.tag == f"{svg}title"
        assert root.get("aria-labelledby") == title.get("id")
        assert title.text
        said = [element.text or "" for element in root.iter(f"{svg}text")]
        assert sum(bool(re.search(r"\d", words)) for words in said) > 3


@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK])
def test_colours_stand_out_from_what_they_stand_on(colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        if name in ("bg", "panel", "line"):
            continue
        for ground in ("bg", "panel"):
            assert theme.contrast(colour, colours[ground]) >= 4.5, (name, ground)


def test_text_on_a_heat_map_can_be_read_at_every_percentage() -> None:
    for tenth in range(1001):
        drawn = plots.heat_map("h", "t", ["r"], ["c"], [[tenth / 10]]).inline
        (fill,) = re.findall(r'fill="(#\w+)"', drawn)
        (ink,) = re.findall(r"style=\"fill:(#\w+)", drawn)
        assert theme.contrast(fill, ink) >= 4.5, tenth


def test_numbers_of_coordinates_are_plain() -> None:
    assert [plots.number(v) for v in (1.0, 0.126, -0.001, 2.5, 100)] == [
        "1",
        "0.13",
        "0",
        "2.5",
        "100",
    ]


@pytest.mark.parametrize("highest", [0.0, 99.0, 200.0, 201.0, 1000.0, 1e9, 1e15])
def test_an_axis_has_few_ticks_however_far_it_goes(highest: float) -> None:
    line = plots.curves("a", "a", ["1×1"], [("ours", 0, [highest])], "percent")
    rows = [("1×1", highest, highest, 1.0)]
    pair = plots.dumbbells("a", "a", rows, ("ladder", "tuned"), "percent", 1.0)
    for plot in (line, pair):
        ticks = re.findall(r'class="soft">(\d+)</text>', plot.body)
        step = int(ticks[1])
        assert 2 <= len(ticks) <= 11
        assert ticks == [str(step * place) for place in range(len(ticks))]
        assert step == 20 if highest <= 200 else step % 20 == 0


def test_a_table_in_markdown_keeps_its_columns() -> None:
    table = page.Table("c", ("a", "b"), [["x|y", "1"]], strong=frozenset({(0, 1)}))
    assert page.markdown([table], "p") == "c:\n\n| a | b |\n| :-- | --: |\n| x\\|y | **1** |\n"


def test_cells_are_ordered_by_elements_and_dtypes() -> None:
    cells = [
        Cell("fwd", m, n, act, w)
        for m, n in ((8, 4), (1, 4))
        for act, w in (("fp32", "fp32"), ("fp16", "fp16"))
    ]
    ordered = sorted(cells, key=lambda cell: cell.order)
    assert [cell.name for cell in ordered] == [
        "1×4 fp16/fp16", "1×4 fp32/fp32", "8×4 fp16/fp16", "8×4 fp32/fp32",
    ]  # fmt: skip


# ---- in a browser --------------------------------------------------------------------------------

#: what is wrong with a page, as sentences
INSPECT = """
(() => {
  const faults = [], width = document.documentElement.clientWidth;
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const lum = c => {
    const [r, g, b] = rgb(c).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [lum(a), lum(b)].sort((p, q) => p - q);
    return (y + 0.05) / (x + 0.05);
  };
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (rgb(c).length === 3 || rgb(c)[3] > 0) return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const short = e => e.tagName + ' ' + e.textContent.trim().slice(0, 40);
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest('title, style')) continue;
    texts++;
    const style = getComputedStyle(element), drawn = element.closest('text');
    const below = drawn?.previousElementSibling;
    const inside = drawn?.parentElement.matches('.cell');
    const on = inside ? getComputedStyle(below).fill : ground(element);
    const value = contrast(drawn ? style.fill : style.color, on);
    if (value < 4.5) faults.push(`contrast ${value.toFixed(2)}: ${short(element)}`);
    const ctm = drawn?.getScreenCTM();
    const size = parseFloat(style.fontSize) * (ctm ? Math.hypot(ctm.a, ctm.b) : 1);
    if (size < 8.9) faults.push(`${size.toFixed(1)} px: ${short(element)}`);
  }
  if (document.documentElement.scrollWidth > width) faults.push('wider than the screen');
  for (const e of document.querySelectorAll('h1,h2,p,li,figure,figcaption,.scroll,svg')) {
    const box = e.getBoundingClientRect();
    if (box.right > width + 0.5 || box.left < -0.5) faults.push(`beyond the edge: ${short(e)}`);
  }
  for (const e of document.querySelectorAll('td,th')) {
    if (e.scrollWidth > e.clientWidth + 1) faults.push(`cut off: ${short(e)}`);
  }
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    if (frame.height < 40 || frame.width < 300) faults.push(`small: ${svg.id}`);
    for (const text of svg.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 0.5 || box.right > frame.right + 0.5
          || box.top < frame.top - 0.5 || box.bottom > frame.bottom + 0.5)
        faults.push(`cut off in ${svg.id}: ${text.textContent}`);
    }
  }
  return {faults, texts, tables: document.querySelectorAll('table').length,
          plots: [...document.querySelectorAll('svg')].map(e => e.id)};
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison")
    report.make([RESULTS / "sweep", RESULTS], out=out).write()
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("what", ["suites", "sweep", "comparison"])
def test_a_page_can_be_read_in_a_browser(
    what: str, width: int, scheme: str, browser: Browser, comparison_folder: Path, tmp_path: Path
) -> None:
    folder = {"suites": RESULTS, "sweep": SWEEP, "comparison": comparison_folder}[what]
    stem = "comparison" if what == "comparison" else "report"
    browser.messages.clear()
    browser.open(folder / f"{stem}.html", width, scheme)
    assert browser.run("innerWidth") == width
    found = browser.run(INSPECT)
    text = (folder / f"{stem}.md").read_text(encoding="utf-8")
    assert browser.messages == []
    assert found["faults"] == []
    assert found["tables"] == text.count("\n| :--")
    linked = re.findall(rf"{stem}_plots/(.+?)\.svg\)", text)
    assert found["plots"] == [f"plot-{name}" for name in linked]
    assert found["texts"] > 1000
    browser.screenshot(tmp_path / "page.png", 900)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_browser_sees_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = report.make([RESULTS]).files["report.html"]
    text = text.replace("--ink:#1b1f24", "--ink:#999999").replace(
        ".scroll{overflow-x:auto;", ".scroll{overflow-x:visible;"
    )
    policy = re.search(r"<meta http-equiv.+>\n", text)
    assert policy
    text = text.replace(policy[0], "").replace(
        "</main>", "<script>console.error(1)</script></main>"
    )
    broken.write_text(text.replace('viewBox="0 0 360', 'viewBox="0 0 200'), encoding="utf-8")
    browser.messages.clear()
    browser.open(broken, 390, "light")
    faults = " ".join(browser.run(INSPECT)["faults"])
    for kind in ("contrast 2", "wider than the screen", "cut off in plot-"):
        assert kind in faults
    assert browser.messages
    # the policy of a page that is not broken refuses every script
    broken.write_text(
        report.make([RESULTS]).files["report.html"].replace("<main>", "<main><script>1</script>"),
        encoding="utf-8",
    )
    browser.messages.clear()
    browser.open(broken, 390, "light")
    assert any("Content Security Policy" in message for message in browser.messages)
