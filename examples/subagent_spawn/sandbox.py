"""The tools of the subagents: reading inside one folder, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.api import Requested, Tool

LIMIT = 600
"""Characters of a result: what a small model can still use."""
HITS = 8


def _tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {key: {"type": "string", "description": about} for key, about in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return Tool(name, description, schema)


TOOLS = (
    _tool("list_dir", "Lists a folder.", path="folder, . for the top"),
    _tool("read_file", "Reads the beginning of a file.", path="file to read"),
    _tool("grep", "Finds lines that contain a text.", text="text to look for"),
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One folder. Paths that leave it, hidden files and anything that is not text are refused."""

    root: Path

    def call(self, request: Requested) -> str:
        """The result of a tool call, as text for the model; its mistakes are results too."""
        tools: dict[str, Callable[..., str]] = {
            "list_dir": self.list_dir,
            "read_file": self.read_file,
            "grep": self.grep,
        }
        try:
            return tools[request.name](**request.values)[:LIMIT] or "(nothing)"
        except KeyError:
            return f"There is no tool {request.name!r}."
        except (OSError, TypeError, ValueError) as error:
            return f"That did not work: {error}"

    def list_dir(self, path: str = ".") -> str:
        folder = self._inside(path)
        names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir() if not p.name.startswith("."))
        return "\n".join(names)

    def read_file(self, path: str) -> str:
        with self._inside(path).open(encoding="utf-8") as file:
            return file.read(LIMIT)

    def grep(self, text: str) -> str:
        wanted = re.compile(re.escape(text))
        found = []
        for path in self.files():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if wanted.search(line):
                    found.append(f"{path.relative_to(self.root)}:{number}: {line.strip()}")
                if len(found) == HITS:
                    return "\n".join(found)
        return "\n".join(found)

    def files(self) -> list[Path]:
        """The Python files, by name."""
        every = sorted(self.root.rglob("*.py"))
        return [p for p in every if not _hidden(p.relative_to(self.root))]

    def _inside(self, path: Any) -> Path:
        found = (self.root / str(path)).resolve()
        if not found.is_relative_to(self.root.resolve()) or _hidden(found.relative_to(self.root.resolve())):
            raise ValueError(f"{path!r} is not inside the folder")
        return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
