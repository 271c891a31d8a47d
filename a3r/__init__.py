"""Research agents: from a question to a study whose every number can be traced."""
