"""Promise: a row that a test records stands in the table at the end of the run, whichever process ran the test."""

import subprocess
import sys
from pathlib import Path

import pytest
from tables import Table, insert

ROWS = [
    {"type": "zamba", "runs by": "native", "reason": "recurrent | state", "tokens": "equal"},
    {"type": "bloom", "runs by": "adapter", "reason": "", "tokens": "equal"},
    {"type": "llama", "runs by": "orca", "reason": "", "tokens": "equal"},
]

TESTS = """
import pytest

@pytest.mark.parametrize("type", ["zamba", "llama", "bloom"])
def test_type(type, record_property):
    record_property("note", "is no row")
    record_property("kinds", {"type": type, "runs by": "orca" if type == "llama" else "native"})
    assert type != "bloom"
"""


def test_a_table_is_sorted_aligned_and_counted():
    assert Table("kinds", ROWS, 1).text() == [
        "type   runs by  reason             tokens",
        "bloom  adapter                     equal",
        "llama  orca                        equal",
        "zamba  native   recurrent | state  equal",
        "by Orca 2 (of these 1 by adapter), native 1, wrong 1",
    ]


def test_markdown_takes_the_place_of_what_stood_between_the_markers():
    text = insert("a\n<!-- table:kinds -->\nold\n<!-- /table -->\nb\n", Table("kinds", ROWS[:1], 0))
    assert text == (
        "a\n<!-- table:kinds -->\n<details><summary>All 1 kinds: by Orca 0, native 1, wrong 0</summary>\n\n"
        "| type | runs by | reason | tokens |\n| --- | --- | --- | --- |\n"
        "| zamba | native | recurrent \\| state | equal |\n\n</details>\n<!-- /table -->\nb\n"
    )
    with pytest.raises(ValueError, match="table:kinds"):
        insert("no markers", Table("kinds", ROWS, 0))


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one-process", "two-workers"])
def test_rows_of_all_tests_are_printed_and_written(workers, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "notes.md").write_text("<!-- table:kinds -->\n<!-- /table -->\n")
    command = [sys.executable, "-m", "pytest", "-p", "tables", "-p", "no:cacheprovider", "--write-tables", "notes.md"]
    run = subprocess.run(
        [*command, *workers, "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "type   runs by\nbloom  native\nllama  orca\nzamba  native\nby Orca 1, native 2, wrong 1" in run.stdout
    assert "| bloom | native |" in (tmp_path / "notes.md").read_text()
