"""The tokens that a JSON schema or a grammar allows next, for sampling and for training.

A constrained response is sampled from the policy's distribution over the allowed tokens, and its recorded logprobs are
computed over this distribution, not the full softmax. The trainer follows the constraint along the sampled tokens and takes the
gradient of the same distribution. The automaton is llguidance's (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_core.chat.output_grammar import ARGUMENTS, COMPACT, ToolSchemaError, schemas
from lightning_core.errors import ConstraintError, MissingExtra, shorten
from lightning_core.model.schema_errors import SUPPORTED, explain_schema

_FINITE = "Check that values of a finite size satisfy the schema, and that no reference is endlessly recursive"


class Constraints:
    """Compiles constraints of `SamplingParams` for one tokenizer and V logits.

    Thread-safe.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes of the endpoint, which compile the constraints of their own requests."""
        return Constraints, (self._tokenizer, self._vocabulary)

    def start(self, constraint: str) -> Walk:
        """A walk at the start of a response.

        Raises `ConstraintError` for an unsupported schema.
        """
        matcher = self._compiled.get(constraint)
        if matcher is None:
            matcher = self._compile(constraint)  # without the lock: it takes a time that the schema chooses
            with self._lock:
                if len(self._compiled) >= 256:
                    self._compiled.clear()
                matcher = self._compiled.setdefault(constraint, matcher)
        return Walk(matcher.deep_copy())

    def allowed(self, constraint: str, output_ids: Sequence[int]) -> Iterator[NDArray[np.bool_]]:
        """Masks [V], bool, of the tokens that were allowed in the place of each of ``output_ids``."""
        walk = self.start(constraint)
        for token in output_ids:
            yield walk.allowed()
            walk.accept(token)

    def _compile(self, constraint: str) -> Any:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "llguidance", "torch", "structured output") from error
        spec = json.loads(constraint)
        stops = tuple(spec["stop_token_ids"])
        with self._lock:
            if stops not in self._tokenizers:
                self._tokenizers[stops] = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary, eos_token=list(stops) or None
                )
        matcher: Any = None
        try:
            grammar = spec.get("grammar") or LLMatcher.grammar_from_json_schema(spec["json_schema"], overrides=COMPACT)
            matcher = LLMatcher(self._tokenizers[stops], grammar, log_level=0)
            problem: str = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:  # a schema that is no object, or an integer of more than 64 bits
            problem = str(error)
        if problem:
            found = [(name, json.loads(schema)) for name, schema in schemas(spec.get("grammar", ""))]
            if "json_schema" in spec:
                found.append(("", spec["json_schema"]))
            for name, schema in found:
                if why := explain_schema(schema):
                    if name.startswith(ARGUMENTS):
                        raise ToolSchemaError(f"this JSON schema is not supported: {why}", schema)
                    raise ConstraintError(f"this JSON schema is not supported: {why}")
            why = shorten(problem.split("\n")[0], 300)  # without the text of the grammar
            raise ConstraintError(
                f"this JSON schema is not supported: {why}. Rewrite it; {SUPPORTED} lists what is supported"
            )
        Walk(matcher.deep_copy()).allowed()
        return matcher


class Walk:
    """The state of one response in its constraint."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may come next. Raises `ConstraintError` if there are none, as with a schema without finite values."""
        found = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        if self._matcher.is_error() or not found.any():
            raise ConstraintError(f"the response cannot follow the JSON schema: {self._problem()}. {_FINITE}")
        return found

    def accept(self, token: int) -> None:
        """Advance by ``token``. Raises `ConstraintError` if it is not allowed."""
        if not self._matcher.consume_token(token):
            raise ConstraintError(
                f"the response cannot follow the JSON schema: token {token}: {self._problem()}. {_FINITE}"
            )

    def _problem(self) -> str:
        # What follows is the state of the parser.
        problem = self._matcher.get_error().strip().split("\n")[0][:200]
        return "no text satisfies it" if problem in ("", "NoExtensionBias") else problem
