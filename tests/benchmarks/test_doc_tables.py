"""The measured tables of the pages are those of the committed results, and each table has its place."""

from __future__ import annotations

import re

from benchmarks import doc_tables, results

PAGES = {page.name: page.read_text(encoding="utf-8") for page in doc_tables.PAGES}


def test_the_pages_tables_are_those_of_the_results_and_every_table_is_on_a_page():
    tables = {page: re.findall(r"<!-- table ([\w-]+): .*?<!-- end of table -->", text, re.DOTALL)
              for page, text in PAGES.items()}  # fmt: skip
    for page, text in PAGES.items():
        assert doc_tables.fill(text) == text, f"{page}: run: python -m benchmarks.doc_tables --write"
        assert text.count("<!-- table ") == text.count("<!-- end of table -->") == len(tables[page])
    assert tables["README.md"] == ["gains", "strength"]
    assert sorted(name for names in tables.values() for name in names) == sorted(doc_tables.TABLES)


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
