"""The tests compute as `andon train` does: with portable kernels, chosen before torch is loaded."""

import os

from andon.numerics import kernels

os.environ.update(kernels("portable"))
