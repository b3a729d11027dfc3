"""Scores tokens with the model of a vLLM server: the logprobs of a prompt, ``prompt_logprobs`` of ``POST /v1/completions``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np

from lightning_core.endpoint.transport.api_key import read_api_key
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError, describe
from lightning_core.signals.distill.section import Distill
from lightning_core.trace import Floats
from lightning_core.transitions import Candidates, Row, Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECTIONS = 16
"""Requests at the same time by default."""
TIMEOUT_SECONDS = 300.0
"""Longest time for a response by default."""
_PROBE = "The quick brown fox jumps over 13 lazy dogs; SELECT name FROM users WHERE id = 42"


PlaceLogprobs = Mapping[str, Mapping[str, Any]]
"""Entries by token id: ``logprob``, and ``decoded_token`` if the server decodes."""


class _BadRequest(InfrastructureError):
    """The server does not accept the request's content."""


class ServerScorer:
    """Logprobs at temperature 1 under the model of the server at ``url``.

    ``encode`` and ``decode``: the policy's tokenizer. ``count``: of `candidates`; 0: not used. Raises `ConfigError` if the server
    has another vocabulary or no prompt logprobs, `InfrastructureError` if it does not respond.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[int], str],
        count: int = 0,
        vocabulary: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        connections: int = CONNECTIONS,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._count = count
        self._vocabulary = vocabulary
        self._connections = connections
        self._warned = False
        self._client = httpx.Client(
            base_url=self.url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0),
        )
        try:
            self._model: str = self._request("GET", "/v1/models")["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise InfrastructureError(f"the server {self.url} lists no model under /v1/models") from error
        ids = list(encode(_PROBE))
        try:
            entries = self._prompt_logprobs(ids)
        except _BadRequest as error:
            raise ConfigError(
                f"algorithm.distill.teacher: {error}. It was sent tokens of the policy; a teacher scores those, so both need the same "
                "tokenizer" + (f", and it must return {count} logprobs a token (vLLM: --max-logprobs)" if count else "")
            ) from error
        for token, listed in zip(ids[1:], entries, strict=True):
            entry = listed[str(token)]
            if entry.get("decoded_token") not in (None, decode(token)):
                raise ConfigError(
                    f"algorithm.distill.teacher: the server {self.url} decodes the token {token} as {entry['decoded_token']!r}, the "
                    f"policy's tokenizer as {decode(token)!r}; a teacher scores the policy's tokens, so both need the same tokenizer"
                )

    def logprobs(self, rows: Sequence[Row]) -> dict[str, Floats]:
        """The logprobs of the sampled tokens of ``rows``: float32 [T] by call id.

        Constrained calls are left out: the server knows no distribution over the allowed tokens. Raises `TrainingError` for tokens
        that were not sampled at temperature 1.
        """

        def read(row: Row, entries: Sequence[PlaceLogprobs]) -> dict[str, Floats]:
            scored = (entry[str(token)]["logprob"] for token, entry in zip(row.token_ids[1:], entries, strict=True))
            logprobs_L = np.array([0.0, *scored], dtype=np.float32)
            return {segment.call: logprobs_L[segment.start : segment.stop] for segment in _scored(row)}

        return self._by_call(rows, read)

    def candidates(self, rows: Sequence[Row], count: int) -> dict[str, Candidates]:
        """The ``count`` most likely tokens at the sampled tokens of ``rows``, by call id; calls and errors as of `logprobs`."""

        def read(row: Row, entries: Sequence[PlaceLogprobs]) -> dict[str, Candidates]:
            return {
                s.call: _most_likely(entries[s.start - 1 : s.stop - 1], count, self._vocabulary) for s in _scored(row)
            }

        return self._by_call(rows, read)

    def _by_call(
        self, rows: Sequence[Row], read: Callable[[Row, Sequence[PlaceLogprobs]], Mapping[str, T]]
    ) -> dict[str, T]:
        """The results of ``read`` on the server's answers, by call id. Answers are large, so each is read on its own thread."""
        for row in rows:
            _check(row)
        self._warn(rows)
        rows = [row for row in rows if any(_scored(row))]
        with ThreadPoolExecutor(self._connections) as threads:
            found = threads.map(lambda row: read(row, self._prompt_logprobs(row.token_ids.tolist())), rows)
            return {call: value for of_row in found for call, value in of_row.items()}

    def _warn(self, rows: Sequence[Row]) -> None:
        agents = sorted({row.agent for row in rows if len([*_scored(row)]) < len(row.segments)})
        if agents and not self._warned:
            self._warned = True
            logger.warning(
                "algorithm.distill: a teacher on a server cannot score a response that was constrained to a JSON schema or to tool "
                "calls. Such responses have no term of the teacher, first of %s; use a teacher in this process, or leave them out of "
                "algorithm.distill.agents. The metric tokens_distill_constrained counts their tokens from now on",
                agents,
            )

    def _prompt_logprobs(self, ids: Sequence[int]) -> list[PlaceLogprobs]:
        """The server's logprobs at each of ``ids`` but the first, of that token and of the most likely ones."""
        body = {
            "model": self._model,
            "prompt": list(ids),
            "prompt_logprobs": self._count,  # 0: of the tokens themselves only
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = self._request("POST", "/v1/completions", json=body)
        try:
            listed = answer["choices"][0]["prompt_logprobs"]
            entries: list[PlaceLogprobs] = listed[1:]
            for token, entry in zip(ids[1:], entries, strict=True):
                found = [of["logprob"] for of in (entry[str(token)], *entry.values())]
                if not all(isinstance(value, float | int) and not math.isnan(value) for value in found):
                    raise TypeError("a logprob is not a number")
                if len(entry) < self._count:
                    raise ValueError(f"found {len(entry)} of {self._count} logprobs in the place of a token")
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"algorithm.distill.teacher: the server {self.url} returned no logprob for each token of the prompt ({describe(error)}); "
                "expected prompt_logprobs as in vLLM"
            ) from error
        return entries

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._client.request(method, path, **options)
            if response.status_code != 200:
                kind = _BadRequest if response.status_code == 400 else InfrastructureError
                raise kind(
                    f"the teacher's server {self.url} returned status {response.status_code} for {path}: {response.text[:500]}"
                )
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise InfrastructureError(
                f"no usable response from the teacher's server {self.url} (algorithm.distill.teacher): {describe(error)}"
            ) from error


def open_scorer(distill: Distill, tokenizer: Any, *, vocabulary: int | None = None) -> ServerScorer:
    """The teacher of ``distill`` that is a server's model.

    ``tokenizer``: the policy's. ``vocabulary``: the number of tokens that the policy has logits for; a server may know more. Raises the
    errors of `ServerScorer`.
    """
    assert distill.server is not None, "the teacher is a server's model"
    return ServerScorer(
        distill.server,
        api_key=read_api_key(distill.api_key_env, "algorithm.distill.api_key_env"),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda token: tokenizer.decode([token]),
        count=distill.candidate_count,
        vocabulary=vocabulary,
        timeout_seconds=distill.timeout_seconds or TIMEOUT_SECONDS,
        connections=distill.connections or CONNECTIONS,
    )


def _most_likely(entries: Sequence[PlaceLogprobs], count: int, vocabulary: int | None) -> Candidates:
    """The server adds the prompt's own token where it is not among the most likely."""
    best = [
        sorted(((float(of["logprob"]), int(token)) for token, of in entry.items()), reverse=True)[:count]
        for entry in entries
    ]
    ids_TK = np.array([[token for _, token in tokens] for tokens in best], dtype="<u4")
    logprobs_TK = np.array([[value for value, _ in tokens] for tokens in best], dtype="<f4")
    return Candidates(
        token_ids_TK=ids_TK, logprobs_TK=np.where(ids_TK < (vocabulary or np.inf), logprobs_TK, -np.inf).astype("<f4")
    )


def _scored(row: Row) -> Iterator[Segment]:
    """The calls of ``row`` that were sampled from all tokens."""
    return (segment for segment in row.segments if segment.constraint is None)


def _check(row: Row) -> None:
    if not (row.temperatures[row.mask] == 1).all():
        found = sorted({float(t) for t in row.temperatures[row.mask]})
        raise TrainingError(
            f"algorithm.distill: a teacher on a server scores tokens at temperature 1, but these were sampled at {found}; set "
            "rollouts.temperature: 1.0"
        )
