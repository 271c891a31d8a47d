"""From a game in plain words to a training project, its checks and its training."""
