"""From hidden states to logprobs: equal to log_softmax of all logits, in value and gradient, without storing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_core.errors import TrainingError
from lightning_core.model.compute import choose_path
from lightning_core.model.head import PART, OutputHead, linear_logprobs
from lightning_core.model.untied import is_tied
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.test_torch_trainer import assert_same, gradients, make, plain_loss, sampled_rows

pytestmark = pytest.mark.numeric

PLACES, WIDTH, VOCABULARY = 5, 8, 611
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class Case:
    """Five positions: one predicts three tokens (one of them twice) and one predicts none."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.hidden_PH = random(PLACES, WIDTH).requires_grad_()
        self.weight_VH = random(VOCABULARY, WIDTH)
        self.bias_V = random(VOCABULARY) if bias else None
        self.temperatures_P = torch.tensor([1.0, 0.7, 1.0, 2.0, 0.5])
        self.source_E = torch.tensor([0, 3, 1, 3, 4, 3])
        self.targets_E = torch.tensor([2, 300, 5, 610, 256, 300])
        self.upstream_E = torch.randn(6, generator=generator)
        some_V = torch.rand(VOCABULARY, generator=generator) < 0.5
        some_V[2] = False
        only_V = torch.ones(VOCABULARY, dtype=torch.bool)  # whole parts of the vocabulary are forbidden
        only_V[[256, 257]] = False
        self.forbidden = {4: only_V, 0: some_V}

    def found(self, forbidden: bool, part: int) -> Tensor:
        return linear_logprobs(
            self.hidden_PH, self.weight_VH, self.bias_V, self.temperatures_P, self.source_E, self.targets_E,
            self.forbidden.items() if forbidden else (), part=part,
        )  # fmt: skip

    def expected(self, forbidden: bool) -> Tensor:
        bias = None if self.bias_V is None else self.bias_V.float()
        logits_PV = torch.nn.functional.linear(self.hidden_PH.float(), self.weight_VH.float(), bias)
        return expected_logprobs(logits_PV, self, forbidden)

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden_PH, self.weight_VH, self.bias_V) if leaf is not None]


def expected_logprobs(logits_PV: Tensor, case: Case, forbidden: bool) -> Tensor:
    scaled_PV = logits_PV / case.temperatures_P[:, None]
    if forbidden:
        mask = torch.zeros_like(scaled_PV, dtype=torch.bool)
        for place, forbidden_V in case.forbidden.items():
            mask[place] = forbidden_V
        scaled_PV = scaled_PV.masked_fill(mask, -torch.inf)
    return scaled_PV.log_softmax(-1)[case.source_E, case.targets_E]


def take_gradients(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("trained", [(), ("weight_VH",), ("weight_VH", "bias_V"), ("bias_V",)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", [1, 10**9])
def test_linear_logprobs_equal_log_softmax_in_value_and_gradient(
    trained: tuple[str, ...], bias: bool, forbidden: bool, part: int
) -> None:
    """In parts of 256 tokens, the minimum, and in one."""
    case = Case(bias=bias)
    for name in trained:
        if getattr(case, name) is not None:
            getattr(case, name).requires_grad_()
    expected_E = case.expected(forbidden)
    (expected_E * case.upstream_E).sum().backward()
    expected = take_gradients(case.leaves())
    found_E = case.found(forbidden, part)
    (found_E * case.upstream_E).sum().backward()
    torch.testing.assert_close(found_E, expected_E, atol=1e-5, rtol=1e-6)
    for found, wanted in zip(take_gradients(case.leaves()), expected, strict=True):
        if wanted is None:
            assert found is None
        else:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-6)


def test_what_is_forbidden_gets_no_gradient() -> None:
    case = Case()
    case.weight_VH.requires_grad_()
    source_E = case.source_E
    of_place_4 = source_E == 4
    (case.found(True, 1)[of_place_4]).sum().backward()
    assert case.weight_VH.grad is not None
    assert (case.weight_VH.grad[case.forbidden[4]] == 0).all()
    assert (case.weight_VH.grad[~case.forbidden[4]] != 0).any()


@pytest.mark.parametrize("trained", [False, True])
def test_bfloat16_weights_have_a_float32_softmax(trained: bool) -> None:
    case = Case(torch.bfloat16)
    case.weight_VH.requires_grad_(trained)
    expected_E = case.expected(True)
    (expected_E * case.upstream_E).sum().backward()
    expected = take_gradients(case.leaves())
    found_E = case.found(True, 1)
    (found_E * case.upstream_E).sum().backward()
    assert found_E.dtype == torch.float32
    torch.testing.assert_close(found_E, expected_E, atol=0.05, rtol=0.01)
    for found, wanted in zip(take_gradients(case.leaves()), expected, strict=True):
        if wanted is not None:
            assert found is not None
            assert found.dtype == torch.bfloat16
            assert float((found - wanted).float().norm() / wanted.float().norm()) < 0.02


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation created."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


@pytest.mark.parametrize("trained", [False, True])
def test_the_logits_of_all_places_are_never_held(trained: bool) -> None:
    places, vocabulary = 200, 4000
    hidden = torch.randn(places, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=trained)
    with Largest() as largest:
        linear_logprobs(
            hidden, weight, None, torch.ones(places), torch.arange(places), torch.arange(places), part=60_000
        ).sum().backward()
    assert largest.elements <= 60_000 < places * vocabulary / 10


def capped(model: Any) -> Any:
    """``model`` with a soft cap on its logits, which no supported test model has."""

    class Capped(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
            output = super().forward(*args, **kwargs)
            output.logits = 5 * torch.tanh(output.logits / 5)
            return output

    model.__class__ = Capped
    return model


def with_adapter(model: Any) -> Any:
    model.requires_grad_(False)
    adapter = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    model.lm_head.register_module("adapter", adapter)

    def add(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + layer.adapter(inputs[0])

    model.lm_head.register_forward_hook(add)
    return model


MODELS: dict[str, tuple[bool, Any]] = {
    "llama": (True, lambda: LlamaForCausalLM(LlamaConfig(**SMALL))),
    "bias": (True, lambda: PhiForCausalLM(PhiConfig(**SMALL))),
    "part of the base model": (
        True,
        lambda: OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=32, dropout=0.0)),
    ),
    "divided": (False, lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0))),
    "multiplied": (False, lambda: CohereForCausalLM(CohereConfig(**SMALL))),
    "soft cap": (False, lambda: capped(LlamaForCausalLM(LlamaConfig(**SMALL | {"initializer_range": 0.01})))),
    "adapter": (False, lambda: with_adapter(LlamaForCausalLM(LlamaConfig(**SMALL)))),
}


@pytest.fixture(params=MODELS)
def model_of_any_kind(request: pytest.FixtureRequest) -> Iterator[tuple[bool, Any]]:
    plain, make = MODELS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield plain, make().eval()


def test_models_that_do_more_to_their_logits_are_right_too(
    model_of_any_kind: tuple[bool, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs and gradients of all weights against the model's own logits; other output layers use 16 positions at a time."""
    plain, model = model_of_any_kind
    monkeypatch.setitem(PART, "cpu", 1)
    tokens = torch.arange(3, 43)[None]
    source_E, targets_E = torch.arange(39).repeat(2).flip(0), torch.arange(78) % 50
    temperatures_P = torch.linspace(0.5, 1.5, 39)
    forbidden = {20: torch.arange(50) % 3 == 1, 3: torch.arange(50) > 48}
    targets_E[source_E == 20] = 3
    targets_E[source_E == 3] = 4
    upstream_E = torch.linspace(-1, 1, 78)

    logits_PV = model(tokens, use_cache=False).logits[0, :-1] / temperatures_P[:, None]
    mask = torch.zeros_like(logits_PV, dtype=torch.bool)
    for place, forbidden_V in forbidden.items():
        mask[place] = forbidden_V
    expected_E = logits_PV.masked_fill(mask, -torch.inf).log_softmax(-1)[source_E, targets_E]
    (expected_E * upstream_E).sum().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = take_gradients(parameters)

    hidden_PH = model.base_model(tokens, use_cache=False).last_hidden_state[0, :-1]
    head = OutputHead(model, choose_path(model).geometry)
    assert head.plain == plain
    found_E = head.logprobs(hidden_PH, temperatures_P, source_E, targets_E, forbidden.items())
    (found_E * upstream_E).sum().backward()
    torch.testing.assert_close(found_E, expected_E, atol=1e-5, rtol=1e-5)
    for found, wanted in zip(take_gradients(parameters), expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert found is not None
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_logits_that_are_made_of_more_than_the_hidden_states_are_refused() -> None:
    class Twisted(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if kwargs.get("input_ids") is not None:
                output.logits = output.logits + self.model.embed_tokens(kwargs["input_ids"]).abs().mean(
                    -1, keepdim=True
                )
            return output

    model = Twisted(LlamaConfig(**SMALL)).eval()
    with pytest.raises(TrainingError, match="computes its logits from more than the last hidden states of its 'model'"):
        OutputHead(model, choose_path(model).geometry)


def test_gradients_of_a_tied_layer_add_up_with_those_of_the_embeddings(
    tiny_llama: Path, trainers: list[TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PART, "cpu", 1)
    trainer = make(trainers, tiny_llama, grad_clip=1e9)
    assert is_tied(trainer.model.network)
    rows = sampled_rows(trainer)
    assert_same(gradients(trainer, rows), plain_loss(tiny_llama, rows))


class Scaled(LlamaForCausalLM):
    """A trained scale of the logits, which has no effect on them yet."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale
        return output


class Bigrams(LlamaForCausalLM):
    """Logits that depend on the last token besides, by weights that are zero at first."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + self.table(input_ids)
        return output


def test_weights_beside_the_output_layer_are_trained_even_if_they_have_no_effect_yet() -> None:
    model = Scaled(LlamaConfig(**SMALL)).eval()
    geometry = choose_path(model).geometry
    head = OutputHead(model, geometry)
    assert geometry is not None
    assert not head.plain
    hidden, tokens = torch.randn(3, 32), torch.tensor([4, 5, 6])
    head.logprobs(hidden, torch.ones(3), torch.arange(3), tokens).sum().backward()
    found, model.scale.grad = model.scale.grad, None
    logits = model.lm_head(hidden) * model.scale
    logits.log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
    torch.testing.assert_close(found, model.scale.grad)
    model.scale.requires_grad_(False)
    assert OutputHead(model, geometry).plain, "it is not trained, and has no effect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_weights_whose_gradient_needs_more_than_the_hidden_states_are_refused(dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        model = Bigrams(LlamaConfig(**SMALL)).eval().to(dtype)
        geometry = choose_path(model).geometry
    with pytest.raises(
        TrainingError, match=r"the embedded engine cannot train it; the gradient of 'table.weight' would be wrong"
    ):
        OutputHead(model, geometry)
    model.table.requires_grad_(False)
    OutputHead(model, geometry)
