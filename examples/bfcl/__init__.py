"""An OpenAI Agents SDK agent for the multi-turn tasks of the Berkeley Function Calling Leaderboard (BFCL)."""
