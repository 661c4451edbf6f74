"""mlx-lm's model classes without the rest of mlx-lm.

Importing `mlx_lm` pulls in its command-line side and `transformers`, over a second of start-up; its model files need
neither. `enter()` registers the package with an unrun body: submodules import normally, and the first use of a name
that the package itself defines (`mlx_lm.load`) runs the body then, so other code sees the usual package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

NAME = "mlx_lm"


class _Unrun(ModuleType):
    """A package whose `__init__` has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


def enter() -> None:
    """Register mlx-lm unrun, unless something has imported it already. Mutates `sys.modules` only."""
    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Unrun
    sys.modules[NAME] = module


def whole() -> None:
    """Import all of mlx-lm, body included: its body is what keeps transformers quiet about a missing PyTorch."""
    importlib.import_module(NAME).__version__  # noqa: B018
