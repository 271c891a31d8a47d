"""From judged episodes to better weights.

`samples` turns a batch of episodes into trainer input, `advantages` says what each was worth, `loss` is the objective,
`scoring` computes log-probabilities, `adamw` moves the weights, `trainer` ties them together, `checkpoints` keeps the
result, and `cloning` learns from written replies instead of rewards.
"""
