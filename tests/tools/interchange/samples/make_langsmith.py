"""Runs of LangSmith: what its client sends to ``/runs/multipart``, as the rows that run queries and bulk exports return."""

import contextlib
import json
import sys
import threading
from email.message import Message
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pyarrow
import zstandard
from langchain.agents import create_agent
from langchain_core.tracers.langchain import LangChainTracer, wait_for_all_tracers
from langchain_openai import ChatOpenAI
from langsmith import Client, traceable, tracing_context
from langsmith.types import Run
from langsmith.wrappers import wrap_openai
from program import add, calculate, model_server, save
from pyarrow import parquet

runs: dict[str, dict[str, Any]] = {}
feedback: list[dict[str, Any]] = []


class _Api(BaseHTTPRequestHandler):
    """The parts of LangSmith's API that the client uses to send runs."""

    def do_GET(self) -> None:
        limits = {
            "size_limit": 100,
            "size_limit_bytes": 1 << 20,
            "scale_up_nthreads_limit": 1,
            "scale_up_qsize_trigger": 100,
        }
        self._send({"batch_ingest_config": {**limits, "scale_down_nempty_trigger": 4, "use_multipart_endpoint": True}})

    def do_POST(self) -> None:
        data = self._body()
        if self.headers.get("Content-Encoding") == "zstd":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        if "multipart" in self.headers["Content-Type"]:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            for part in BytesParser().parsebytes(head + data).get_payload():
                self._keep(part)
        else:
            feedback.append(json.loads(data))
        self._send({})

    do_PATCH = do_POST

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _keep(self, part: Message) -> None:
        kind, identity, *field = str(part.get_param("name", header="content-disposition")).split(".")
        value = json.loads(part.get_payload(decode=True))
        if kind == "feedback":
            feedback.append(value)
        else:
            run = runs.setdefault(identity, {})
            run.update({field[0]: value} if field else value)

    def _send(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


folder = Path(sys.argv[1])
api = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
threading.Thread(target=api.serve_forever, daemon=True).start()
client = Client(api_url=f"http://127.0.0.1:{api.server_port}", api_key="none")
with model_server() as url, tracing_context(enabled=True, client=client):
    model = wrap_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    tool = traceable(add, run_type="tool", client=client)

    @traceable(name="calculator", run_type="chain", client=client, metadata={"agent": "calculator"})
    def agent(question: str) -> str:
        return calculate(model, question, tool)

    agent("What is 2 + 3?")
    with contextlib.suppress(openai.BadRequestError):
        agent("Please fail.")
client.flush()
root = next(run for run in runs.values() if run.get("parent_run_id") is None and not run.get("error"))
client.create_feedback(run_id=root["id"], key="correct", score=1.0, trace_id=root["id"])
client.flush()
rows = list(runs.values())
root["feedback_stats"] = {f["key"]: {"n": 1, "avg": f["score"]} for f in feedback}  # as a query returns it
save(folder / "langsmith_runs.json", json.dumps({"runs": rows}))
fields = ("id", "trace_id", "name", "start_time", "end_time", "inputs", "outputs", "error", "extra", "feedback_stats")
queried: list[str] = []
for row in rows:  # as `client.runs.query` returns them
    extra = dict(row["extra"])
    own = {
        "metadata": extra.pop("metadata"),
        "extra": extra,
        "run_type": row["run_type"].upper(),
        "parent_run_ids": [row["parent_run_id"]] if row.get("parent_run_id") else [],
    }
    run = Run.model_validate({**{key: row.get(key) for key in fields}, **own})
    queried.append(run.model_dump_json(exclude_none=True))
save(folder / "langsmith_query.jsonl", "\n".join(queried))
save(folder / "langsmith_feedback.jsonl", "\n".join(map(json.dumps, feedback)))
texts = ("inputs", "outputs", "extra", "events", "serialized", "feedback_stats")  # JSON text in a bulk export
flat = json.loads((folder / "langsmith_runs.json").read_text())["runs"]
columns = sorted({key for row in flat for key in row})
table = [
    {key: json.dumps(row[key]) if key in texts and key in row else row.get(key) for key in columns} for row in flat
]
parquet.write_table(pyarrow.Table.from_pylist(table), folder / "langsmith_export.parquet")

# The same agent by LangChain, whose tracer has messages in LangChain's own form.
runs.clear()
with model_server() as url, tracing_context(enabled=True, client=client):
    chat = ChatOpenAI(model="gpt-4o-mini", base_url=url, api_key="none", max_retries=0, temperature=0.5)
    graph = create_agent(chat, [add], system_prompt="You calculate with tools.", name="calculator")
    graph.invoke({"messages": [("user", "What is 2 + 3?")]}, {"callbacks": [LangChainTracer(client=client)]})
wait_for_all_tracers()
client.flush()
save(folder / "langsmith_langchain.json", json.dumps(list(runs.values())))
