"""Who samples: the scripted backend, torch in this process, a vLLM server, verl's servers."""
