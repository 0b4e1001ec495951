"""The package ``runner`` by a name that no file beside a script hides: the same objects.

>>> from holdfast_train import Guard  # doctest: +SKIP

For scripts beside a ``runner.py`` or ``runner/`` of their own. In their process the name ``runner``
is then this package.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent / "runner"


class _Same(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``holdfast_train.x`` as ``runner.x``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("holdfast_train."):
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"runner.{spec.name.partition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "the import system has set it"
        module.__spec__ = module.__spec__.loader_state  # its own, which that replaced


def _runner() -> ModuleType:
    known = sys.modules.get("runner")
    if known is not None:
        if Path(known.__file__ or "").resolve().parent != _FOLDER:
            raise ImportError(
                f"holdfast_train: the name runner is already {known.__file__} here; import "
                "holdfast_train before it, and give that file another name"
            )
        return known
    spec = importlib.util.spec_from_file_location(
        "runner", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None and spec.loader is not None, "the package lies beside this file"
    module = sys.modules["runner"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.meta_path.insert(0, _Same())
sys.modules[__name__] = _runner()
