"""Runs one rank of a benchmark: prints what `main` of a module returns for a task, as JSON."""

import json
import sys
from importlib import import_module

if __name__ == "__main__":
    module, task = sys.argv[1:]
    print(json.dumps(import_module(module).main(json.loads(task))), flush=True)
