"""From messages to token ids and back, such that what was sampled is what is trained.

`messages` reads what clients send; `codec` turns it into ids and ids into text, by a `template` and by `token_bytes`.
`tracker` keeps the calls of an episode and decides which earlier call a request goes on from, `continuations` says
where each call's own part begins, `blocks` shows a recorded call message by message. `formats` asks a chat template how
it writes reasoning and tool calls, and `markup` how that shows in sampled tokens; `replies` reads `answers` out of
them, with `reply_parser` and `json_scan`; `forcing` makes a grammar of them, and `conformance` proves at boot that all
of this fits the loaded model. `marks` are the characters that the package keeps for itself. All of it is pure: no
socket, no clock, no database.
"""
