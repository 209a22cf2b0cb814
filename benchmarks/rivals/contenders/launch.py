"""Starts a contender's file in a role: ``launch.py PATH describe`` or ``launch.py PATH produce``.

The file is imported under its own name, as its worker does, because libraries derive the names of tasks from the module.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    path = Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    importlib.import_module(path.stem).main(sys.argv[2])
