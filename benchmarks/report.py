"""All results as markdown tables.

python -m benchmarks.report [--results DIR]           prints them
python -m benchmarks.report --write docs/benchmarks.md    puts them between that file's markers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .common import RESULTS, VERDICTS, hardware_line, shown

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
ORDER = (
    "openai",
    "concurrent",
    "cache",
    "fairness",
    "agents",
    "store",
    "drafts",
    "decode",
    "rows",
    "embedding",
    "internals",
)
Result = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR")
    parser.add_argument("--write", metavar="FILE", help="a markdown file with the two markers")
    options = parser.parse_args(argv)
    text = markdown(read(Path(options.results)))
    if options.write:
        path = Path(options.write)
        path.write_text(placed(path.read_text(), text))
    else:
        print(text)


def read(folder: Path) -> list[Result]:
    """The results in a folder that hold tables, in the order of the page."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    named = [r for r in found if isinstance(r, dict) and "tables" in r]
    return sorted(named, key=lambda r: ORDER.index(r["benchmark"]) if r["benchmark"] in ORDER else len(ORDER))


def markdown(results: list[Result]) -> str:
    if not results:
        return "No results yet: `make bench`."
    machines = dict.fromkeys(hardware_line(r["hardware"]) for r in results if "hardware" in r)
    parts = [*(f"Measured on {line}." for line in machines), bars(results)]
    for result in results:
        load = f" (load of the machine when it began: {result['hardware']['load']})" if "hardware" in result else ""
        parts += [f"### {result['benchmark']}{load}", *map(table, result["tables"])]
        parts += [f"- {note}" for note in result.get("notes", ())]
    return "\n\n".join(part for part in parts if part)


def bars(results: list[Result]) -> str:
    rows = [
        (r["benchmark"], bar["what"], bar["value"], f"{bar['better']} {shown(bar['bar'])}", VERDICTS[bar["holds"]])
        for r in results
        for bar in r.get("bars", ())
    ]
    columns = ["benchmark", "what", "measured", "bar", "verdict"]
    return table({"title": "Bars", "columns": columns, "rows": rows, "note": ""}) if rows else ""


def table(found: dict[str, Any]) -> str:
    lines = [*lines_of(found["columns"], found["rows"])]
    note = f"\n\n{found['note']}" if found.get("note") else ""
    return f"**{found['title']}**\n\n" + "\n".join(lines) + note


def lines_of(columns: list[str], rows: list[Any]) -> Iterator[str]:
    numeric = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    yield line(columns)
    yield line(["--:" if right else "---" for right in numeric])
    for row in rows:
        yield line([shown(cell) for cell in row])


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def placed(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the file has no place for results: put {BEGIN} and {END} into it")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


if __name__ == "__main__":
    main()
