"""The pages' measured tables are those of the committed results, and each table has its place."""

from __future__ import annotations

import re

import pytest

from benchmarks import doc_tables, results, subjects

PAGES = {page.name: page.read_text(encoding="utf-8") for page in doc_tables.PAGES}
TABLES = {page: re.findall(r"<!-- table ([\w-]+): .*?<!-- end of table -->", text, re.DOTALL)
          for page, text in PAGES.items()}  # fmt: skip


def test_the_pages_tables_are_those_of_the_results():
    for page, text in PAGES.items():
        assert doc_tables.fill(text) == text, f"{page}: run: python -m benchmarks.doc_tables --write"
        assert text.count("<!-- table ") == text.count("<!-- end of table -->") == len(TABLES[page])


def test_every_table_is_on_a_page_and_a_name_that_is_none_is_told():
    assert TABLES["README.md"] == ["gains", "strength"]
    assert sorted(name for names in TABLES.values() for name in names) == sorted(doc_tables.TABLES)
    with pytest.raises(ValueError, match="no table 'weights'; there are strength, "):
        doc_tables.fill("<!-- table weights: x -->\n<!-- end of table -->\n")


def test_a_figure_is_the_records():
    """Read without the table's code: the mean over all times and pictures of what `fast` moves the first model."""
    record = results.load(results.FOLDER / f"{doc_tables.QUALITY}.json")
    first = next(iter(record["settings"]["models"]))

    def values(variant: str, what: str) -> list[float]:
        rows = [row for row in record["rows"] if (row["checkpoint"], row["measure"], row["variant"]) == (
            first, "noised", variant)]  # fmt: skip
        return [value for row in rows for at in row[what] for value in at]

    loss, moved = values("unmerged", "loss"), values("preset-fast", "dev")
    percent = 100 * (sum(moved) / len(moved)) / (sum(loss) / len(loss))
    row = next(line for line in doc_tables.strength().splitlines() if "`fast`" in line)
    assert row.split(" | ")[3].startswith(f"{percent:.2f}, ")


def test_what_the_pages_link_of_quality_is_of_pictures_to_show():
    """But for what strength may be chosen by, which says so on its page."""
    linked = {name for text in PAGES.values() for name in re.findall(r"benchmarks/results/([\w.-]+)\.(?:md|png)", text)}
    chosen = {doc_tables.TO_CHOOSE_BY}
    records = {name: results.load(results.FOLDER / f"{name}.json") for name in linked - chosen}
    shown = {name: record for name, record in records.items() if record["kind"] == "quality"}
    assert shown
    for name, record in shown.items():
        subjects.check_purpose(record, subjects.SHOW, name)
