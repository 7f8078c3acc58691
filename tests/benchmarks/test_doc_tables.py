"""The measured tables of the pages are those of the committed results, and each table has its place."""

import re

import pytest

from benchmarks import doc_tables
from tome_core import describe_settings
from tome_core.settings import form

PAGES = {page.name: page.read_text(encoding="utf-8") for page in doc_tables.PAGES}


@pytest.mark.pays
def test_the_pages_tables_are_those_of_the_results_and_every_table_is_on_a_page():
    tables = {page: re.findall(r"<!-- table ([\w-]+): .*?<!-- end of table -->", text, re.DOTALL)
              for page, text in PAGES.items()}  # fmt: skip
    for page, text in PAGES.items():
        assert doc_tables.fill(text) == text, f"{page}: run: python -m benchmarks.doc_tables --write"
        assert text.count("<!-- table ") == text.count("<!-- end of table -->") == len(tables[page])
    assert tables["README.md"] == ["gains", "work", "strength"]
    assert sorted(name for names in tables.values() for name in names) == sorted(doc_tables.TABLES)


def test_the_hosts_table_has_the_settings_that_can_be_set_by_name_in_every_host_and_another_the_rest():
    """A name is the first cell's last one in quotes: the name in the hosts, if it differs."""
    known = {row.setting or row.name: row.name for row in form.FIELDS}
    cells = {name: [re.findall(r"`(\w+)`", row.split("|")[1]) for row in doc_tables.TABLES[name]().splitlines()[2:]]
             for name in ("settings", "settings_of_python")}  # fmt: skip
    assert {first: last for first, *_, last in ((row[0], *row) for row in cells["settings"])} == known
    others = {setting["name"] for setting in describe_settings()} - set(known)
    assert sorted(map(tuple, cells["settings_of_python"])) == sorted((name,) for name in others)
