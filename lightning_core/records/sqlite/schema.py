"""The tables of a store."""

VERSION = 3
"""The version of the tables; of the others, `UPGRADES` are opened."""
CONTENTS = """
CREATE TABLE contents (
    rollout TEXT NOT NULL REFERENCES rollouts(id) ON DELETE CASCADE, number INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (rollout, number)
)
"""
"""The messages and token ids that the calls of a rollout share; see `span_rows`."""
SCHEMA = f"""{CONTENTS};
CREATE TABLE rollouts (
    ordinal INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, step INTEGER NOT NULL, task_id TEXT NOT NULL, phase TEXT NOT NULL,
    attempt INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, error TEXT, version INTEGER,
    started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, calls INTEGER NOT NULL, counters TEXT NOT NULL
);
CREATE TABLE spans (
    rollout TEXT NOT NULL REFERENCES rollouts(id) ON DELETE CASCADE, span_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, error TEXT, operation TEXT, agent TEXT, attributes TEXT NOT NULL,
    PRIMARY KEY (rollout, span_id)
) WITHOUT ROWID;
-- Attributes that are bytes: token ids and logprobs.
CREATE TABLE arrays (
    rollout TEXT NOT NULL, span_id TEXT NOT NULL, key TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (rollout, span_id, key),
    FOREIGN KEY (rollout, span_id) REFERENCES spans(rollout, span_id) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE TABLE credit (
    rollout TEXT NOT NULL REFERENCES rollouts(id) ON DELETE CASCADE, call TEXT NOT NULL, agent TEXT NOT NULL,
    step INTEGER NOT NULL, reward REAL NOT NULL, advantage REAL NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (rollout, call)
) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL);
CREATE INDEX rollouts_by_step ON rollouts (phase, step);
CREATE INDEX rollouts_by_task ON rollouts (task_id, step);
-- Older stores of this version do not have it.
CREATE INDEX spans_by_agent ON spans (agent, rollout) WHERE operation = 'chat';
"""

_OF_AN_UPDATE = "phase IN ('train', 'fork', 'judge')"
_TO_VERSION_3 = (CONTENTS, f"PRAGMA user_version = {VERSION}")
UPGRADES = {
    1: (
        f"UPDATE rollouts SET step = step + 1 WHERE {_OF_AN_UPDATE}",
        "UPDATE credit SET step = step + 1",
        *_TO_VERSION_3,
    ),
    2: _TO_VERSION_3,
}
"""The statements that make a store of an earlier version one of this version. Version 1 counted the steps of rollouts from 0; up to
version 2, each call had its whole prompt. Rows stay as they are."""
_IS_FIRST = "(SELECT user_version = 1 FROM pragma_user_version)"
VIEWS = {
    1: (
        f"""CREATE TEMP VIEW rollouts AS SELECT ordinal, id, step + {_IS_FIRST} * ({_OF_AN_UPDATE}) AS step, task_id, phase, attempt,
            status, reward, error, version, started_ns, ended_ns, calls, counters FROM main.rollouts""",
        f"""CREATE TEMP VIEW credit AS SELECT rollout, call, agent, step + {_IS_FIRST} AS step, reward, advantage, tokens
            FROM main.credit""",
    ),
    2: (),
}
"""The views through which a store of an earlier version is read as one of this version, without a change of the file.
Another process may upgrade it while they are in use."""
