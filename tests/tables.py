"""A pytest plugin: what tests record as rows is printed as tables at the end, and written to a file on request.

A test calls `record_property("<table>", {"<column>": value, ...})`. Rows travel with the test's report, and so from the
workers of pytest-xdist to its controller.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

Row = dict[str, object]


class Table(NamedTuple):
    """The rows of one name, and how many of them are of tests that failed."""

    name: str
    rows: list[Row]
    wrong: int

    @property
    def counts(self) -> str:
        """One line: how many rows run by what, and how many are wrong."""
        by = Counter(row.get("runs by") for row in self.rows)
        adapted = f" (of these {by['adapter']} by adapter)" if by["adapter"] else ""
        return f"by Orca {by['orca'] + by['adapter']}{adapted}, native {by['native']}, wrong {self.wrong}"

    @property
    def cells(self) -> list[list[str]]:
        """The head, then the rows sorted by their first column."""
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        body = [[" ".join(str(row.get(column, "")).split()) for column in columns] for row in self.rows]
        return [columns, *sorted(body)]

    def text(self) -> list[str]:
        """Aligned lines for a terminal, the counts last."""
        cells = self.cells
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
        return [*("  ".join(line).rstrip() for line in aligned), self.counts]

    def markdown(self) -> str:
        """A folded table with the counts as its summary."""
        head, *body = [[cell.replace("|", "\\|") for cell in line] for line in self.cells]
        lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]
        summary = f"<details><summary>All {len(body)} {self.name}: {self.counts}</summary>"
        return "\n".join([summary, "", *lines, "", "</details>"])


def collect(reports: list[pytest.TestReport]) -> list[Table]:
    """The tables that the tests of `reports` recorded, by name."""
    rows: dict[str, list[Row]] = {}
    wrong: Counter[str] = Counter()
    for report in reports:
        for name, value in report.user_properties:
            if isinstance(value, dict):
                rows.setdefault(name, []).append(value)
                wrong[name] += report.failed
    return [Table(name, rows[name], wrong[name]) for name in sorted(rows)]


def insert(text: str, table: Table) -> str:
    """`text` with `table` between its markers.

    Raises:
        ValueError: The markers are missing.
    """
    opening, closing = f"<!-- table:{table.name} -->", "<!-- /table -->"
    before, found, rest = text.partition(opening)
    _, closed, after = rest.partition(closing)
    if not (found and closed):
        raise ValueError(f"there is no {opening} with a {closing} behind it to write the table to")
    return f"{before}{opening}\n{table.markdown()}\n{closing}{after}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", type=Path, help="write the recorded tables between the markers in this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each]
    tables = collect([report for report in reports if getattr(report, "when", None) == "call"])
    for table in tables:
        terminalreporter.section(table.name)
        for line in table.text():
            terminalreporter.line(line)
    path = config.getoption("write_tables")
    if path is not None and tables:
        text = path.read_text(encoding="utf-8")
        for table in tables:
            text = insert(text, table)
        path.write_text(text, encoding="utf-8")
