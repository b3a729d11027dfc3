"""Traces of other systems, read and written.

| file | contents |
|---|---|
| ``formats.py`` | the list of formats, and their recognition |
| ``source_format.py`` | the protocol of a format that is read: documents → spans and scores |
| ``documents.py`` | files → documents: JSON, JSON lines, Parquet, OTLP in protobuf |
| ``messages.py``, ``message_forms.py`` | messages of other APIs as those of chat completions |
| ``spans.py`` | spans of calls, agents and tools |
| ``importing.py`` | documents → rollouts in a folder, each once; counts of what was left out |
| ``exporting.py`` | rollouts of runs and files → one file |
| ``otlp.py``, ``phoenix.py``, ``langfuse.py``, … | one format each |
"""
