"""From judged episodes to better weights.

`samples` turns a batch of episodes into trainer input and says what each was worth, `rows` are its tokens, `algorithms`
are the objectives and `off_policy` what old tokens weigh in them, `scoring` computes log-probabilities, `adamw` moves
the weights, `trainer` ties them together, `checkpoints` keeps the result, and `cloning` learns from written replies
instead of rewards.
"""
