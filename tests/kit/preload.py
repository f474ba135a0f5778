"""What the processes of tests would import one by one, imported once in the process that forks them.

`gc.freeze` keeps the collector of a forked process from walking (and so copying) all of it.
"""

import gc
import hmac
import importlib
import pkgutil

import andon

OTHERS = ["torch._dynamo", "torch.distributed", "tokenizers", "numpy.random", "encodings.idna", "pydantic.type_adapter"]
TESTS = ["tests.transport.test_group_contract"]
"""With what the ranks of `tests.kit.group_harness` need."""

NOT = ("__main__", "bench.ranks.finetune", "_kernel")
"""Ranks of `bench finetune` load transformers' Trainer: the few tests that need it ask (`tests.kit.prefork.preload`).
Kernels need triton, which torch has only for GPUs."""

for name in (*OTHERS, *TESTS, *(module.name for module in pkgutil.walk_packages(andon.__path__, "andon."))):
    if not name.endswith(NOT):
        importlib.import_module(name)
# OpenSSL loads it under a lock: a process that is forked while another thread does so would wait for it for ever.
hmac.digest(b"key", b"message", "sha256")
gc.collect()
gc.freeze()
