"""The measured tables of the pages are those of the committed results, and each table has its place."""

import re

import pytest

from benchmarks import doc_tables

PAGES = {page.name: page.read_text(encoding="utf-8") for page in doc_tables.PAGES}


@pytest.mark.pays
def test_the_pages_tables_are_those_of_the_results_and_every_table_is_on_a_page():
    tables = {page: re.findall(r"<!-- table ([\w-]+): .*?<!-- end of table -->", text, re.DOTALL)
              for page, text in PAGES.items()}  # fmt: skip
    for page, text in PAGES.items():
        assert doc_tables.fill(text) == text, f"{page}: run: python -m benchmarks.doc_tables --write"
        assert text.count("<!-- table ") == text.count("<!-- end of table -->") == len(tables[page])
    assert tables["README.md"] == ["work", "gains", "strength"]
    assert sorted(name for names in tables.values() for name in names) == sorted(doc_tables.TABLES)
