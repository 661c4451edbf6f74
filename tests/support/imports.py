"""Reads what a module imports and touches from its syntax tree, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

KINDS: dict[str, tuple[str, ...]] = {
    "time": ("time", "sched", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today",
             "datetime.date.today"),
    "random": ("random", "secrets", "uuid", "os.urandom", "os.getrandom"),
    "threads": ("threading", "_thread", "queue", "concurrent", "multiprocessing", "asyncio", "trio.to_thread",
                "trio.from_thread", "trio.lowlevel.start_thread_soon"),
    "processes": ("subprocess", "trio.run_process", "pty"),
    "files": ("open", "io.open", "io.FileIO", "shutil", "tempfile", "fcntl", "mmap", "glob", "fileinput", "trio.Path",
              "trio.open_file", "pathlib.Path()", "pathlib.Path.cwd", "pathlib.Path.home"),
}  # fmt: skip
SEEDED = {"default_rng", "Generator", "BitGenerator", "PCG64", "Philox", "SeedSequence"}
PURE_OS = {"fspath", "fsencode", "fsdecode", "PathLike", "environ", "getenv", "cpu_count", "getpid", "sep", "strerror"}
PURE_OS_PATH = {
    "join",
    "abspath",
    "basename",
    "dirname",
    "split",
    "splitext",
    "normpath",
    "isabs",
    "commonpath",
    "relpath",
}
PURE_PATH = {"parent", "name", "suffix", "stem", "parts", "parents", "joinpath", "with_suffix", "with_name", "as_posix"}
PATH_IO = {"read_text", "write_text", "read_bytes", "write_bytes", "iterdir", "rglob", "touch", "is_file", "is_dir",
           "expanduser", "hardlink_to", "symlink_to"}  # fmt: skip


def touches(source: str) -> Iterator[tuple[str, str]]:
    """(kind, name) of each use of time, randomness, threads, processes or files in `source`."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        for dotted in _used(node, names):
            kind = _kind(dotted)
            if kind:
                yield kind, dotted
        if isinstance(node, ast.Call) and _opens(node):
            yield "files", ast.unparse(node.func)
        if isinstance(node, ast.Call) and _dotted(node.func, names) == "numpy.random.default_rng" and not node.args:
            yield "random", "numpy.random.default_rng without a seed"


def imports(source: str, package: str) -> set[str]:
    """Absolute names of all modules imported by `source`, a module of `package` (dotted)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def _imported(tree: ast.AST) -> dict[str, str]:
    """What each imported name of the module stands for, dotted. Names of built-in functions stand for themselves."""
    names = {"open": "open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _used(node: ast.AST, names: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
        return [_dotted(node, names)]
    return []


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Call):
        called = _dotted(node.func, names)
        return f"{called}()" if called else ""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _kind(dotted: str) -> str | None:
    if dotted.startswith("pathlib.Path()") and _pure_path(dotted):
        return None
    if dotted.startswith("os.") and not _pure_os(dotted.split(".")[1:]):
        return "random" if dotted in KINDS["random"] else "files"
    if dotted.startswith("numpy.random.") and dotted.split(".")[2] not in SEEDED:
        return "random"
    for kind, banned in KINDS.items():
        if any(dotted == name or dotted.startswith(f"{name}.") for name in banned):
            return kind
    return None


def _pure_path(dotted: str) -> bool:
    return dotted == "pathlib.Path()" or dotted.split(".")[2] in PURE_PATH


def _pure_os(rest: list[str]) -> bool:
    if rest[0] == "path":
        return len(rest) == 1 or rest[1] in PURE_OS_PATH
    return rest[0] in PURE_OS


def _opens(call: ast.Call) -> bool:
    """A method call that can only be file input or output: `.read_text()`, `.open("rb")`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    mode = call.args[0] if call.args else None
    opens = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) <= set("rwabx+t")
    return call.func.attr in PATH_IO or (call.func.attr == "open" and opens)
