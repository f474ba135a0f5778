"""The Python interface: Hugging Face's GPT-2 and Llama and a LoRA model train alike on any number of ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import andon
from andon.checkpoint.disk.store import weights_blake3
from andon.optim.sharding import Zero
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.kit.group_harness import World

SLOTS = 6


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    sizes.resid_pdrop = sizes.embd_pdrop = sizes.attn_pdrop = 0.0
    model: nn.Module = GPT2LMHeadModel(sizes)
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    sizes.num_key_value_heads, sizes.intermediate_size, sizes.max_position_embeddings = 1, 32, 16
    model: nn.Module = LlamaForCausalLM(sizes)
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model: nn.Module = get_peft_model(llama(), settings)
    return model


MODELS = {"gpt2": gpt2, "llama": llama, "lora": lora}


def batch(step: int, slot: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * SLOTS + slot)
    return torch.randint(0, 61, (2, 12), generator=generator)


def train(group: Group, name: str, zero: bool) -> tuple[str, float, float, int]:
    """Three steps: digest of the trained weights, first and last loss, and how many parameters took part."""
    torch.manual_seed(group.rank)  # other weights on every rank: rank 0's are taken
    module = MODELS[name]()
    if name == "lora":
        torch.manual_seed(5)  # frozen weights do not travel: they come from the same checkpoint everywhere
        module = MODELS[name]()
    module.train()
    model = andon.DataParallel(module, group, slots=SLOTS)
    optimizer = andon.AdamW(model, lr=1e-2, zero=Zero("even" if zero else "off"))
    losses = []
    for step in range(1, 4):
        for slot in model.slots:
            x = batch(step % 2, slot)
            logits = model(input_ids=x).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            model.backward(loss, count=x[:, 1:].numel())
        losses.append(optimizer.step(clip=1.0).loss)
    model.close()
    trained: dict[str, Any] = model.arena.parameters
    return weights_blake3(trained), losses[0], losses[-1], len(trained)


def train_all(group: Group) -> list[tuple[str, float, float, int]]:
    torch.set_num_threads(1)
    return [train(group, name, zero) for name in MODELS for zero in (False, True)]


def test_models_of_the_field_train_to_the_same_bits_on_one_and_three_ranks() -> None:
    with World("torch", 3) as world:
        ranks = world.run(train_all)
    alone = train_all(LocalGroup())
    assert ranks == [alone] * 3
    for name, plain, sharded in zip(MODELS, alone[::2], alone[1::2], strict=True):
        assert plain == sharded
        _, first, last, count = plain
        assert last < first
        assert count == (8 if name == "lora" else len(dict(MODELS[name]().named_parameters())))


def test_a_bad_gradient_halts_and_leaves_the_weights() -> None:
    model = andon.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=0.1)
    before = model.arena.weights.clone()
    model.backward(model(torch.full((1, 3), float("inf"))).sum(), count=1)
    with pytest.raises(andon.JidokaHalt, match=r"a bad gradient of .*; the loss is (inf|nan) in slot 0"):
        optimizer.step()
    assert torch.equal(model.arena.weights, before)
    model.close()


def test_a_slot_too_many_or_too_few_and_a_backward_that_failed_are_refused() -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=2)
    optimizer = andon.AdamW(model, lr=0.1)
    x = torch.ones(1, 3)
    with pytest.raises(ValueError, match="the step ends, but backward of slot 0 was not called"):
        optimizer.step()
    model.backward(model(x).sum(), count=1)
    with pytest.raises(ValueError, match="the step ends, but backward of slot 1 was not called"):
        optimizer.step()
    model.backward(model(x).sum(), count=1)
    with pytest.raises(ValueError, match="all 2 slots of this step are done"):
        model.backward(model(x).sum(), count=1)
    optimizer.step()
    with pytest.raises(RuntimeError):
        model.backward(torch.zeros(()), count=1)  # nothing to differentiate
    with pytest.raises(RuntimeError, match="a backward of this step failed"):
        optimizer.step()
    model.close()


def test_closing_the_model_leaves_the_callers_group_open() -> None:
    with World("shm", 2) as world:
        assert world.run(close_and_go_on) == [2.0, 2.0]


def close_and_go_on(group: Group) -> float:
    model = andon.DataParallel(nn.Linear(3, 1), group, slots=2)
    model.close()
    one = torch.ones(1)
    group.all_reduce(one)
    return one.item()


def test_the_state_dict_is_read_after_updated_weights_have_arrived() -> None:
    with World("torch", 2) as world:
        mine, theirs = world.run(updated_state)
    assert mine == theirs


def updated_state(group: Group) -> dict[str, list[float]]:
    torch.manual_seed(1)
    model = andon.DataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1)), group, 2, overlap_gather=True)
    optimizer = andon.AdamW(model, lr=0.1)
    model.backward(model(torch.ones(1, 40)).sum(), count=1)
    optimizer.step()
    state = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    model.close()
    return state


def test_alone_one_gets_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "WORLD_SIZE" not in os.environ
    assert andon.init().world_size == 1
