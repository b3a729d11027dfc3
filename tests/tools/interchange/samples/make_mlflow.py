"""Traces of MLflow: as ``Trace.to_dict`` and as the data frame of ``mlflow.search_traces``."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import mlflow
import mlflow.langchain
import mlflow.openai
import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from program import add, calculate, model_server, save

folder = Path(sys.argv[1])
with tempfile.TemporaryDirectory() as store, model_server() as url:
    os.chdir(store)
    mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
    mlflow.set_experiment("sample")
    mlflow.openai.autolog()
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tool = mlflow.trace(add, span_type="TOOL")

    @mlflow.trace(name="calculator", span_type="AGENT")
    def agent(question: str) -> str:
        return calculate(client, question, tool)

    agent("What is 2 + 3?")
    trace = mlflow.get_last_active_trace_id()
    with contextlib.suppress(openai.BadRequestError):
        agent("Please fail.")
    mlflow.flush_trace_async_logging()
    mlflow.log_feedback(trace_id=trace, name="correct", value=True)
    mlflow.log_feedback(trace_id=trace, name="style", value="plain")
    traces = mlflow.search_traces(return_type="list", order_by=["timestamp ASC"])
    save(folder / "mlflow_traces.json", json.dumps([t.to_dict() for t in traces], default=str))
    frame = mlflow.search_traces(return_type="pandas", order_by=["timestamp ASC"])
    save(folder / "mlflow_frame.jsonl", frame.to_json(orient="records", lines=True))

# The same agent by LangChain, whose tracer has messages in LangChain's own form.
with tempfile.TemporaryDirectory() as store, model_server() as url:
    os.chdir(store)
    mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
    mlflow.set_experiment("sample")
    mlflow.openai.autolog(disable=True)
    mlflow.langchain.autolog()
    chat = ChatOpenAI(model="gpt-4o-mini", base_url=url, api_key="none", max_retries=0, temperature=0.5)
    graph = create_agent(chat, [add], system_prompt="You calculate with tools.", name="calculator")
    graph.invoke({"messages": [("user", "What is 2 + 3?")]})
    mlflow.flush_trace_async_logging()
    traces = mlflow.search_traces(return_type="list")
    save(folder / "mlflow_langchain.json", json.dumps([t.to_dict() for t in traces], default=str))
