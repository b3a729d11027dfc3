"""Records the model calls of a production program as traces. The calls go to their provider, unchanged.

The program's threads copy references to the bytes of requests and responses into a bounded queue; everything else is done on one background
thread. What goes wrong is counted, and does not reach the program.

| file | contents |
|---|---|
| ``recording.py`` | `record`: starts and ends the recording of this process |
| ``units.py`` | the trace of a call: one for each outermost agent, framework run or OpenTelemetry trace |
| ``observed.py`` | one request and its response, as bytes |
| ``clients.py``, ``aiohttp_bodies.py`` | patches of the HTTP client libraries |
| ``background.py`` | the bounded queue and its thread |
| ``wire.py``, ``responses.py`` | bytes → request and responses, by the wire formats of `lightning_core.dialects` |
| ``pipeline.py`` | calls and spans → traces, with the share |
| ``naming.py`` | names of calls by the rules of a configuration |
| ``conversations.py`` | the trace of calls outside any agent: one for each conversation |
| ``spans.py`` | calls → spans, with redaction |
| ``assembling.py`` | spans → traces with a root; rewards by response id |
| ``files.py`` | OTLP files within a limit of their size, and their retention |
| ``counts.py`` | the calls that were recorded and left out, by reason |
| ``served.py`` | the calls of `lightning-rl serve` |
| ``programs.py``, ``startup/`` | recording of a program that another command starts, with its child processes |
"""

from lightning_core.tools.record.recording import CallRecording, record

__all__ = ["CallRecording", "record"]
