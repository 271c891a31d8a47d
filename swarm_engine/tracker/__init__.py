"""From messages to token ids and back, such that what was sampled is what is trained.

`messages` reads what clients send, `codec` turns it into ids and ids into text, `tracker` keeps the calls of an episode
and decides which earlier call a request goes on from, `blocks` shows a recorded call message by message. `formats` asks
a chat template how it writes reasoning and tool calls, `replies` reads them out of what was sampled, `forcing` makes a
grammar of them, and `conformance` proves at boot that all of this fits the loaded model. All of it is pure: no socket,
no clock, no database.
"""
