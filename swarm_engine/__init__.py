"""The swarm engine: an OpenAI-compatible endpoint that trains the policy it serves.

`client` talks to it, `server` is its front (HTTP, tracker, journal), `worker` holds the weights (trainer and sampler).
Importing this package pulls in nothing heavy.
"""
