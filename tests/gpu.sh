#!/bin/sh
# All tests that need a GPU, in one call, from anywhere: tests/gpu.sh [options of pytest]
cd "$(dirname "$0")/.." || exit
exec "${PYTHON:-python3}" -m pytest -m gpu --timeout 600 $(grep -rl --include='test_*.py' mark.gpu tests) "$@"
