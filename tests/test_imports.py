"""Importing is cheap, and the walls between the layers stand."""

import subprocess
import sys


def test_the_core_loads_no_framework_and_no_torch():
    program = (
        "import sys, lightning_core, lightning_core.trainable, lightning_core.capture, lightning_core.transitions, lightning_core.credit\n"
        "heavy = {'torch', 'transformers', 'langchain', 'langchain_core', 'langgraph', 'openai', 'ray', 'verl', 'vllm', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    import lightning_core

    assert len(lightning_core.__all__) <= 20
    for name in lightning_core.__all__:
        assert getattr(lightning_core, name) is not None
