"""The HTTP interface of a vLLM server, stateless.

Sampling is ``POST /v1/completions`` with token ids in and out. The other calls are to the development endpoints of the server, which
require ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import httpx
from pydantic_core import from_json, to_json

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.vllm.connections import Connections, events
from lightning_core.backends.vllm.constraint import follows_constraints, structured_outputs
from lightning_core.errors import ConfigError, InfrastructureError, describe

RELOAD_SECONDS = 900
"""Seconds that loading new weights may take."""
CPU_ARGS = ("--no-enable-chunked-prefill",)
"""Additional arguments for a server on a CPU. vLLM (0.27.1 and 0.32.0) resets the random numbers of a seeded request whose prompt is
computed in chunks, which PyTorch's CPU generator does not support: the engine and the server end."""
_ANSWER_SECONDS = 120
_PIECE = 16_384
"""Tokens of a prompt that are written at once, in about half a millisecond."""
_PROMPT = b'"prompt":'
_REPEATED = b'"prompt_token_ids":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Newly sampled tokens in one response or event."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The model and the settings of a server."""

    model: str
    """The name of the model in requests."""
    max_context: int
    device: str
    """Such as ``cuda`` or ``cpu``."""
    constrains: bool
    """Whether it can constrain responses; see `follows_constraints`."""


class VllmApi:
    """The server at ``url``.

    Every method raises `InfrastructureError` for errors and unexpected responses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tls = httpx.create_ssl_context()
        self._connections = Connections(self._tls)

    # Sampling -----------------------------------------------------------------------------------------------------------

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool
    ) -> AsyncGenerator[Part]:
        """Sample one response, in parts with ``stream``.

        Closing the generator disconnects, which stops the sampling.
        """
        path, prompt = "/v1/completions", await _json(list(prompt_ids))
        last: Part | None = None
        try:
            async with await self._connections.post(
                self.url + path, _request(prompt, params, model, stream)
            ) as response:
                if response.status != 200:
                    raise self._refused(path, response.status, (await response.read()).decode(errors="replace"))
                if stream:
                    async for event in events(response):
                        if event != b"[DONE]":
                            last = self._read(event, prompt, params)
                            yield last
                else:
                    last = self._read(await response.read(), prompt, params)
                    yield last
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise self._unexpected(str(error)) from error
        if last is None:  # vLLM sends no event for a response that is aborted before the first token
            yield Part(token_ids=(), logprobs=(), finish_reason="abort")
        elif last.finish_reason is None:
            raise self._unexpected("an incomplete response")

    def _read(self, answer: bytes, prompt: bytes, params: SamplingParams) -> Part:
        """A part from the JSON of a response or event, checked, because it is trained on."""
        try:
            value = from_json(without_prompt(answer, prompt))
            if "error" in value:
                raise InfrastructureError(f"the vLLM server {self.url} failed while sampling: {_text(answer)[:300]}")
            (choice,) = value["choices"]
            ids, reason, repeated = choice["token_ids"] or [], choice["finish_reason"], choice.get("prompt_token_ids")
            logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
            # vLLM writes -9999 for minus infinity; such a token cannot have been sampled.
            good = all(isinstance(p, float | int) and -9999 < p < 0.01 for p in logprobs) and len(logprobs) == len(ids)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unexpected(_text(answer)) from error
        if not good or reason not in ("stop", "length", "abort", None):
            raise self._unexpected(_text(answer))
        if repeated is not None and repeated != from_json(prompt):
            raise InfrastructureError(f"the vLLM server {self.url} did not sample from the prompt that it was sent")
        if reason == "stop" and (not ids or ids[-1] not in params.stop_token_ids):
            raise InfrastructureError(
                f"the vLLM server {self.url} ended a response with the tokens {ids[-1:]!r}; expected one of "
                f"{sorted(params.stop_token_ids)!r}. Start it with --generation-config vllm, which disables other stop tokens"
            )
        return Part(token_ids=ids, logprobs=logprobs, finish_reason=reason)

    # Control ------------------------------------------------------------------------------------------------------------

    def server_info(self) -> ServerInfo:
        """The model and the settings.

        Raises `ConfigError` if the server was not started with the required ones.
        """
        models = self._call("GET", "/v1/models")
        if self._status("/is_paused") == 404:
            raise ConfigError(
                f"the vLLM server {self.url} cannot load new weights: start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        config = self._call("GET", "/server_info", params={"config_format": "json"})
        try:
            first = models["data"][0]
            config = config["vllm_config"]
            mode: str = config["model_config"]["logprobs_mode"]
            device: str = config["device_config"]["device"]
            pieces: bool = config["scheduler_config"]["enable_chunked_prefill"]
            info = ServerInfo(
                model=first["id"],
                max_context=int(first["max_model_len"]),
                device=device,
                constrains=follows_constraints(config),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise self._unexpected(f"{models} and {config}") from error
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server {self.url} reports {mode}, not the logprobs of the distribution that is sampled from: "
                "start it with --logprobs-mode processed_logprobs"
            )
        if device == "cpu" and pieces:
            raise ConfigError(
                f"the vLLM server {self.url} runs on a CPU with chunked prefill, and ends there when a request has a seed: start it with "
                f" {' '.join(CPU_ARGS)}"
            )
        return info

    def abort(self) -> None:
        """Hold back new requests and end running ones with the reason ``abort``."""
        self._call("POST", "/pause", params={"mode": "abort"})

    def reload(self, folder: Path) -> None:
        """Replace the weights by those in ``folder``, and clear the prefix cache."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", json=body, timeout=RELOAD_SECONDS)
        if self._call("POST", "/reset_prefix_cache").get("success", True) is not True:
            raise InfrastructureError(f"the vLLM server {self.url} could not clear its prefix cache")

    def resume(self) -> None:
        """Admit requests again."""
        self._call("POST", "/resume")

    def _status(self, path: str) -> int:
        try:
            with self._client() as client:
                return client.get(path).status_code
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            with self._client() as client:
                response = client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(path, response.status_code, response.text)
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise self._unexpected(response.text) from error

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self._tls, timeout=_ANSWER_SECONDS, trust_env=False)

    # Errors -------------------------------------------------------------------------------------------------------------

    def _unreachable(self, error: Exception) -> InfrastructureError:
        return InfrastructureError(
            f"no response from the vLLM server {self.url}: {describe(error)}. Check that it is running"
        )

    def _refused(self, path: str, status: int, text: str) -> InfrastructureError:
        return InfrastructureError(f"the vLLM server {self.url} returned status {status} for {path}: {text[:500]}")

    def _unexpected(self, actual: str) -> InfrastructureError:
        return InfrastructureError(
            f"the vLLM server {self.url} returned {actual[:300]!r}; expected a response of vLLM 0.27 or later"
        )


async def _json(prompt_ids: list[int]) -> bytes:
    """JSON of a prompt. Between the pieces of a long one, other requests go on: a thread would hold the interpreter all the time."""
    pieces: list[bytes] = []
    for start in range(0, len(prompt_ids), _PIECE):
        if start:
            await asyncio.sleep(0)
        pieces.append(to_json(prompt_ids[start : start + _PIECE])[1:-1])
    return b"[" + b",".join(pieces) + b"]"


def without_prompt(answer: bytes, prompt: bytes) -> bytes:
    """``answer`` without the prompt that it repeats, if that is ``prompt``: comparing takes a hundredth of the time of parsing."""
    start = answer.find(_REPEATED) + len(_REPEATED)
    if start < len(_REPEATED) or not answer.startswith(prompt, start):
        return answer
    return answer[:start] + b"null" + answer[start + len(prompt) :]


def _request(prompt: bytes, params: SamplingParams, model: str, stream: bool) -> bytes:
    constraint = structured_outputs(params)
    body = {
        **({} if constraint is None else {"structured_outputs": constraint}),
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": None if params.seed is None else params.seed % (1 << 63),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": True,  # only the stop tokens above
        "stream": stream,
        "logprobs": 0,  # of the sampled token only
        "return_token_ids": True,
        # Defaults come from the model's generation_config.json.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return to_json(body)[:-1] + b"," + _PROMPT + prompt + b"}"


def _text(answer: bytes) -> str:
    return answer.decode(errors="replace")
