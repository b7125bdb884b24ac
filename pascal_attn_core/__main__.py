"""``python -m pascal_attn_core``: the same as the command ``pascal-attn``.

``python PATH/TO/pascal_attn_core info`` works too, where the package is not installed and an isolated interpreter
(ComfyUI portable's ``python_embeded``) ignores the current folder: the package is then loaded from its path.
"""

import importlib.util
import sys
from pathlib import Path


def _load() -> None:
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]  # its modules are no others' names
    spec = importlib.util.spec_from_file_location(
        "pascal_attn_core", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["pascal_attn_core"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if not __package__:
        _load()
    from pascal_attn_core.cli import main

    sys.exit(main())
