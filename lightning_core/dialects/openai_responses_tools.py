"""Tools of OpenAI's Responses API: as functions that the model is shown, and the calls of each kind as items.

Functions, free-form tools and a tool search of the client are supported, in namespaces and in ``additional_tools`` items, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, cast

from lightning_core.chat.json_text import show_json
from lightning_core.dialects.fields import (
    NO_HOSTED_TOOLS,
    NO_SEARCH,
    OBJECT,
    DroppedField,
    Fields,
    UnsupportedField,
    check_function,
    check_left_out,
    note,
    objects,
    refused_tool,
)
from lightning_core.dialects.openai_custom_tools import custom_function, read_input
from lightning_core.errors import PolicyRequestError

_NOT_ASYNC = UnsupportedField("tool calls are not asynchronous here", unless=(False,))
_CALLERS = UnsupportedField(NO_HOSTED_TOOLS, unless=(["direct"], []))
TOOLS: Mapping[str, Fields] = {
    "function": Fields(
        supported=frozenset({"type", "name", "description", "parameters", "defer_loading"}),
        # Without a schema of the answer, arguments are not constrained, so the model is not shown `strict`.
        ignored=frozenset({"strict"}),
        dropped={"output_schema": DroppedField("the model is not shown the form of a tool's output", kind=OBJECT)},
        refused={"allowed_callers": _CALLERS, "async": _NOT_ASYNC},
    ),
    "custom": Fields(
        supported=frozenset({"type", "name", "description", "format", "defer_loading"}),
        refused={"allowed_callers": _CALLERS, "async": _NOT_ASYNC},
    ),
    "namespace": Fields(supported=frozenset({"type", "name", "description", "tools"})),
    "tool_search": Fields(supported=frozenset({"type", "execution", "description", "parameters"})),
}
"""Fields of a tool, by its type."""

LEFT_OUT = ("web_search", "image_generation")
"""Starts of the types of hosted tools that clients offer by default. They work without them."""
_SEARCH = "tool_search"
_ROOT = "functions"
"""The namespace of functions without one."""
_TOOL_ITEMS = ("additional_tools", "tool_search_output")
"""Types of the items that define tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of a request."""

    kind: Literal["function", "custom", "tool_search"]
    name: str
    namespace: str | None
    deferred: bool
    """Whether the model is shown it only after a search."""
    function: Mapping[str, Any]
    """The tool as chat completions define it."""

    @property
    def shown(self) -> str:
        """The name that the model is shown."""
        return self.function["function"]["name"]

    def __str__(self) -> str:
        kind = "free-form tool" if self.kind == "custom" else self.kind
        place = "" if self.namespace is None else f" in the namespace {self.namespace!r}"
        return f"the {kind} {self.name!r}{place}"


def shown_name(name: str, namespace: str | None) -> str:
    """The name that the model is shown. `request_tools` refuses different tools with the same one."""
    return name if namespace in (None, "", _ROOT) else f"{namespace}__{name}"


def request_tools(body: Mapping[str, Any], *, check: bool, earlier: Sequence[Mapping[str, Any]] = ()) -> list[Tool]:
    """The tools of a request, including its ``additional_tools`` items and tool searches.

    ``earlier``: the history that ``previous_response_id`` names, whose items are read in the same way. Raises `PolicyRequestError` for
    tools that are not supported, and for different tools with the same shown name; with ``check`` False, the former are left out.
    """
    left_out: list[str] = []
    tools = read_tools(objects(body, "tools"), "tools", left_out, check=check)
    tools += _item_tools(earlier, "previous_response_id", [], check=False)
    tools += _item_tools(_items(body), "input", left_out, check=check)
    if check:
        check_left_out(left_out, left=bool(tools))
        _check_names(tools)
    return tools


def _item_tools(items: Sequence[Any], place: str, left_out: list[str], *, check: bool) -> list[Tool]:
    """The tools that ``items`` define."""
    tools: list[Tool] = []
    for i, item in enumerate(items):
        if _defines_tools(item):
            path = f"{place}.{i}.tools"
            tools += read_tools(objects({path: item.get("tools")}, path), path, left_out, check=check)
    return tools


def _check_names(tools: Sequence[Tool]) -> None:
    """Raise `PolicyRequestError` if a call could be one of two different tools.

    The same tool may be given again: chat completions accept it, and a search returns tools that are also in ``tools``.
    """
    first: dict[str, Tool] = {}
    for tool in tools:
        other = first.setdefault(tool.shown, tool)
        if (tool.kind, tool.name) != (other.kind, other.name):
            raise PolicyRequestError(
                f"tools has {other} and {tool}, which are both shown to the model as {tool.shown!r}; "
                "expected a different name for each tool. Rename one of them",
                param="tools",
            )


def shown_tools(
    body: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The functions in the tool list of a prompt, and those that its messages define.

    The messages define what a search returns, and ``additional_tools`` after the start of the conversation. ``earlier``: the history that
    ``previous_response_id`` names. Raises as `request_tools`.
    """
    searchable = any(tool.kind == _SEARCH for tool in request_tools(body, check=True, earlier=earlier))
    start = [*_start(earlier), *leading_tools(body)]
    later = [*earlier[len(_start(earlier)) :], *_items(body)[len(leading_tools(body)) :]]
    listed = request_tools({"tools": body.get("tools"), "input": start}, check=False)
    return (
        [tool.function for tool in listed if not (tool.deferred and searchable)],
        [tool.function for tool in request_tools({"input": later}, check=False)],
    )


def recorded_tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools of a request that is forwarded: functions as chat completions define them, others as they are."""
    tools = objects(body, "tools")
    return [_function(tool) if tool.get("type") == "function" else tool for tool in tools]


def _items(body: Mapping[str, Any]) -> list[Any]:
    items = body.get("input")
    return cast("list[Any]", items) if isinstance(items, list) else []


def leading_tools(body: Mapping[str, Any]) -> list[Any]:
    """The ``additional_tools`` items at the start of a conversation; none in a request that continues one."""
    return _start(_items(body)) if body.get("previous_response_id") is None else []


def later_tools(body: Mapping[str, Any]) -> list[Any]:
    """The other items of the input that define tools."""
    return [item for item in _items(body)[len(leading_tools(body)) :] if _defines_tools(item)]


def without_tools(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a history, without the items that define tools."""
    return [entry for entry in history if not _defines_tools(entry)]


def _start(items: Sequence[Any]) -> list[Any]:
    return list(takewhile(lambda item: isinstance(item, Mapping) and item.get("type") == "additional_tools", items))


def _defines_tools(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") in _TOOL_ITEMS


def definitions(tools: Any, path: str) -> str:
    """The text that shows the model tools that are not in the prompt's list."""
    read = read_tools(objects({path: tools}, path), path, [], check=False)
    return json.dumps([tool.function["function"] for tool in read], ensure_ascii=False)


def read_tools(
    tools: Sequence[Mapping[str, Any]], path: str, left_out: list[str], *, check: bool, namespace: str | None = None
) -> list[Tool]:
    """The tools in a list, with those in namespaces. Types of hosted tools that are dropped are added to ``left_out``."""
    return [read for i, tool in enumerate(tools) for read in _read(tool, f"{path}.{i}", left_out, check, namespace)]


def _read(
    tool: Mapping[str, Any], path: str, left_out: list[str], check: bool, namespace: str | None
) -> Iterator[Tool]:
    kind = str(tool.get("type"))
    if check and kind in TOOLS:
        TOOLS[kind].check(tool, path)
    match tool:
        case {"type": "function"}:
            if check:
                check_function(tool, path)
            yield _tool("function", tool, path, namespace, _function(tool))
        case {"type": "custom"}:
            form = tool.get("format")
            grammar = form if isinstance(form, Mapping) and form.get("type") == "grammar" else None
            function = custom_function(tool.get("name"), tool.get("description"), grammar=grammar)
            yield _tool("custom", tool, path, namespace, function)
        case {"type": "namespace", "name": str(name), "tools": list()} if namespace is None:
            inside = read_tools(
                objects({path: tool["tools"]}, path), f"{path}.tools", left_out, check=check, namespace=name
            )
            yield from _described(inside, tool.get("description"))
        case {"type": "tool_search", "execution": "client"}:
            yield _tool("tool_search", {"name": _SEARCH}, path, None, _function({**tool, "name": _SEARCH}))
        case {"type": "tool_search"}:
            note(path, "a provider's tool search; the model is shown every tool at once")
        case _ if kind.startswith(LEFT_OUT):
            left_out.append(kind)
            note(f"{path} ({kind})", NO_SEARCH)
        case _ if check:
            raise refused_tool(tool.get("type"), f"{path}.type", list(TOOLS))
        case _:
            pass


def _tool(kind: Any, tool: Mapping[str, Any], path: str, namespace: str | None, function: Mapping[str, Any]) -> Tool:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise PolicyRequestError(f"{path} is {show_json(tool)}; expected a tool with a name", param=path)
    shown = {**function["function"], "name": shown_name(name, namespace)}
    return Tool(
        kind=kind,
        name=name,
        namespace=namespace,
        deferred=tool.get("defer_loading") is True,
        function={"type": "function", "function": shown},
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _described(tools: list[Tool], description: Any) -> list[Tool]:
    """``tools`` of a namespace, whose ``description`` is shown with the first one."""
    if not tools or not isinstance(description, str) or not description:
        return tools
    first = tools[0].function["function"]
    text = f"{tools[0].namespace}: {description}\n{first.get('description', '')}".rstrip()
    function = {"type": "function", "function": {**first, "description": text}}
    return [replace(tools[0], function=function), *tools[1:]]


def call_item(call: Mapping[str, Any], tools: Sequence[Tool], *, id: str, status: str) -> dict[str, Any]:
    """The item of a tool call, of the kind that its tool has."""
    function = call["function"]
    tool = next((tool for tool in tools if tool.shown == function["name"]), None)
    place = {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
    name = function["name"] if tool is None else tool.name
    head = {"call_id": call["id"], "status": status}
    match tool:
        case Tool(kind="custom"):
            written = {"name": name, **place, "input": read_input(function["arguments"])}
            return {"id": f"ctc_{id}", "type": "custom_tool_call", **head, **written}
        case Tool(kind="tool_search"):
            return {
                "id": f"tsc_{id}",
                "type": "tool_search_call",
                **head,
                "execution": "client",
                "arguments": _json(function["arguments"]),
            }
        case _:
            written = {"name": name, **place, "arguments": function["arguments"]}
            return {"id": f"fc_{id}", "type": "function_call", **head, **written}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_STREAMED = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The field of an item that is streamed, and the start of its events, by the item's type."""


def call_events(item: Mapping[str, Any], index: int) -> list[tuple[str, dict[str, Any]]]:
    """The stream events of a tool call up to its end: their types and fields."""
    streamed, event = _STREAMED.get(item["type"], ("", ""))
    empty = {streamed: ""} if streamed else {}
    started = {**item, **empty, "status": "in_progress"}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.output_item.added", {"output_index": index, "item": started})
    ]
    if streamed:
        place = {"item_id": item["id"], "output_index": index}
        name = {"name": item["name"]} if streamed == "arguments" else {}
        events.append((f"{event}.delta", {**place, "delta": item[streamed]}))
        events.append((f"{event}.done", {**place, **name, streamed: item[streamed]}))
    return events
