"""Agents, reward functions and task functions that cannot be imported: exit code 2, and the lines of the user's code."""

from __future__ import annotations

import platform

import pytest

from tests.mistakes.try_command import Try, write

CALLABLES = """
answer = 42

def nothing(): return 1.0
def two(task, extra): return 1.0
class Agent:
    def __call__(self, task): return 1.0
class Run:
    def solve(self, task): return 1.0
    def lines(self, task): yield 1.0
run = Run()
class Lines:
    def __call__(self, task): yield 1.0
lines = Lines()
def yields(task): yield 1.0
async def yields_async(task): yield 1.0
def one_argument(task): return 1.0
def number(): return 5
def text(): return ["one", "two"]
def broken(): return [{"id": "a"}][1]["id"]
def endless():
    n = 0
    while True:
        yield {"n": n}
        n += 1
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("agent=my_agent", ["found 'my_agent', expected 'module:callable'"]),
        ("agent=my_agent.solve", ["did you mean 'my_agent:solve'?"]),
        ("agent=my_agent.py", ["did you mean 'my_agent:solve'?"]),
        ("agent=./my_agent.py:solve", ["did you mean 'my_agent:solve'?"]),
        ("agent=agents/writer.py:solve", ["did you mean 'agents.writer:solve'?"]),
        ("agent='my_agent:solve()'", ["did you mean 'my_agent:solve'?"]),
        ("agent=my_agent.py:solve", ["names a file; expected a module without .py: 'my_agent:solve'"]),
        ("agent=my_agnt:solve", ["no module 'my_agnt'", "working directory", "did you mean 'my_agent'?"]),
        ("agent=nosuchmodule:solve", ["no module 'nosuchmodule'", "the working directory '/"]),
        ("agent=my_agent:slove", ["the module 'my_agent' has no 'slove'", "did you mean 'solve'?"]),
        ("agent=my-agent:solve", ["a module's name has no '-': rename the file"]),
        ("agent=keyed:solve", ["keyed.py:1, in <module>", "export OPENAI_API_KEY=none"]),
        ("agent=relative:solve", ["relative.py:1, in <module>", "package.module:function in the folder above"]),
        ("agent=package.relative:solve", ["no module 'package.helper' below"]),
        ("run.name=exp/one", ["found 'exp/one'", "without slashes"]),
        ("tasks.train=[train.jsonl]", ["tasks.train: found ['train.jsonl'], expected the path of one file"]),
        ("tasks.train=callables:endless", ["yields more than 1,000,000 tasks, and may never end; set tasks.train.limit"]),
        ("agent=json:solve", ["the module 'json' has no 'solve'", "the module is", "json"]),
        ("agent=callables:answer", ["'callables:answer' is of type int, expected a callable"]),
        ("agent=callables:nothing", ["has the arguments (), but is called with the task"]),
        ("agent=callables:two", ["has the arguments (task, extra), but is called with the task"]),
        ("agent=callables:Agent", ["is a class", "create the object in the module"]),
        ("agent=callables:Run.solve", ["has the arguments (self, task)", "it is a method: create an object in the module"]),
        ("agent=callables:yields", ["'callables:yields' has a yield", "expected a function that returns its result"]),
        ("agent=callables:yields_async", ["'callables:yields_async' has a yield"]),
        ("agent=callables:run.lines", ["'callables:run.lines' has a yield"]),
        ("agent=callables:lines", ["'callables:lines' has a yield"]),
        ("reward=callables:yields", ["reward: 'callables:yields' has a yield"]),
        ("reward=callables:one_argument", ["reward: 'callables:one_argument' has the arguments (task)", "result"]),
        ("reward=callables:nosuch", ["reward: the module 'callables' has no 'nosuch'"]),
        ("tasks.train=callables:number", ["callables:number returned int, expected a list of tasks"]),
        ("tasks.train=callables:text", ["callables:text, task 0: expected a JSON object, found str: 'one'"]),
        ("tasks.train=callables:broken", ["tasks.train: callables:broken failed:\n  callables.py:20, in broken: ", "IndexError"]),
        ("tasks.train=callables:two", ["tasks.train: callables:two failed:", "TypeError"]),
        ("credit.advantage=callables:nosuch", ["credit.advantage: the module 'callables' has no 'nosuch'"]),
        ("algorithm.loss=callables:one_argument", ["algorithm.loss", "one_argument"]),
        ("run.report_to=['callables:nosuch']", ["run.report_to: the module 'callables' has no 'nosuch'"]),
    ],
)  # fmt: skip
def test_a_wrong_callable_is_named(
    attempt: Try, monkeypatch: pytest.MonkeyPatch, setting: str, words: list[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    relative = "from .helper import x"
    keyed = "key = __import__('os').environ['OPENAI_API_KEY']"
    write({"callables.py": CALLABLES, "keyed.py": keyed, "relative.py": relative, "package/relative.py": relative})
    attempt(["train", "lightning.yaml", setting], 2, *words)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "def solve(task)\n    return 1\n",
            ['broken.py", line 1', "def solve(task)", "SyntaxError: expected ':'", f"\nPython {platform.python_version()} read the file"],
        ),
        ("def solve(task):\nreturn 1\n", ["IndentationError", 'broken.py", line 2']),
        ("x = 'half\n", ["SyntaxError: unterminated string literal", 'broken.py", line 1']),
        (
            "import os\nimport nosuchpackage\n",
            [
                "broken.py:2, in <module>: import nosuchpackage",
                "ModuleNotFoundError: No module named 'nosuchpackage'",
                "Install the package that has 'nosuchpackage' for /",
            ],
        ),
        ("import json.nosuch\n", ["The installed 'json' has no 'json.nosuch'"]),
        ("from json import nosuch\n", ["broken.py:1, in <module>: from json import nosuch", "cannot import name 'nosuch'"]),
        ("from .prompts import P\n", ["broken.py:1", "attempted relative import"]),
        ("import helper\n", ["broken.py:1, in <module>: import helper", "helper.py:2, in <module>: ", "NameError: name 'nam'"]),
        ("import os\nKEY = os.environ['NO_SUCH_KEY']\n", ["broken.py:2", "KeyError: 'NO_SUCH_KEY'"]),
        ("open('prompts/nosuch.txt')\n", ["broken.py:1", "FileNotFoundError", "prompts/nosuch.txt"]),
        ("import sys\nsys.exit('no key')\n", ["broken.py:2", "SystemExit: no key", 'if __name__ == "__main__":']),
        ("raise ValueError('\\n'.join(str(i) for i in range(99)))\n", ["broken.py:1", "95 lines more"]),
        ("solve = 1 / 0\n", ["broken.py:1, in <module>: solve = 1 / 0", "ZeroDivisionError"]),
        (
            "import json\ndef read():\n    return json.loads('{')\nDATA = read()\n",
            ["broken.py:4, in <module>: DATA = read()", "broken.py:3, in read: ", "JSONDecodeError: Expecting property"],
        ),
    ],
)  # fmt: skip
def test_an_error_in_the_agents_module_shows_its_lines(attempt: Try, module: str, words: list[str]) -> None:
    write({"broken.py": module, "helper.py": "name = 1\nnam\n"})
    text = attempt(["train", "lightning.yaml", "agent=broken:solve"], 2, "agent: importing 'broken' failed:", *words)
    assert "importlib" not in text
