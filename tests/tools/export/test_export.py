"""``lightning-rl export``: exported models give the logprobs of the trainer, and say where they came from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_core import fit
from lightning_core.model import peft
from lightning_core.model.merge import layers_of
from lightning_core.records.run_folder.manifest import VERL_TRACKER
from lightning_core.tools.cli.main import main
from lightning_core.tools.export.card import make_card
from lightning_core.tools.export.trained_model import find_trained
from tests.loop import test_early_end as early_end
from tests.model.families import FAMILIES, make_family
from tests.tools.export.runs import FEW, TOLERANCE, difference, model_logprobs, sequences, train, trainer_logprobs

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's use of it
]

IDS = sequences(259)
NEWEST = "step-000002"


def export(run: Path, out: Path, *options: str) -> Path:
    assert main(["export", str(run), str(out), *options]) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The message of a command that writes nothing and exits with 2."""
    assert main(["export", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("full", "policy"),
        ("top", "policy"),
        ("lora", "policy"),
        pytest.param("some-lora", "policy", marks=pytest.mark.long),
        pytest.param("several", "one", marks=pytest.mark.long),
        ("several", "two"),
    ],
)
def test_a_hugging_face_folder_gives_the_logprobs_of_the_trainer(
    run: Callable[[str], Path], base: Path, tmp_path: Path, kind: str, policy: str
) -> None:
    options = ["--policy", policy, "--dtype", "float32"]
    model = AutoModelForCausalLM.from_pretrained(export(run(kind), tmp_path / "out", *options))
    expected = trainer_logprobs(run(kind), NEWEST, IDS, policy)
    assert difference(model_logprobs(model, IDS), expected) < TOLERANCE
    untrained = model_logprobs(AutoModelForCausalLM.from_pretrained(base), IDS)
    assert difference(untrained, expected) > 100 * TOLERANCE, "training changed the model"


def test_it_is_bfloat16_unless_told_otherwise_and_has_the_tokenizer_and_the_template(
    run: Callable[[str], Path], base: Path, tmp_path: Path
) -> None:
    out = export(run("full"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.generation_config.eos_token_id == 256
    messages = [{"role": "user", "content": "hi"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False) for folder in (base, out)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("lora", "policy"),
        pytest.param("some-lora", "policy", marks=pytest.mark.long),
        pytest.param("several", "two", marks=pytest.mark.long),
    ],
)
def test_an_adapter_gives_the_logprobs_of_the_trainer_in_peft(
    run: Callable[[str], Path], base: Path, tmp_path: Path, kind: str, policy: str
) -> None:
    out = export(run(kind), tmp_path / "out", "--format", "peft", "--policy", policy)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert difference(model_logprobs(model, IDS), trainer_logprobs(run(kind), NEWEST, IDS, policy)) < TOLERANCE


def test_another_checkpoint_is_exported_by_name(run: Callable[[str], Path], tmp_path: Path) -> None:
    out = export(run("full"), tmp_path / "out", "--checkpoint", "step-000001", "--dtype", "float32")
    found = model_logprobs(AutoModelForCausalLM.from_pretrained(out), IDS)
    assert difference(found, trainer_logprobs(run("full"), "step-000001", IDS)) < TOLERANCE
    assert difference(found, trainer_logprobs(run("full"), NEWEST, IDS)) > 100 * TOLERANCE
    assert "were not evaluated" in (out / "README.md").read_text()


def test_the_model_card_has_data_rewards_and_commit(run: Callable[[str], Path], tmp_path: Path) -> None:
    folder = run("lora")
    text = (export(folder, tmp_path / "my-model") / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert "base_model" not in yaml.safe_load(header), "a folder's path is not a model on the Hub"
    assert "# my-model" in body
    assert "LoRA, rank 4, alpha 12" in body
    assert "32 rollouts of 4 tasks" in body
    assert "advantage `grpo`" in body
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("eval_reward_before", "eval_reward_after", "improvement"):
        assert re.search(rf"\| {summary[key]:.3f} \| -?\d\.\d+ to \d\.\d+ \|", body)


def test_the_card_says_that_the_reward_of_the_best_checkpoint_is_biased(base: Path, tmp_path: Path) -> None:
    own = early_end.config(base, tmp_path, trainer={"steps": 2, "keep_best": True})
    solve = early_end.scoring([0.1, 0.9, 0.2])
    folder = fit(solve, config=own, eval_tasks=early_end.HELD_OUT).folder

    def card(checkpoint: str | None) -> str:
        return make_card(find_trained(folder, checkpoint=checkpoint), title="t", library="transformers", usage="")

    assert "| after | 0.900 |" in card("best")
    assert "the highest mean reward of 2 evaluations" in card("best")
    assert "biased upwards" in card("step-000001"), "also by its own name"
    assert "| after | 0.200 |" in card(None)
    assert "biased" not in card(None)


def test_the_model_card_lists_the_commits_without_the_messages_of_git(
    run: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(run("full"), tmp_path / "run")
    lines = ("abc with untracked files", "from step 1: def, changes unknown: fatal: /secret")
    (folder / "commit.txt").write_text("\n".join(lines) + "\n")
    card = (export(folder, tmp_path / "out") / "README.md").read_text()
    assert "| abc with untracked files<br>from step 1: def, changes unknown |" in card


def test_the_model_card_lists_the_settings_that_differ_from_the_defaults(run: Callable[[str], Path]) -> None:
    """Without paths and keys, which the arguments of a rule may contain."""
    settings = ["algorithm.mini_batches=2", "algorithm.truncated=mask", "trainer.schedule=cosine"]
    trained = find_trained(run("full"), overrides=[*settings, "credit.air={tool_error: -0.1}"])
    credit = trained.policy.credit.model_copy(update={"advantage_args": {"floor": 0.5, "key": "/a/secret"}})
    trained = replace(trained, policy=replace(trained.policy, credit=credit))
    card = make_card(trained, title="t", library="transformers", usage="")
    text = re.search(r"## Settings\n.*?```yaml\n(.*?)```", card, re.DOTALL)
    assert text is not None
    assert yaml.safe_load(text[1]) == {
        "credit": {"advantage_args": {"floor": 0.5}, "air": {"tool_error": -0.1}},
        "algorithm": {"mini_batches": 2, "truncated": "mask"},
        "rollouts": {"tasks_per_step": 2, "max_tokens": 6, "executor": "task"},
        "trainer": {"steps": 2, "learning_rate": 0.005, "schedule": "cosine", "checkpoint_every": 1},
    }


def test_a_run_from_before_checkpoints_were_folders_of_models_is_exported(base: Path, tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "data" / "run_of_0_1_0"
    folder = shutil.copytree(stored, tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("MODEL", str(base)).replace("RUNS", str(tmp_path)))
    out = export(folder, tmp_path / "out", "--dtype", "float32")
    found = model_logprobs(AutoModelForCausalLM.from_pretrained(out), IDS)
    assert difference(found, trainer_logprobs(folder, NEWEST, IDS)) < TOLERANCE


def test_what_verl_exported_is_exported(run: Callable[[str], Path], base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = folder / "checkpoints" / "global_step_3" / "actor" / "huggingface"
    shutil.copytree(base, model)
    (folder / "checkpoints" / VERL_TRACKER).write_text("3")
    text = (run("full") / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text)
    verl = ["trainer.name=verl", "policy.device=auto", "agent=tests.bandit:solve"]
    out = export(folder, tmp_path / "out", "--dtype", "float32", *verl)
    found = model_logprobs(AutoModelForCausalLM.from_pretrained(out), IDS)
    assert difference(found, model_logprobs(AutoModelForCausalLM.from_pretrained(base), IDS)) < TOLERANCE


def test_the_folder_appears_whole_or_not_at_all(
    run: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    export(run("lora"), tmp_path / "empty")
    assert "is not an empty folder" in refused(capsys, run("lora"), tmp_path / "empty")
    damaged = shutil.copytree(run("lora"), tmp_path / "damaged")
    (damaged / "checkpoints" / NEWEST / "adapter_model.safetensors").write_bytes(b"nothing")
    assert "has 7 bytes, but was written with" in refused(capsys, damaged, tmp_path / "out", "--checkpoint", NEWEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "empty"]


def test_what_cannot_be_exported_is_refused_with_the_reason(
    run: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    no_checkpoint = tmp_path / "new"
    no_checkpoint.mkdir()
    shutil.copy(run("full") / "config.yaml", no_checkpoint)
    for message, arguments in {
        "is not a run's folder: expected config.yaml": ["missing", out],
        "has no checkpoint yet": [no_checkpoint, out],
        "--checkpoint 'step-9': the run": [run("full"), out, "--checkpoint", "step-9"],
        "trained ['one', 'two']": [run("several"), out, "--policy", "three"],
        "choose one of ['one', 'two'] with --policy": [run("several"), out],
        "has no adapter: use --format hf": [run("full"), out, "--format", "peft"],
        "--dtype q8_0 needs --format gguf": [run("full"), out, "--dtype", "q8_0"],
        "found no convert_hf_to_gguf.py there": [run("full"), out, "--format", "gguf"],
        "no model folder at '/none'": [run("full"), out, "policy.model=/none"],
        "expected the name of a repository": [run("full"), out, "--push", "a b/c"],
    }.items():
        assert message in refused(capsys, *arguments)
    assert not out.exists()


MAMBA = pytest.mark.parametrize("family", [pytest.param("falcon_h1", marks=pytest.mark.long), "nemotron_h"])


@MAMBA
def test_adapters_that_peft_refuses_are_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft refuses adapters on the output projections of Mamba layers."""
    base = make_family(FAMILIES[family], tmp_path / "model")
    run = train(tmp_path, base, policy={"tuning": "lora", "max_context": 128}, **FEW)
    message = refused(capsys, run, tmp_path / "adapter", "--format", "peft")
    assert "out_proj" in message
    assert f"of {family!r}: use --format hf, or train without them (policy.lora.target_modules)" in message
    assert not (run / "checkpoints" / NEWEST / "adapter_config.json").exists()
    weights = peft.from_peft(load_file(run / "checkpoints" / NEWEST / peft.WEIGHTS))
    config = LoraConfig(target_modules=layers_of(weights))
    with pytest.raises(ValueError, match="is incompatible with Mamba-based models"):
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


@pytest.mark.long
@MAMBA
def test_adapters_of_the_other_layers_of_these_models_are_opened_by_peft(family: str, tmp_path: Path) -> None:
    base = make_family(FAMILIES[family], tmp_path / "model")
    policy = {"tuning": "lora", "lora": {"target_modules": ["q_proj", "o_proj"]}, "max_context": 128}
    adapter = export(train(tmp_path, base, policy=policy, **FEW), tmp_path / "adapter", "--format", "peft")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("phimoe", "glm4_moe"))]
)
def test_mixtures_of_experts_are_exported_by_the_names_of_their_base(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """phimoe's router is a linear layer that returns a tuple, so it gets no adapter.

    glm4_moe has shared experts, whose adapters peft takes for those of its fused experts.
    """
    base = make_family(FAMILIES[family], tmp_path / "model")
    run = train(tmp_path, base, policy={"tuning": "lora", "max_context": 128}, **FEW)
    ids, expected = IDS[:1], trainer_logprobs(run, NEWEST, IDS[:1])
    out = export(run, tmp_path / "out", "--dtype", "float32")
    assert difference(model_logprobs(AutoModelForCausalLM.from_pretrained(out), ids), expected) < TOLERANCE
    assert difference(model_logprobs(AutoModelForCausalLM.from_pretrained(base), ids), expected) > 10 * TOLERANCE
    names = [list(load_file(folder / "model.safetensors")) for folder in (base, out)]
    assert names[0] == names[1], "transformers has the experts of a layer in one tensor"

    if family == "glm4_moe":
        assert "for adapters of experts" in refused(capsys, run, tmp_path / "adapter", "--format", "peft")
        assert not (run / "checkpoints" / NEWEST / "adapter_config.json").exists()
    else:
        adapter = export(run, tmp_path / "adapter", "--format", "peft")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        assert difference(model_logprobs(model, ids), expected) < TOLERANCE
