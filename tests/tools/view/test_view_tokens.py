"""Texts of single tokens, and the bins of their colors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_core.records.run_folder.runs import RunInfo, read_run
from lightning_core.tools.view.tokenizers import TokenTexts, find_tokenizer, split_bytes
from lightning_core.tools.view.tokens import ADVANTAGES, signed_bin
from tests.tools.view.made_runs import make_run
from tests.tools.view.recorded_run import make_tokenizer

tokenizers: Any = pytest.importorskip("tokenizers")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([b"a", b" b"], [("a", None), (" b", None)]),
        (["é".encode()[:1], "é".encode()[1:] + b"x"], [("", b"\xc3"), ("éx", b"\xa9x")]),
        ([b"a" + "🚀".encode()[:2], "🚀".encode()[2:]], [("a", b"a\xf0\x9f"), ("🚀", b"\x9a\x80")]),
        ([b"\xff", b"ok", b"\xe2\x82"], [(r"\xff", b"\xff"), ("ok", None), (r"\xe2\x82", b"\xe2\x82")]),
        ([b"\xe2", b"a"], [(r"\xe2", b"\xe2"), ("a", None)]),
        ([b"\xed\xa0\x80"], [(r"\xed\xa0\x80", b"\xed\xa0\x80")]),  # half of a surrogate pair
        ([b"", b"a"], [("", None), ("a", None)]),
        ([], []),
    ],
)
def test_a_character_belongs_to_the_token_with_its_last_byte(
    tokens: list[bytes], expected: list[tuple[str, bytes | None]]
) -> None:
    assert split_bytes(tokens) == expected


@pytest.fixture
def sentences() -> Any:
    """A tokenizer that decodes as Llama's: ``▁`` is a space, bytes for characters that it does not know, no leading space."""
    decoders, models = tokenizers.decoders, tokenizers.models
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_texts_of_tokens_that_are_not_bytes_join_to_the_decoded_text(sentences: Any) -> None:
    def ids(*tokens: str) -> list[int]:
        return [sentences.token_to_id(token) for token in tokens]

    rocket = [f"<0x{byte:02X}>" for byte in "🚀".encode()]
    response = ids("▁a", "b", "▁b", *rocket, "a", "▁", "▁a")
    texts = TokenTexts(sentences)
    pieces = texts.pieces(response, ids("▁b"))
    assert [piece.text for piece in pieces] == [" a", "b", " b", "", "", "", "🚀", "a", " ", " a"]
    assert pieces[3].part == b"\xf0"
    assert "".join(piece.text for piece in pieces) == sentences.decode([*ids("▁b"), *response])[1:]
    assert [piece.text for piece in texts.pieces(ids("▁a", "▁a"))] == ["a", " a"]
    assert "".join(piece.text for piece in texts.pieces(ids("<0xFF>", "a"))) == "\ufffda"


def run_with(folder: Path, **config: Any) -> RunInfo:
    make_run(folder / "run", config=config)
    return read_run(folder / "run")


def test_the_tokenizer_of_the_newest_checkpoint_comes_first(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model")
    run = run_with(tmp_path, policy={"model": str(model)}, policies={"first": {"agents": ["a"]}})
    assert find_tokenizer(run, "policy").texts is not None
    for checkpoint in ("step-000001/first", "step-000002"):
        path = run.folder / "checkpoints" / checkpoint
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text("damaged")
    # Those of the checkpoints are damaged, so that the model's own is used; without it they are a message that names the file.
    assert find_tokenizer(run, "first").texts is not None
    (model / "tokenizer.json").unlink()
    for policy, path in (("first", "step-000001/first"), ("policy", "step-000002")):
        assert f"{path}/tokenizer.json' cannot be read" in str(find_tokenizer(run, policy).problem)


@pytest.mark.parametrize("policy", ["../../model", "/", "..", "no such policy", ""])
def test_the_name_of_a_model_leads_to_no_other_folder(tmp_path: Path, policy: str) -> None:
    """The name is what a server or an agent's process wrote."""
    make_tokenizer(tmp_path / "model")
    run = run_with(tmp_path, policy={"model": "name/on-the-hub"})
    (run.folder / "checkpoints" / "step-000001").mkdir(parents=True)
    found = find_tokenizer(run, policy)
    assert found.texts is None
    assert (
        found.problem
        == "Token texts need a tokenizer: tokenizer.json in a checkpoint of the run, or in the folder policy.model."
    )


def test_bins_have_a_sign_and_a_size() -> None:
    values = [-5.0, -1.0, -0.6, -0.01, 0.0, 0.009, 0.5, 2.0]
    assert [signed_bin(value, ADVANTAGES) for value in values] == ["d3", "d3", "d2", "d1", "0", "0", "u2", "u3"]
