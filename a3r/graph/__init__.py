"""The study as a LangGraph graph: six roles, each a subgraph with one job, and a driver that can be killed anywhere."""
