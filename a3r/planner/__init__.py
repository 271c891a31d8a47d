"""From a question in plain words to a plan, without a language model; what it can't read it refuses."""
