"""The networks: shapes, causality, sizes of the presets, and that they can learn."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode

import {{ cookiecutter.package_name }}.configs
from {{ cookiecutter.package_name }}.errors import Refused
from {{ cookiecutter.package_name }}.models.base import TrainableModule
from {{ cookiecutter.package_name }}.models.classifier import ImageClassifier
from {{ cookiecutter.package_name }}.models.gpt import GPT, GPTShape, rotary_tables, rotate
from {{ cookiecutter.package_name }}.models.language import LanguageModel

CONFIGS = Path({{ cookiecutter.package_name }}.configs.__file__).parent
TINY = GPTShape(vocab_size=100, context_length=16, layers=2, heads=2, width=32)


def preset(name: str, vocab_size: int) -> GPTShape:
    base = OmegaConf.load(CONFIGS / "model" / "gpt-tiny.yaml")
    values = OmegaConf.merge(base, OmegaConf.load(CONFIGS / "model" / f"{name}.yaml"))
    assert isinstance(values, DictConfig)
    values.vocab_size = vocab_size
    keys = set(GPTShape.__dataclass_fields__)
    return GPTShape(**{str(key): values[key] for key in values if key in keys})


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        ("gpt-tiny", 256, 0.88e6),
        ("gpt-124m", 50257, 124e6),
        ("gpt-350m", 50257, 354e6),
        ("gpt-1.3b", 50257, 1.41e9),  # two vocabulary matrices of 103 M each
    ],
)
def test_presets_have_the_size_in_their_name(name: str, vocab: int, parameters: float) -> None:
    with torch.device("meta"):
        net = GPT(preset(name, vocab))
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_no_position_sees_the_future(mlp: str) -> None:
    torch.manual_seed(0)
    net = GPT(GPTShape(100, 16, 2, 2, 32, mlp=mlp)).eval()
    tokens = torch.randint(100, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % 100
    difference = (net(tokens) - net(changed)).abs().amax(dim=(0, 2))
    assert difference[:10].max() == 0 and difference[10:].min() > 0


def test_loss_starts_at_that_of_guessing() -> None:
    torch.manual_seed(0)
    net = GPT(TINY)
    logits = net(torch.randint(100, (8, 16)))
    assert logits.shape == (8, 16, 128), "the vocabulary is padded to a multiple of 64"
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(100, (128,)))
    assert loss.item() == pytest.approx(math.log(128), rel=0.02)


def test_bf16_follows_fp32_closely() -> None:
    """Also at the start, where the embedding is small and an epsilon could swallow it."""
    torch.manual_seed(0)
    net = GPT(TINY)
    tokens, targets = torch.randint(100, (8, 16)), torch.randint(100, (8, 16))
    exact = net(tokens)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        rounded, loss = net(tokens), net(tokens, targets)
    assert (rounded - exact).norm() / exact.norm() < 0.02
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(net(tokens, targets).item(), rel=0.01)


def test_rotary_attention_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(32, 8)
    query, key = torch.randn(8), torch.randn(8)
    score = [
        rotate(query, cos[i + 5], sin[i + 5]) @ rotate(key, cos[i], sin[i]) for i in (0, 7, 20)
    ]
    assert torch.allclose(torch.stack(score), score[0].expand(3), atol=1e-5)


def test_it_learns_one_batch_by_heart() -> None:
    torch.manual_seed(0)
    net = GPT(TINY)
    tokens = torch.randint(100, (4, 17))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        logits = net(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_generation_stays_inside_the_vocabulary_and_repeats() -> None:
    torch.manual_seed(0)
    net = GPT(TINY).eval()
    prompt = torch.zeros(2, 3, dtype=torch.long)
    text = net.generate(prompt, 30, seed=1)
    assert text.shape == (2, 33) and text.max() < 100
    assert torch.equal(text, net.generate(prompt, 30, seed=1))


def test_impossible_shapes_are_refused_by_name() -> None:
    with pytest.raises(Refused, match="model.heads=3"):
        GPTShape(100, 16, 2, 3, 32)
    with pytest.raises(Refused, match="swiglu, gelu"):
        GPTShape(100, 16, 2, 2, 32, mlp="relu")


ADAMW = {"name": "adamw", "schedule": "constant", "grad_clip": None}


def test_flops_are_counted_without_a_trace_in_the_model() -> None:
    module = ImageClassifier("test_resnet", 10, 1, False, 0.0, {}, ADAMW).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    images = torch.randn(4, 1, 32, 32)
    with FlopCounterMode(display=False) as counter:
        module.net(images)
    flops = module.flops_per_sample((images, torch.zeros(4)))
    assert flops == pytest.approx(3 * counter.get_total_flops() / 4, rel=0.01)
    module.load_state_dict(before)
    module.flops_per_sample((images, torch.zeros(4)))
    assert module.net.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_formula_for_transformers_agrees_with_counting() -> None:
    module = LanguageModel(256, 64, 2, 2, 128, "gelu", False, 0.0, ADAMW)
    batch = (torch.zeros(1, 64, dtype=torch.long), torch.zeros(1, 64, dtype=torch.long))
    counted = TrainableModule.flops_per_sample(module, batch)
    attention = 64 * 12 * 2 * 128 * 64  # torch does not count its attention kernel for CPUs
    assert module.flops_per_sample(batch) == pytest.approx(counted + attention, rel=0.01)
