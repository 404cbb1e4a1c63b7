"""Warn of files in the current folder that hide modules of Python's own.

    python -I -S scripts/launch/hidden_modules.py

`python -m` looks there first, and stops with a traceback from within Python's own modules.
"""

import os
import sys

if __name__ == "__main__":
    for name in sorted(os.listdir()):
        if name.endswith(".py") and name[:-3] in sys.stdlib_module_names - {"test"}:
            what = f"{name} in {os.getcwd()} hides the module of Python that has this name"
            print(f"warning: {what}; rename it if Python fails", file=sys.stderr)
