"""The tests compute as `andon train` does: with portable kernels, chosen before torch is loaded."""

import os
from pathlib import Path

from andon.numerics import kernels

ROOT = Path(__file__).parent.parent
"""The repository."""

os.environ.update(kernels("portable"))
