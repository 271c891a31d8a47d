"""The experiment log: what was planned, run, measured and decided, as rows that people browse."""
